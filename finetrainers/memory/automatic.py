"""Settings that a run chooses itself: variant of the method, decoding of rollouts, number of swapped blocks, activation
memory, and where parts wait.

The estimate, its advice and a run choose by one rule, that every phase fits the memory that tensors may take
(`memory.fit`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from finetrainers.config.root import TrainConfig
from finetrainers.methods.registry import method_spec
from finetrainers.methods.spec import Variant
from finetrainers.parallel.sharding import WHOLE, ShardingSpec
from finetrainers.utils.phases import REWARD, ROLLOUT, VALIDATION

from .activation_auto import ASSUMED_FLOPS, ASSUMED_LINK, ActivationModel, with_choice
from .activation_plan import ActivationPolicy, Machine
from .phases import RunPlan
from .swap_plan import fewest_blocks

#: Options of the VAE that are chosen where they are left open, with the effect of each; exact ones first.
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
    split: ShardingSpec = WHOLE


@dataclass(frozen=True)
class AutoSettings:
    """Values chosen for options that are `auto` or left open.

    Attributes:
        config: the run with the choices.
        plan: its memory.
        machine: machine of the choices, or None if no GPU is known: all blocks are counted as swapped, and all
            activations as stored.
        model: of its training step, with all choices but that of activations.
        num_blocks: of the network.
        swapped: number of swapped blocks, if it was to be chosen.
        activations: what blocks store, if it was to be chosen.
        offloads_samples: whether the model's parts wait in host memory while it samples, if that was to be chosen.
        decoding: options of the VAE that are turned on, if they were to be chosen.
        variant: of the method, if it was to be chosen.
    """

    config: TrainConfig
    plan: RunPlan
    machine: Machine | None
    model: ActivationModel
    num_blocks: int
    swapped: int | None = None
    activations: ActivationPolicy | None = None
    offloads_samples: bool | None = None
    decoding: tuple[str, ...] = ()
    variant: Variant | None = None

    @property
    def fits(self) -> bool:
        """True if every phase fits, or no machine is known."""
        return self.machine is None or self.plan.peak <= self.machine.device

    @property
    def words(self) -> dict[str, str]:
        """Descriptions of the choices, by the name of the option that leaves it open."""
        descriptions = {}
        if self.swapped is not None:
            descriptions["blocks_to_swap"] = f"{self.swapped} of {self.num_blocks} blocks"
        if self.activations is not None:
            descriptions["activation_memory"] = self.activations.what
        if self.offloads_samples:
            descriptions["enable_model_cpu_offload"] = "samples are drawn with the model's parts in host memory"
        if self.variant is not None:
            descriptions[self.variant.option] = self.variant.what
        return descriptions | {name: _DECODING[name] for name in self.decoding}

    @property
    def slower(self) -> float:
        """Additional time of a step relative to one that recomputes and copies nothing, as a share; 0 if unknown."""
        return 0.0 if self.machine is None else self.model.slower(self.config, self.machine)


def choose_automatic(config: TrainConfig, run: Run, machine: Machine | None) -> AutoSettings:
    """Choose the settings that the options leave open, and the method's fastest variant that makes every phase fit."""
    variants = method_spec(config).variants(config, run.split)
    if not variants:
        return _choose(config, run, machine)
    candidates = [replace(_choose(variant.config, run, machine), variant=variant) for variant in variants]
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return min(candidates, key=lambda candidate: candidate.plan.peak)
    # Tiles change clips, and a variant changes nothing.
    return min(fitting, key=lambda candidate: ("enable_tiling" in candidate.decoding, _cost(candidate)))


def _cost(candidate: AutoSettings) -> float:
    """Return the cost of a clip in forward passes."""
    assert candidate.variant is not None
    machine = candidate.machine or Machine(inf, inf, ASSUMED_FLOPS, ASSUMED_LINK)
    return candidate.variant.cost(candidate.model.slower(candidate.config, machine))


