"""Whether planned memory fits a GPU: the one rule of the estimate, of its advice, and of what a run chooses. Imports no torch."""

from __future__ import annotations

#: What the allocator reserves beyond what is allocated, CUDA's context included: published measurements, see `docs/how-to/memory.md`.
RESERVE = 0.15


def reserved(planned: float) -> float:
    """What tensors that are planned to take so much take of a GPU's memory."""
    return (1 + RESERVE) * planned


def for_tensors(memory: float) -> float:
    """How much of a GPU's memory tensors may take."""
    return memory / (1 + RESERVE)


def fits(planned: float, memory: float) -> bool:
    """Whether tensors that are planned to take so much fit so much of a GPU's memory."""
    return planned <= for_tensors(memory)
