"""What `finetrainers watch` does with each checkpoint, checked before anything is loaded. Imports no torch but for rewards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetrainers.config.checks.findings import Findings
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.given import Given
from finetrainers.config.load import build_config, file_source
from finetrainers.config.prompts import parse_validation_prompts
from finetrainers.config.rewards import RewardEntry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sample import SampleSection
from finetrainers.config.watch import Preset, Size, WatchSection, class_size, label_of, read_presets, rewards_of
from finetrainers.rewards.registry import reward_problems
from finetrainers.utils.files import not_there
from finetrainers.utils.launch import launched_processes
from finetrainers.utils.text import nearest

from ..preflight import check_tracker, resolve_family
from ..sample.plan import SamplePlan, plan_targets, size_of_run
from ..sample.weights import BASE, Target

_TAKEN = ("prompts", "image", "video", "negative_prompt", "seed", "num", "frame_rate", "no_ema")


@dataclass(frozen=True)
class WatchPlan:
    """What is done with each checkpoint.

    Attributes:
        run: the run directory.
        presets: by name, the samples of a checkpoint, whose weights are still the base model's.
        rewards: that score them.
        labels: what the rewards are called in ledgers, in their order.
        options: of the command.
        output_dir: has a folder for each preset.
    """

    run: Path
    presets: dict[str, SamplePlan]
    rewards: Sequence[RewardEntry]
    labels: Sequence[str]
    options: WatchSection
    output_dir: Path

    @property
    def config(self) -> TrainConfig:
        """The model, and how it computes, which is the same for all presets."""
        return next(iter(self.presets.values())).config


def plan_watch(run: Path, options: WatchSection, flags: Given) -> WatchPlan:
    """Find out what to sample of each checkpoint, and check it.

    Args:
        run: the run directory.
        options: of the command.
        flags: options of a run that override its own.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    found = Findings()
    if launched_processes() > 1:
        found.error(
            "launcher", "a watch is one process; start it without a launcher, on a device of its own (--device)"
        )
    if not (run / "config.toml").is_file():
        why = "has no config.toml; give a run's --output_dir" if run.is_dir() else not_there(run, folder=True)
        raise ConfigError([*found.errors, Problem("RUN", f"{run} {why}")])
    wanted: dict[str, Preset | None] = {}
    try:
        wanted = read_presets(options)
    except ConfigError as error:
        found.errors += error.problems
    target = Target(str(run), BASE, file_source(run / "config.toml"), run)
    config = build_config([target.source, Given(dict(flags.values), dict(flags.where))])
    rewards = _rewards(config, options, found)
    labels = [label_of(entry, rewards) for entry in rewards]
    if options.best_by is not None and options.best_by not in labels:
        hint = nearest(options.best_by, labels) if labels else "; name it with --reward"
        found.error("best_by", f"{options.best_by} is no reward of this watch{hint}")
    if not options.no_track:
        check_tracker(config, found)
    output_dir = options.output_dir or run / "watch"
    presets: dict[str, SamplePlan] = {}
    for name, preset in wanted.items():
        try:
            sized = preset or Preset(size=_class_size(name, config, options, target))
            presets[name] = _plan(target, options, flags, sized, output_dir / name)
        except ConfigError as error:
            found.errors += error.problems
    if found.errors:
        raise ConfigError(list(dict.fromkeys(found.errors)), of="this watch")
    return WatchPlan(run, presets, rewards, labels, options, output_dir)


def _plan(target: Target, options: WatchSection, flags: Given, preset: Preset, folder: Path) -> SamplePlan:
    values = {name: getattr(options, name) for name in _TAKEN}
    size = None if preset.size is None else "x".join(map(str, preset.size))
    section = SampleSection.model_validate(
        {
            **values,
            "size": size,
            "num_inference_steps": preset.steps,
            "guidance_scale": preset.guidance,
            "output_dir": folder,
        }
    )
    plan = plan_targets([target.given], [target], section, flags, Findings(), fixed_size=True)
    return replace(plan, variants=[])


def _native(config: TrainConfig, options: WatchSection, target: Target) -> Size:
    """The size that the run trains on, or else the largest that its prompts ask for.

    Raises:
        ConfigError: neither is known.
    """
    size = size_of_run(config, target)
    section = config.validation
    if options.prompts is not None:
        section = section.model_copy(update={"validation_prompts": options.prompts, "validation_images": None, "validation_videos": None})  # fmt: skip
    sizes = (
        [prompt.size for prompt in parse_validation_prompts(section) if prompt.size is not None] if size is None else []
    )
    size = size or max(sizes, key=lambda one: one[0] * one[1] * one[2], default=None)
    if size is None:
        message = "the size that the run trains on is not known; give presets of your own: --preset NAME=49x512x768"
        raise ConfigError([Problem("--presets", message)])
    return size


def _class_size(name: str, config: TrainConfig, options: WatchSection, target: Target) -> Size:
    """The size of a preset that follows from the run and its model, as far as the model's files are there."""
    native = _native(config, options, target)
    config, family = resolve_family(config)
    facts = family.facts_of(config.model)
    rate = options.frame_rate or config.validation.validation_frame_rate or facts.geometry.fps
    return class_size(name, native, facts.geometry, rate)


def _rewards(config: TrainConfig, options: WatchSection, found: Findings) -> list[RewardEntry]:
    """The rewards that are asked for, or else those that the run evaluates or trains with."""
    entries = list(options.reward) or rewards_of(config)
    for entry in entries:
        found.errors += [Problem("--reward", message) for message in reward_problems(entry)]
    return entries


def use_device(device: str | None) -> None:
    """Let this process see one device alone, before torch is loaded.

    Raises:
        ConfigError: there is no such device.
    """
    if device is None:
        return
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    number = device.removeprefix("cuda:")
    if not number.isdecimal():
        raise ConfigError([Problem("--device", f"{device!r} is neither cpu nor cuda:N")])
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if visible and int(number) >= len(visible):
        message = f"{device}: CUDA_VISIBLE_DEVICES={','.join(visible)} leaves {len(visible)}, counted from cuda:0"
        raise ConfigError([Problem("--device", message)])
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(number)] if visible else number
