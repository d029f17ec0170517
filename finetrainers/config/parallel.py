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
    """How several processes share the work. The default is what the launcher's file says, else DDP."""

    fsdp: Literal["full", "hybrid"] | None = option(None, "Shard weights, gradients and optimizer state with FSDP2: "
        "over all processes (`full`), or within groups that hold copies of each other (`hybrid`). The default is what "
        "the launcher says.", resume="free")
    fsdp_group_size: int | None = option(None, "Processes that share one copy of the weights with `--fsdp hybrid`. The "
        "default is the processes of one machine.", resume="free", ge=1)
    fsdp_reshard_after_forward: bool = option(True, "Free a block's gathered weights after its forward pass (FSDP2). "
        "Without it, they stay until backward: less communication, more memory.", resume="free")
    fsdp_cpu_offload: bool = option(False, "Keep weights, gradients and optimizer state in host memory, and update the "
        "weights there (FSDP2).", resume="free")
    sync_each_batch: bool = option(False, "Reduce gradients after every micro-batch (FSDP2). No process then keeps "
        "whole gradients, but processes communicate more.", resume="free")
    deepspeed: bool = option(False, "Train with DeepSpeed ZeRO under any launcher. With a DeepSpeed file of "
        "`accelerate launch` it is not needed.", resume="free")
    zero_stage: int = option(2, "ZeRO stage: shard the optimizer state (1), also the gradients (2), also the weights "
        "(3).", resume="free", needs="deepspeed", ge=1, le=3)
    zero_offload: bool = option(False, "Keep the optimizer state in host memory and update the weights there "
        "(DeepSpeed). Stage 3 also keeps the weights there.", resume="free", needs="deepspeed")
    overlap_gradient_exchange: bool = option(True, "Average gradients over processes while the backward pass "
        "computes the rest (DDP). It takes a copy of the gradients on each GPU; without it, they are averaged after "
        "the backward pass.", resume="free")
    sp_size: int = option(1, "Processes that share each clip (sequence parallelism): each stores the activations of "
        "its part of the tokens. It must divide the processes.", resume="free", ge=1)
    sp_mode: SpMode = option("ulysses", "What processes that share a clip exchange for attention. Each computes some "
        "of the heads for all tokens (`ulysses`): `--sp_size` must divide the heads. Or each computes all heads for "
        "its own tokens, while keys and values go around the group (`ring`): for any number of heads.", resume="free")

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
        f"{heads} attention heads do not divide by {size} processes; use one of {', '.join(fitting)}, "
        "or --sp_mode ring"
    )


def ring_problem(backend: str) -> str | None:
    """Return why attention by a backend cannot go around a ring, or None if it can."""
    if backend in ("auto", "native"):
        return None
    return (
        f"ring: parts of the keys are merged by PyTorch's own kernels, not by {backend}; leave --attn_backend out, or "
        "use --sp_mode ulysses"
    )
