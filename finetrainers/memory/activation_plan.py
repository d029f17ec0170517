"""Which blocks store what for the backward pass, how much that is, and the choice of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor
from typing import TypeVar

from finetrainers.config.facts import Activations
from finetrainers.config.sections import ActivationMemory
from finetrainers.utils.text import file_size

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
    own = counted.checkpointed + attention
    offloaded = max(0, len(recomputed) - 1 - LAST) * own
    copying = min(offloaded, IN_FLIGHT * own)
    total -= offloaded
    return ActivationUnits(total, forward - offloaded - total + copying, backward - offloaded - total, offloaded)


# ---- the choice (`--activation_memory auto`) -----------------------------------------------------------------------------

#: Settings, the simplest first.
SETTINGS: tuple[ActivationMemory, ...] = ("none", "checkpoint", "keep_attention", "offload")
#: Of two settings whose steps take as long, up to this share, the simpler one is chosen.
_AS_FAST = 0.005


@dataclass(frozen=True)
class StepWork:
    """What a micro-batch computes and copies, whatever blocks store.

    Attributes:
        forward, backward: floating-point operations.
        attention: those of `forward` in the attentions.
        copied: bytes that a block swap copies to the device, in forward and in backward together.
    """

    forward: float
    backward: float
    attention: float
    copied: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What a process has to compute with.

    Attributes:
        device: bytes on the device that tensors may take, those of all networks.
        host: bytes of host memory that activations and swapped blocks may take.
        flops: operations a second.
        link: bytes a second between host and device, in each direction.
    """

    device: float
    host: float
    flops: float
    link: float


@dataclass(frozen=True)
class Choice:
    """What blocks store, and what comes of it.

    Attributes:
        stored, number: the setting, and how many of the blocks it holds for.
        total: all blocks.
        device, host: bytes that a process is planned to take.
        slower: how much longer a step takes than one that stores everything, as a share.
        fits: whether the device and the host have as much.
    """

    stored: ActivationMemory
    number: int
    total: int
    device: float
    host: float
    slower: float
    fits: bool = True

    @property
    def share(self) -> float | None:
        """As `selective_checkpointing`."""
        return None if self.number in (0, self.total) else self.number / self.total

    @property
    def what(self) -> str:
        """What is chosen."""
        if self.stored == "none":
            return "none"
        return f"{self.stored} for {'all' if self.number == self.total else self.number} of {self.total} blocks"

    def why(self, machine: Machine) -> str:
        """Why, and what it takes."""
        planned = f"{file_size(self.device)} of {file_size(machine.device)}"
        if not self.fits:
            return f"nothing fits, {planned}: {file_size(self.device - machine.device)} are missing"
        if self.stored == "none":
            return f"all activations fit, {planned}"
        host = f", {file_size(self.host)} of host memory" if self.host else ""
        return f"the fastest that fits, {planned}{host}, {100 * self.slower:.0f} % slower than none"


#: Bytes on the device and on the host with a setting for so many blocks.
Sizes = Callable[[ActivationMemory, int], tuple[float, float]]


def choose(
    total: int, sizes: Sizes, work: StepWork, machine: Machine, *, settings: Sequence[ActivationMemory] = SETTINGS,
    whole: bool = False,
) -> Choice:  # fmt: skip
    """The setting with which a step takes least time, of those that fit; all blocks checkpointed if none does.

    Each setting holds for the fewest blocks with which it fits.

    Args:
        total: number of blocks.
        sizes: the estimate.
        work: of a micro-batch.
        machine: that it runs on.
        settings: to choose from, the simplest first.
        whole: whether a setting must hold for all blocks.
    """

    def choice(stored: ActivationMemory, number: int, *, fits: bool = True) -> Choice:
        device, host = sizes(stored, number)
        slower = (
            step_seconds(work, machine, stored, number / total, host) / step_seconds(work, machine, "none", 0.0, 0.0)
            - 1
        )
        return Choice(stored, number, total, device, host, slower, fits)

    fitting: list[Choice] = []
    for stored in settings:
        for number in (0,) if stored == "none" else (total,) if whole else range(1, total + 1):
            device, host = sizes(stored, number)
            if device <= machine.device and host <= machine.host:
                fitting.append(choice(stored, number))
                break
    if not fitting:
        return choice("checkpoint", total, fits=False)
    least = min(one.slower for one in fitting)
    return next(one for one in fitting if one.slower <= least + _AS_FAST)


def recomputed(work: StepWork, stored: ActivationMemory, share: float) -> float:
    """Operations that backward repeats, of blocks that are taken to be equal."""
    return share * (work.forward - (work.attention if stored in ("keep_attention", "offload") else 0.0))


def step_seconds(work: StepWork, machine: Machine, stored: ActivationMemory, share: float, host: float) -> float:
    """Seconds of a micro-batch: what computing does not hide of copies is waited for."""
    forward, backward = work.forward, work.backward + recomputed(work, stored, share)
    to_device = work.copied / 2
    copies = max(host, to_device) / machine.link, (host + to_device) / machine.link
    return max(forward / machine.flops, copies[0]) + max(backward / machine.flops, copies[1])
