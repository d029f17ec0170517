"""Rule for whether planned memory fits a GPU, for the estimate, its advice and a run's choices. Imports no torch."""

from __future__ import annotations

#: Share that the allocator reserves beyond allocated memory, including CUDA's context: published measurements, see
#: `docs/how-to/memory.md`.
RESERVE = 0.15


def reserved(planned: float) -> float:
    """Return the GPU memory that `planned` bytes of tensors need, including the allocator's reserve."""
    return (1 + RESERVE) * planned


def for_tensors(memory: float) -> float:
    """Return the part of a GPU's memory that tensors may take."""
    return memory / (1 + RESERVE)


def fits(planned: float, memory: float) -> bool:
    """Return whether `planned` bytes of tensors fit a GPU with `memory` bytes."""
    return planned <= for_tensors(memory)