def _choose(config: TrainConfig, run: Run, machine: Machine | None) -> AutoSettings:
    """Choose all settings but the variant.

    First clips of rollouts are decoded one by one, or in tiles, and samples drawn with the model's parts in host
    memory, each if they would not fit otherwise. Then as few blocks are swapped as make every phase fit, and last the
    fastest way to store activations is taken.
    """
    memory, offload_option = config.memory, config.validation.enable_model_cpu_offload
    swaps, stores = memory.blocks_to_swap == "auto", memory.activation_memory == "auto"
    if machine is None:
        config = with_choice(config, None) if stores else config
        counted = run.num_blocks if swaps else None
        return AutoSettings(config, run.plan(config), None, run.model(config), run.num_blocks, swapped=counted)
    config, decoding = _with_decoding(config, run, machine.device) if run.decodes else (config, ())
    offloads = None
    if offload_option is None and run.may_offload_samples:
        in_place = _with_swap(config, run, machine.device, except_phase=VALIDATION)
        offloads = run.plan(in_place).peaks.get(VALIDATION, 0.0) > machine.device
        config = with_samples(config if offloads else in_place, offloads=offloads)
    config = _with_swap(config, run, machine.device)
    model, choice = run.model(config), None
    if stores:
        choice = model.choose(machine)
        config = with_choice(config, choice)
    swapped = config.memory.blocks_to_swap if swaps else None
    assert swapped != "auto"
    return AutoSettings(
        config, run.plan(config), machine, model, run.num_blocks, swapped=swapped, activations=choice,
        offloads_samples=offloads, decoding=decoding,
    )  # fmt: skip


def with_blocks_to_swap(config: TrainConfig, number: int) -> TrainConfig:
    """Return a copy of `config` with `blocks_to_swap=number`."""
    return config.with_values({"blocks_to_swap": number})


def with_samples(config: TrainConfig, *, offloads: bool) -> TrainConfig:
    """Return a copy of `config` with `enable_model_cpu_offload=offloads` for samples."""
    return config.with_values({"enable_model_cpu_offload": offloads})


def _with_decoding(config: TrainConfig, run: Run, limit: float) -> tuple[TrainConfig, tuple[str, ...]]:
    """Return a configuration whose decoding fits `limit` bytes if possible, and the options that it turns on for that.

    Decoding one by one leaves clips the same, so it comes before swapping blocks. Tiles change clips, so they come
    after it.
    """
    chosen: list[str] = []
    for name in _DECODING:
        if getattr(config.model, name) is not None:
            continue
        changed = config.with_values({name: True})
        swapped = _with_swap(changed if name == "enable_slicing" else config, run, limit).memory.blocks_to_swap
        assert swapped != "auto"
        before, after = (run.plan(with_blocks_to_swap(variant, swapped)).peaks for variant in (config, changed))
        phases = [phase for phase in (ROLLOUT, REWARD) if phase in before]
        if any(before[phase] > limit and after[phase] < before[phase] for phase in phases):
            config = changed
            chosen.append(name)
    return config, tuple(chosen)


def _with_swap(config: TrainConfig, run: Run, limit: float, *, except_phase: str | None = None) -> TrainConfig:
    """Return a copy of `config` with as few swapped blocks as make every phase fit, or as small as with all swapped.

    Args:
        config: the run.
        run: its memory.
        limit: bytes that tensors may take.
        except_phase: a phase that does not count.
    """
    if config.memory.blocks_to_swap != "auto":
        return config
    lowest = run.plan(with_blocks_to_swap(config, run.num_blocks)).peaks

    def is_enough(number: int) -> bool:
        peaks = run.plan(with_blocks_to_swap(config, number)).peaks
        return all(peak <= max(limit, lowest[phase]) for phase, peak in peaks.items() if phase != except_phase)

    number = fewest_blocks(run.num_blocks, is_enough)
    return with_blocks_to_swap(config, run.num_blocks if number is None else number)
