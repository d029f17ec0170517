"""Options of several processes: how the network is split, and by which engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Section


class ParallelSection(Section):
    """How several processes share the work; a launcher's file may say it too. Else each holds everything (DDP)."""

    fsdp: Literal["full", "hybrid"] | None = Field(
        None,
        description="FSDP2: split weights, gradients and optimizer state over all processes (`full`), "
        "or within groups that are copies of each other (`hybrid`); default: as launched.",
    )
    fsdp_group_size: int | None = Field(
        None,
        ge=1,
        description="Processes that share one copy of the weights with `hybrid`; default: those of one machine.",
    )
    fsdp_reshard_after_forward: bool = Field(
        True,
        description="FSDP2 gives a block's gathered weights up after its forward pass; off, they stay until backward: "
        "less communication, more memory.",
    )
    fsdp_cpu_offload: bool = Field(
        False, description="FSDP2 keeps weights, gradients and optimizer state in host memory, and updates there."
    )
    sync_each_batch: bool = Field(
        False,
        description="With FSDP2, exchange gradients after every micro-batch: no process keeps whole ones "
        "between them, but all communicate more.",
    )
    deepspeed: bool = Field(
        False,
        description="Train with DeepSpeed ZeRO under any launcher (`deepspeed`, `torchrun`); a DeepSpeed file of "
        "`accelerate launch` needs no flag.",
    )
    zero_stage: int = Field(
        2,
        ge=1,
        le=3,
        description="With `deepspeed`, what is split: optimizer state (1), gradients too (2), weights too (3).",
    )
    zero_offload: bool = Field(
        False,
        description="With `deepspeed`, keep optimizer state in host memory and update there; with stage 3 weights too.",
    )
    sp_size: int = Field(
        1, ge=1, description="Processes that share one clip (sequence parallelism); more than 1 is not supported yet."
    )
