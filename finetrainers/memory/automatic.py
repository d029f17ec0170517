"""What a run chooses itself: the variant of its method, how rollouts are decoded, how many blocks are swapped, what blocks store,
where parts wait.

The estimate, its advice and a run choose by one rule, that every phase fits the memory that tensors may take (`memory.fit`).
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from finetrainers.config.root import TrainConfig
from finetrainers.methods.registry import method_spec
from finetrainers.methods.spec import Variant
from finetrainers.parallel.sharding import WHOLE, Split
from finetrainers.utils.phases import REWARD, ROLLOUT, VALIDATION

from .activation_auto import ASSUMED_FLOPS, ASSUMED_LINK, ActivationModel, with_choice
from .activation_plan import Choice, Machine
from .phases import RunPlan
from .swap_plan import fewest_blocks

#: Options of the VAE that are chosen where they are left open, with what each does; exact ones first.
_DECODING = {
    "enable_slicing": "clips of rollouts are decoded one by one",
    "enable_tiling": "clips of rollouts are decoded in tiles, which changes them slightly",
}


@dataclass(frozen=True)
class Run:
    """A run, as its options change.

    Attributes:
        plan: its memory.
        model: memory and time of its training step.
        num_blocks: of its network.
        may_offload_samples: whether the model's parts may wait in host memory while it samples.
        decodes: whether it decodes clips that it has sampled, to train on them.
        split: what its processes share.
    """

    plan: Callable[[TrainConfig], RunPlan]
    model: Callable[[TrainConfig], ActivationModel]
    num_blocks: int
    may_offload_samples: bool
    decodes: bool = False
    split: Split = WHOLE


@dataclass(frozen=True)
class Automatic:
    """What stands in the place of `auto`.

    Attributes:
        config: the run with what was chosen.
        plan: its memory.
        machine: that it was chosen for; None: no GPU is known, all blocks are counted as swapped, and all activations as
            stored.
        model: of its training step, with all but the activations chosen.
        num_blocks: of the network.
        swapped: how many of them are swapped, where that was to be chosen.
        activations: what blocks store, where that was to be chosen.
        offloads_samples: whether the model's parts wait in host memory while it samples, where that was to be chosen.
        decoding: options of the VAE that are turned on, where they were to be chosen.
        variant: of the method, where that was to be chosen.
    """

    config: TrainConfig
    plan: RunPlan
    machine: Machine | None
    model: ActivationModel
    num_blocks: int
    swapped: int | None = None
    activations: Choice | None = None
    offloads_samples: bool | None = None
    decoding: tuple[str, ...] = ()
    variant: Variant | None = None

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return self.machine is None or self.plan.peak <= self.machine.device

    @property
    def words(self) -> dict[str, str]:
        """What is chosen, by the name of the option that leaves it open."""
        found = {}
        if self.swapped is not None:
            found["blocks_to_swap"] = f"{self.swapped} of {self.num_blocks} blocks"
        if self.activations is not None:
            found["activation_memory"] = self.activations.what
        if self.offloads_samples:
            found["enable_model_cpu_offload"] = "samples are drawn with the model's parts in host memory"
        if self.variant is not None:
            found[self.variant.option] = self.variant.what
        return found | {name: _DECODING[name] for name in self.decoding}

    @property
    def slower(self) -> float:
        """By how much a step takes longer than one that recomputes and copies nothing, as a share; 0: not known."""
        return 0.0 if self.machine is None else self.model.slower(self.config, self.machine)


def choose_automatic(config: TrainConfig, run: Run, machine: Machine | None) -> Automatic:
    """Choose what the options leave open; of the variants of the method the fastest with which every phase fits."""
    variants = method_spec(config).variants(config, run.split)
    if not variants:
        return _choose(config, run, machine)
    found = [replace(_choose(variant.config, run, machine), variant=variant) for variant in variants]
    fitting = [one for one in found if one.fits]
    # Tiles change clips, and a variant changes nothing.
    return min(fitting, key=lambda one: ("enable_tiling" in one.decoding, _cost(one))) if fitting else _smallest(found)


def _smallest(found: Sequence[Automatic]) -> Automatic:
    return min(found, key=lambda one: one.plan.peak)


def _cost(found: Automatic) -> float:
    """Forward passes for a clip that take as long."""
    assert found.variant is not None
    machine = found.machine or Machine(inf, inf, ASSUMED_FLOPS, ASSUMED_LINK)
    return found.variant.cost(found.model.slower(found.config, machine))


def _choose(config: TrainConfig, run: Run, machine: Machine | None) -> Automatic:
    """All but the variant.

    First clips of rollouts are decoded one by one, or in tiles, and samples drawn with the model's parts in host memory, each
    if they would not fit otherwise. Then the fewest blocks are swapped with which every phase fits, and last the fastest way to
    store activations is taken.
    """
    memory, asked = config.memory, config.validation.enable_model_cpu_offload
    swaps, stores = memory.blocks_to_swap == "auto", memory.activation_memory == "auto"
    if machine is None:
        config = with_choice(config, None) if stores else config
        counted = run.num_blocks if swaps else None
        return Automatic(config, run.plan(config), None, run.model(config), run.num_blocks, swapped=counted)
    config, decoding = _with_decoding(config, run, machine.device) if run.decodes else (config, ())
    offloads = None
    if asked is None and run.may_offload_samples:
        in_place = _with_swap(config, run, machine.device, besides=VALIDATION)
        offloads = run.plan(in_place).peaks.get(VALIDATION, 0.0) > machine.device
        config = with_samples(config if offloads else in_place, offloads=offloads)
    config = _with_swap(config, run, machine.device)
    model, choice = run.model(config), None
    if stores:
        choice = model.choose(machine)
        config = with_choice(config, choice)
    swapped = config.memory.blocks_to_swap if swaps else None
    assert swapped != "auto"
    return Automatic(
        config, run.plan(config), machine, model, run.num_blocks, swapped=swapped, activations=choice,
        offloads_samples=offloads, decoding=decoding,
    )  # fmt: skip


def with_blocks_to_swap(config: TrainConfig, number: int) -> TrainConfig:
    """The configuration with so many swapped blocks."""
    return config.model_copy(update={"memory": config.memory.model_copy(update={"blocks_to_swap": number})})


def with_samples(config: TrainConfig, *, offloads: bool) -> TrainConfig:
    """The configuration in which the model's parts wait in host memory while it samples, or do not."""
    section = config.validation.model_copy(update={"enable_model_cpu_offload": offloads})
    return config.model_copy(update={"validation": section})


