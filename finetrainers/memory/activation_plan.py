"""Activations that blocks store for the backward pass: their size, and the choice of a setting. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor
from typing import Any, TypeVar

from finetrainers.config.facts import Activations
from finetrainers.config.sections import ActivationMemory
from finetrainers.utils.text import file_size

T = TypeVar("T")

#: With offloading: blocks whose copies to the host may be under way, so that their activations are also on the device.
IN_FLIGHT = 2
#: Number of last blocks that store on the device, like the first block: backward begins with them.
LAST = 2


@dataclass(frozen=True)
class ActivationUnits:
    """Activation memory of one micro-batch in U = clips * latent tokens * width * 2 bytes.

    Attributes:
        stored: on the GPU, when forward ends.
        in_forward: memory at the peak of forward, beyond `stored`.
        in_backward: memory at the peak of backward, beyond `stored`.
        on_host: in host memory.
    """

    stored: float
    in_forward: float
    in_backward: float
    on_host: float = 0.0


def select_evenly(blocks: Sequence[T], share: float | None) -> list[T]:
    """Return a share of the blocks, evenly over the network, or all if `share` is None."""
    share = 1.0 if share is None else share
    return [block for n, block in enumerate(blocks) if floor((n + 1) * share + 0.5) > floor(n * share + 0.5)]


@lru_cache(maxsize=4096)
def activation_units(
    counted: Activations, num_blocks: tuple[int, ...], stored: ActivationMemory, share: float | None = None
) -> ActivationUnits:
    """Return the stored activations, and those at the peaks of forward and of backward.

    Args:
        counted: of the family.
        num_blocks: of each list.
        stored: what blocks store.
        share: of the blocks that `stored` holds for, or None for all. The others store everything.
    """
    units_by_list = counted.kept * len(num_blocks) if len(counted.kept) == 1 else counted.kept
    blocks = [units for units, number in zip(units_by_list, num_blocks, strict=True) for _ in range(number)]
    recomputed = set() if stored == "none" else set(select_evenly(range(len(blocks)), share))
    attention = counted.attention if stored in ("keep_attention", "offload") else 0.0
    total = forward = backward = 0.0
    for number, units in enumerate(blocks):
        if number in recomputed:
            total += counted.checkpointed
            # The block runs here for the first time, and again in backward; its needs include attention's results.
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


# ---- the choice (`--activation_memory auto`) -------------------------------------------------------------------------

#: Settings, the simplest first.
SETTINGS: tuple[ActivationMemory, ...] = ("none", "checkpoint", "keep_attention", "offload")
#: `Machine.launch` of a GPU, and how many times as long launching takes with each setting: hooks of autograd, and for
#: the last two a mode that sees every operation. Measured with LoRAs of 28 blocks on hosts of an H200
#: (`benchmarks/results/gpu.md`): 0.30 s.
LAUNCH_S = 0.0105
_LAUNCHES: dict[ActivationMemory, float] = {"none": 1.0, "checkpoint": 1.4, "keep_attention": 2.2, "offload": 3.0}
#: The simpler of two settings is chosen if its step takes at most this share longer.
_AS_FAST = 0.005


@dataclass(frozen=True)
class StepWork:
    """Operations and copies of a micro-batch, independent of what blocks store.

    Attributes:
        forward, backward: floating-point operations.
        attention: operations of `forward` in attention.
        copied: bytes that a block swap copies to the device, in forward and in backward together.
        blocks: number of blocks.
    """

    forward: float
    backward: float
    attention: float
    copied: float = 0.0
    blocks: int = 0


@dataclass(frozen=True)
class Machine:
    """Memory and speed that a process has.

    Attributes:
        device: bytes on the device that tensors of all networks may take.
        host: bytes of host memory that activations and swapped blocks may take.
        flops: operations a second.
        link: bytes a second between host and device, in each direction.
        launch: seconds in which the host launches the kernels of a block that stores everything, forward and backward.
    """

    device: float
    host: float
    flops: float
    link: float
    launch: float = 0.0


@dataclass(frozen=True)
class ActivationPolicy:
    """Chosen setting of what blocks store, with its memory and time.

    Attributes:
        stored, number: the setting, and the number of blocks that it holds for.
        total: number of all blocks.
        device, host: bytes that a process is planned to take.
        slower: additional time of a step relative to one that stores everything, as a share.
        fits: whether the device and the host have enough memory.
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
        """The value of `selective_checkpointing`, or None for all blocks or none."""
        return None if self.number in (0, self.total) else self.number / self.total

    @property
    def options(self) -> dict[str, Any]:
        """The options that set it."""
        return {"activation_memory": self.stored, "selective_checkpointing": self.share}

    @property
    def what(self) -> str:
        """Description of the choice."""
        if self.stored == "none":
            return "none"
        return f"{self.stored} for {'all' if self.number == self.total else self.number} of {self.total} blocks"

    def why(self, machine: Machine) -> str:
        """Return the reason for the choice, with the memory that it takes."""
        planned = f"{file_size(self.device)} of {file_size(machine.device)}"
        if not self.fits:
            return f"nothing fits, {planned}: {file_size(self.device - machine.device)} are missing"
        if self.stored == "none":
            return f"all activations fit, {planned}"
        host = f", {file_size(self.host)} of host memory" if self.host else ""
        return f"the fastest that fits, {planned}{host}, {self.slower:.0%} slower than none"


