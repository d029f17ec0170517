"""Settings that a run chooses itself: decoding of rollouts, number of swapped blocks, activation
memory, and where parts wait.

The estimate, its advice and a run choose by one rule, that every phase fits the memory that tensors may take
(`memory.fit`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetrainers.config.root import TrainConfig
from finetrainers.utils.phases import REWARD, ROLLOUT, VALIDATION

from .activation_auto import ActivationModel, with_choice
from .activation_plan import ActivationPolicy, Machine
from .phases import RunPlan
from .swap_plan import NUM_SLOTS, fewest_blocks

#: Options of what blocks store: one that is given leaves none of them to choose.
ACTIVATION_OPTIONS = ("activation_memory", "gradient_checkpointing", "selective_checkpointing")
#: Options with the same results to the last bit, which a run on a GPU chooses where they are open, and records.
EXACT_CHOICES = ("activation_memory", "selective_checkpointing", "blocks_to_swap", "enable_model_cpu_offload")
#: Share of a step that swapping more blocks must save: how far copies hide behind computation is not measured.
_SWAP_GAIN = 0.05
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
    """

    plan: Callable[[TrainConfig], RunPlan]
    model: Callable[[TrainConfig], ActivationModel]
    num_blocks: int
    may_offload_samples: bool
    decodes: bool = False


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
        repeats: whether they are the choices of the run that is resumed, or None if it has none.
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
    repeats: bool | None = None

    @property
    def exact_choices(self) -> dict[str, Any]:
        """Values of `EXACT_CHOICES` that were to be chosen."""
        chosen = {
            "activation_memory": self.activations,
            "selective_checkpointing": self.activations,
            "blocks_to_swap": self.swapped,
            "enable_model_cpu_offload": self.offloads_samples,
        }
        return {name: self.config.get(name) for name, choice in chosen.items() if choice is not None}

    @property
    def fits(self) -> bool:
        """True if every phase fits, or no machine is known."""
        is_stored = self.activations is None or self.activations.fits
        return self.machine is None or (self.plan.peak <= self.machine.device and is_stored)

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
        return descriptions | {name: _DECODING[name] for name in self.decoding}

    @property
    def slower(self) -> float:
        """Additional time of a step relative to one that recomputes and copies nothing, as a share; 0 if unknown."""
        return 0.0 if self.machine is None else self.model.slower(self.config, self.machine)


