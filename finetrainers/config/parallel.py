"""Options of several processes: sharding strategy and sequence parallelism."""

from __future__ import annotations

from typing import Literal

from finetrainers.utils.text import plural

from .base import Section
from .option import option

#: Exchange of attention inputs between the processes that share a clip.
SpMode = Literal["ulysses", "ring"]


# fmt: off
class ParallelSection(Section):
    """Distribution of the work among processes. The default is the setting of the launcher's file, else DDP."""

    fsdp: Literal["full", "hybrid"] | None = option(None, "Shard weights, gradients and optimizer state with FSDP2: "
        "over all processes (`full`), or within replicated groups (`hybrid`). The default is the launcher's setting.",
        resume="free")
    fsdp_group_size: int | None = option(None, "Processes that share one copy of the weights with `--fsdp hybrid`. The "
        "default is the processes of one machine.", resume="free", ge=1)
    fsdp_reshard_after_forward: bool = option(True, "Free a block's gathered weights after its forward pass (FSDP2). "
        "Without it, they stay until backward: less communication, more memory.", resume="free")
    fsdp_cpu_offload: bool = option(False, "Keep weights, gradients and optimizer state in host memory, and update the "
        "weights there (FSDP2).", resume="free")
    sync_each_batch: bool = option(False, "Reduce gradients after every micro-batch (FSDP2). No process then keeps "
        "whole gradients, but processes communicate more.", resume="free")
    deepspeed: bool = option(False, "Train with DeepSpeed ZeRO under any launcher. It is not needed with an "
        "`accelerate launch` file that sets DeepSpeed.", resume="free")
    zero_stage: int = option(2, "ZeRO stage: shard the optimizer state (1), also the gradients (2), also the weights "
        "(3).", resume="free", needs="deepspeed", ge=1, le=3)
    zero_offload: bool = option(False, "Keep the optimizer state in host memory and update the weights there "
        "(DeepSpeed). Stage 3 also keeps the weights there.", resume="free", needs="deepspeed")
    overlap_gradient_exchange: bool = option(True, "Average gradients over processes during the backward pass (DDP), "
        "which needs a copy of the gradients on each GPU. Without it, they are averaged after the backward pass.",
        resume="free")
    sp_size: int = option(1, "Processes that share each clip (sequence parallelism); each stores the activations of "
        "its part of the tokens. It must divide the number of processes.", resume="free", ge=1)
    sp_mode: SpMode = option("ulysses", "How processes that share a clip split attention: by heads (`ulysses`; "
        "`sp_size` must divide their number), or by tokens, passing keys and values around the group (`ring`).",
        resume="free")

    def data_size(self, processes: int) -> int:
        """Return how many of `processes` processes train on separate clips."""
        return max(1, processes // self.sp_size)

    @property
    def unit(self) -> str:
        """Unit that trains on separate clips, as text for messages."""
        return "process" if self.sp_size == 1 else f"group of {self.sp_size} processes"


def groups_problem(processes: int, size: int) -> str:
    """Return why `processes` processes cannot form groups of `size`."""
    count = plural(processes, "process does", "processes do")
    return (
        f"{count} not divide into groups of {size}; start a multiple of {size} by a launcher "
        "(torchrun --nproc_per_node)"
    )


def heads_problem(heads: int, size: int) -> str:
    """Return why a network with `heads` attention heads cannot be split over `size` processes."""
    fitting = [str(n) for n in range(2, heads + 1) if heads % n == 0]
    return (
        f"must divide the {heads} attention heads, got {size}; use one of {', '.join(fitting)}, or --sp_mode ring"
    )


def ring_problem(backend: str) -> str | None:
    """Return why attention by a backend cannot go around a ring, or None if it can."""
    if backend in ("auto", "native"):
        return None
    return (
        f"ring: {backend} cannot merge parts of the keys as PyTorch's own kernels do; remove --attn_backend, or use "
        "--sp_mode ulysses"
    )