#: Function that returns the bytes on the device and on the host with a setting for a number of blocks.
Sizes = Callable[[ActivationMemory, int], tuple[float, float]]


def choose(
    total: int, sizes: Sizes, work: StepWork, machine: Machine, *, settings: Sequence[ActivationMemory] = SETTINGS,
    all_blocks: bool = False,
) -> ActivationPolicy:  # fmt: skip
    """Return the fastest setting that fits, or checkpointing of all blocks if none does.

    Each setting holds for as few blocks as make it fit.

    Args:
        total: number of blocks.
        sizes: the estimate.
        work: of a micro-batch.
        machine: that it runs on.
        settings: to choose from, the simplest first.
        all_blocks: whether a setting must hold for all blocks.
    """

    fitting: list[ActivationPolicy] = []
    for stored in settings:
        for number in (0,) if stored == "none" else (total,) if all_blocks else range(1, total + 1):
            policy = make_policy(stored, number, total, sizes, work, machine)
            if policy.fits:
                fitting.append(policy)
                break
    if not fitting:
        return replace(make_policy("checkpoint", total, total, sizes, work, machine), fits=False)
    fastest = min(candidate.slower for candidate in fitting)
    return next(candidate for candidate in fitting if candidate.slower <= fastest + _AS_FAST)


def make_policy(
    stored: ActivationMemory, number: int, total: int, sizes: Sizes, work: StepWork, machine: Machine
) -> ActivationPolicy:
    """Return a setting for `number` of `total` blocks, with its memory and time; see `choose`."""
    device, host = sizes(stored, number)
    plain = step_seconds(work, machine, "none", 0.0, 0.0)
    slower = step_seconds(work, machine, stored, number / total, host) / plain - 1
    fits = device <= machine.device and host <= machine.host
    return ActivationPolicy(stored, number, total, device, host, slower, fits)


def recomputed(work: StepWork, stored: ActivationMemory, share: float) -> float:
    """Return the operations that backward repeats, assuming equal blocks."""
    return share * (work.forward - (work.attention if stored in ("keep_attention", "offload") else 0.0))


def step_seconds(work: StepWork, machine: Machine, stored: ActivationMemory, share: float, host: float) -> float:
    """Return the seconds of a micro-batch, which waits for what computing does not hide of copies and launches."""
    forward, backward = work.forward, work.backward + recomputed(work, stored, share)
    to_device = work.copied / 2
    copies = max(host, to_device) / machine.link, (host + to_device) / machine.link
    computing = max(forward / machine.flops, copies[0]) + max(backward / machine.flops, copies[1])
    return max(computing, work.blocks * machine.launch * (1 + share * (_LAUNCHES[stored] - 1)))
