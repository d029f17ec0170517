"""Rules for whether planned memory fits a GPU and a machine, for the estimate, its advice, and a run. No torch."""

from __future__ import annotations

#: Share that the allocator reserves beyond allocated memory, including CUDA's context: published measurements, see
#: `docs/reference/memory-estimate.md`.
RESERVE = 0.15
#: Share of a machine's memory that is left to the operating system and other programs.
HOST_RESERVE = 0.05


def with_reserve(planned: float) -> float:
    """Return the GPU memory that `planned` bytes of tensors need, including the allocator's reserve."""
    return (1 + RESERVE) * planned


def without_reserve(memory: float) -> float:
    """Return the bytes that tensors may take of `memory` bytes of a GPU, without the allocator's reserve."""
    return memory / (1 + RESERVE)


def fits(planned: float, memory: float) -> bool:
    """Return whether `planned` bytes of tensors fit a GPU with `memory` bytes."""
    return planned <= without_reserve(memory)


def usable_host(memory: float) -> float:
    """Return the bytes that the processes of a run may take of a machine with `memory` bytes."""
    return (1 - HOST_RESERVE) * memory
