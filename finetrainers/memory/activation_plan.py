"""Which blocks store what for the backward pass, and how much that is. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import TypeVar

from finetrainers.config.facts import Activations
from finetrainers.config.sections import ActivationMemory

T = TypeVar("T")

#: With offloading: blocks whose copies to the host may be under way, so that what they store is on the device as well.
IN_FLIGHT = 2
#: The last blocks, which store on the device, as the first one does: backward begins with them.
LAST = 2


@dataclass(frozen=True)
class ActivationUnits:
    """Activation memory of one micro-batch in U = clips * latent tokens * width * 2 bytes.

    Attributes:
        stored: on the GPU, when forward ends.
        in_forward: what the peak of forward takes besides.
        in_backward: what the peak of backward takes besides.
        on_host: in host memory.
    """

    stored: float
    in_forward: float
    in_backward: float
    on_host: float = 0.0


def spread(blocks: Sequence[T], share: float | None) -> list[T]:
    """A share of the blocks, evenly over the network; None: all of them."""
    share = 1.0 if share is None else share
    return [block for n, block in enumerate(blocks) if floor((n + 1) * share + 0.5) > floor(n * share + 0.5)]


def activation_units(
    counted: Activations, num_blocks: Sequence[int], stored: ActivationMemory, share: float | None = None
) -> ActivationUnits:
    """What blocks store, and the peaks of forward and of backward.

    Args:
        counted: of the family.
        num_blocks: of each list.
        stored: what blocks store.
        share: of the blocks that `stored` holds for; None: all. The others store everything.
    """
    kept = counted.kept * len(num_blocks) if len(counted.kept) == 1 else counted.kept
    blocks = [units for units, number in zip(kept, num_blocks, strict=True) for _ in range(number)]
    recomputed = set() if stored == "none" else set(spread(range(len(blocks)), share))
    attention = counted.attention if stored in ("keep_attention", "offload") else 0.0
    total = forward = backward = 0.0
    for number, units in enumerate(blocks):
        if number in recomputed:
            total += counted.checkpointed
            # Here the block runs for the first time, and again in backward; attention's results are part of what it needs.
            forward, backward = total + counted.forward, total + counted.backward
            total += attention
        else:
            total += units
    if len(recomputed) < len(blocks):
        forward, backward = max(forward, total + counted.outside), max(backward, total + counted.outside)
    if stored != "offload":
        return ActivationUnits(total, forward - total, backward - total)
    # Of several inputs that a block stores, those that others get as well stay on the device.
    own = 1.0 + attention
    offloaded = max(0, len(recomputed) - 1 - LAST) * own
    copying = min(offloaded, IN_FLIGHT * own)
    total -= offloaded
    return ActivationUnits(total, forward - offloaded - total + copying, backward - offloaded - total, offloaded)