def choose_automatic(config: TrainConfig, run: Run, machine: Machine | None) -> AutoSettings:
    """Choose the settings that the options leave open.

    First clips of rollouts are decoded one by one, or in tiles, and samples drawn with the model's parts in host
    memory, each if they would not fit otherwise. Then blocks are swapped, and activations stored, in the fastest way
    in which every phase fits.
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
        in_place = _fewest_swapped(config, run, machine.device, except_phase=VALIDATION)
        offloads = run.plan(with_blocks_to_swap(config, in_place)).peaks.get(VALIDATION, 0.0) > machine.device
        config = with_samples(config, offloads=offloads)
    ways = run.model(with_blocks_to_swap(config, 0)).settings if swaps and stores else ()
    # Each base gives a number of swapped blocks, for which another setting may be faster.
    bases = [config.with_values({"activation_memory": stored}) for stored in ways if stored != "keep_attention"]
    numbers = dict.fromkeys(_fewest_swapped(base, run, machine.device) for base in bases or [config])
    candidates = [_with_swapped(config, number, run, machine) for number in numbers]
    return replace(_fastest(candidates, machine), offloads_samples=offloads, decoding=decoding)


def repeat_choices(config: TrainConfig, run: Run, machine: Machine, choices: Mapping[str, Any]) -> AutoSettings:
    """Return the settings with choices of an earlier start where options are open, or new ones if these do not fit.

    Args:
        config: the run, with `auto` where options are open.
        run: its memory.
        machine: that it runs on.
        choices: values of `EXACT_CHOICES`.
    """
    fresh = choose_automatic(config, run, machine)
    memory = config.memory
    is_open = {
        "activation_memory": memory.activation_memory == "auto",
        "selective_checkpointing": memory.activation_memory == "auto",
        "blocks_to_swap": memory.blocks_to_swap == "auto",
        "enable_model_cpu_offload": config.validation.enable_model_cpu_offload is None and run.may_offload_samples,
    }
    names = [name for name, value in choices.items() if is_open.get(name)]
    settings = choose_automatic(config.with_values({name: choices[name] for name in names}), run, machine)
    repeated = settings.config
    if "activation_memory" in names:
        settings = replace(settings, activations=settings.model.policy(repeated, machine))
    if "blocks_to_swap" in names:
        settings = replace(settings, swapped=int(repeated.memory.blocks_to_swap))
    if "enable_model_cpu_offload" in names:
        settings = replace(settings, offloads_samples=repeated.validation.enable_model_cpu_offload)
    if not names:
        return fresh
    repeats = _is_within(settings, machine.device, fresh.plan.peaks)
    return replace(settings if repeats else fresh, repeats=repeats)


def _with_swapped(config: TrainConfig, number: int, run: Run, machine: Machine) -> AutoSettings:
    """Return the settings with a number of swapped blocks, and the fastest way to store activations, if it is open."""
    swapped = number if config.memory.blocks_to_swap == "auto" else None
    config = with_blocks_to_swap(config, number)
    model, choice = run.model(config), None
    if config.memory.activation_memory == "auto":
        choice = model.choose(machine)
        config = with_choice(config, choice)
    plan = run.plan(config)
    return AutoSettings(config, plan, machine, model, run.num_blocks, swapped=swapped, activations=choice)


def _fastest(candidates: Sequence[AutoSettings], machine: Machine) -> AutoSettings:
    """Return the fastest settings that fit, with fewer swapped blocks if they take hardly longer.

    A phase that no candidate makes fit must be as small as possible.
    """
    lowest = {phase: min(candidate.plan.peaks[phase] for candidate in candidates) for phase in candidates[0].plan.peaks}
    fitting = [candidate for candidate in candidates if _is_within(candidate, machine.device, lowest)]
    if not fitting:
        return min(candidates, key=lambda candidate: candidate.plan.peak)
    fastest = min(candidate.slower for candidate in fitting)
    near = [candidate for candidate in fitting if candidate.slower <= fastest + _SWAP_GAIN]
    fewest = min(candidate.swapped or 0 for candidate in near)
    return min((c for c in near if (c.swapped or 0) == fewest), key=lambda candidate: candidate.slower)


def _is_within(settings: AutoSettings, limit: float, peaks: Mapping[str, float]) -> bool:
    """Return whether every phase fits `limit` bytes or is not larger than in `peaks`, and activations fit."""
    stores = settings.activations is None or settings.activations.fits
    return stores and all(size <= max(limit, peaks[phase]) for phase, size in settings.plan.peaks.items())


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
        swapped = _fewest_swapped(changed if name == "enable_slicing" else config, run, limit)
        before, after = (run.plan(with_blocks_to_swap(variant, swapped)).peaks for variant in (config, changed))
        phases = [phase for phase in (ROLLOUT, REWARD) if phase in before]
        if any(before[phase] > limit and after[phase] < before[phase] for phase in phases):
            config = changed
            chosen.append(name)
    return config, tuple(chosen)


def _fewest_swapped(config: TrainConfig, run: Run, limit: float, *, except_phase: str | None = None) -> int:
    """Return the fewest swapped blocks that make every phase fit, or as small as with all swapped; or those given.

    Args:
        config: the run.
        run: its memory.
        limit: bytes that tensors may take.
        except_phase: a phase that does not count.
    """
    if config.memory.blocks_to_swap != "auto":
        return config.memory.blocks_to_swap
    all_blocks = run.num_blocks if run.num_blocks > NUM_SLOTS else 0  # fewer save nothing
    lowest = run.plan(with_blocks_to_swap(config, all_blocks)).peaks

    def is_enough(number: int) -> bool:
        peaks = run.plan(with_blocks_to_swap(config, number)).peaks
        return all(peak <= max(limit, lowest[phase]) for phase, peak in peaks.items() if phase != except_phase)

    number = fewest_blocks(all_blocks, is_enough)
    return all_blocks if number is None else number