def _with_decoding(config: TrainConfig, run: Run, room: float) -> tuple[TrainConfig, tuple[str, ...]]:
    """With what makes decoding fit, and the options that this takes.

    One by one, clips are the same, so this comes before blocks are swapped for it. Tiles change them, so they come after.
    """
    chosen: list[str] = []
    for name in _DECODING:
        if getattr(config.model, name) is not None:
            continue
        changed = config.model_copy(update={"model": config.model.model_copy(update={name: True})})
        swapped = _with_swap(changed if name == "enable_slicing" else config, run, room).memory.blocks_to_swap
        assert swapped != "auto"
        before, after = (run.plan(with_blocks_to_swap(one, swapped)).peaks for one in (config, changed))
        phases = [phase for phase in (ROLLOUT, REWARD) if phase in before]
        if any(before[phase] > room and after[phase] < before[phase] for phase in phases):
            config = changed
            chosen.append(name)
    return config, tuple(chosen)


def _with_swap(config: TrainConfig, run: Run, room: float, *, besides: str | None = None) -> TrainConfig:
    """With the fewest swapped blocks with which every phase fits, or takes as little as with all blocks swapped.

    Args:
        config: the run.
        run: its memory.
        room: bytes that tensors may take.
        besides: a phase that does not count.
    """
    if config.memory.blocks_to_swap != "auto":
        return config
    least = run.plan(with_blocks_to_swap(config, run.num_blocks)).peaks

    def enough(number: int) -> bool:
        peaks = run.plan(with_blocks_to_swap(config, number)).peaks
        return all(peak <= max(room, least[phase]) for phase, peak in peaks.items() if phase != besides)

    number = fewest_blocks(run.num_blocks, enough)
    return with_blocks_to_swap(config, run.num_blocks if number is None else number)
