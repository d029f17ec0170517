"""Plan of a block swap: its blocks, their number, and the bytes that it moves. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Blocks that are on the device at a time: one computes while the next is copied.
NUM_SLOTS = 2
_GIB = 2**30


@dataclass(frozen=True)
class SwapSizes:
    """Bytes of a block swap.

    Attributes:
        host: frozen weights of swapped blocks, in pinned host memory.
        slots: buffers on the device that they take turns in.
        copied: from host to device for each micro-batch, forward and backward.
    """

    host: float = 0.0
    slots: float = 0.0
    copied: float = 0.0

    def lines(self) -> list[str]:
        """Return a description for the user; empty without a swap."""
        if not self.host:
            return []
        return [
            f"swapped blocks: {self.host / _GIB:.1f} GiB of pinned host memory for each process, of which each",
            f"micro-batch copies {self.copied / _GIB:.1f} GiB to the GPU",
        ]


#: All blocks stay on the device.
NO_SWAP = SwapSizes()


def chosen_blocks(total: int, number: int) -> list[int]:
    """Return the indices of `number` swapped blocks out of `total`, evenly spaced over their order."""
    return [(2 * index + 1) * total // (2 * number) for index in range(number)]


def swap_sizes(frozen: Sequence[float], number: int) -> SwapSizes:
    """Return the bytes that swapping takes and moves.

    In forward the first blocks are in the slots already, as backward left them. In backward the last ones are.

    Args:
        frozen: bytes of each block's frozen weights, in the order in which blocks compute.
        number: number of swapped blocks.
    """
    if not number:
        return NO_SWAP
    sizes = [frozen[index] for index in chosen_blocks(len(frozen), number)]
    slots = sum(max(sizes[slot::NUM_SLOTS], default=0.0) for slot in range(NUM_SLOTS))
    return SwapSizes(sum(sizes), slots, sum(sizes[NUM_SLOTS:]) + sum(sizes[:-NUM_SLOTS]))


def fewest_blocks(total: int, fits: Callable[[int], bool]) -> int | None:
    """Return the smallest number of swapped blocks that fits, 0 included, or None if not even all `total` fit.

    Evenly spaced, more blocks never take more on the device, so bisection finds the number.
    """
    numbers = (0, *range(NUM_SLOTS + 1, total + 1))
    index = bisect_left(numbers, True, key=fits)
    return numbers[index] if index < len(numbers) else None
