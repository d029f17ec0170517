"""Plan of `finetrainers watch`, checked before anything is loaded. Imports torch for rewards only."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetrainers.config.checks.findings import Findings
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.given import RawOptions
from finetrainers.config.load import build_config
from finetrainers.config.prompts import MEDIA_OPTIONS, parse_validation_prompts
from finetrainers.config.rewards import RewardEntry, parse_reward
from finetrainers.config.root import TrainConfig
from finetrainers.config.sample import SampleSection
from finetrainers.config.watch import (
    AS_VALIDATION,
    Preset,
    Size,
    WatchSection,
    class_size,
    evaluation_rewards,
    label_of,
    read_presets,
)
from finetrainers.data.reading.datasets import readable_trigger_words
from finetrainers.models.files.hub import ask
from finetrainers.plan.preflight import check_tracker, resolve_family
from finetrainers.rewards.registry import (
    missing_repositories,
    reward_problems,
    single_clip_problem,
    unavailable_weights_problem,
)
from finetrainers.rundir.identity import Identity, are_different, read_identity, read_identity_file
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.failures import InputError
from finetrainers.utils.files import missing_path_problem
from finetrainers.utils.launch import launched_processes
from finetrainers.utils.text import nearest

from ..plan import SamplePlan, plan_targets, size_of_run
from ..weights import BASE, Target, run_source
from .scores import TRIGGER_GAP, recorded_labels, trigger_pairs

#: A file in the folder of a preset that names the run whose clips are there.
WATCHED = "watched.json"
_TAKEN = ("prompts", *MEDIA_OPTIONS, "negative_prompt", "seed", "num", "frame_rate", "no_ema")


@dataclass(frozen=True)
class WatchPlan:
    """A checked plan for each checkpoint.

    Attributes:
        run: the run directory.
        presets: by name, plans of a checkpoint's samples; their weights are still those of the base model.
        rewards: that score them.
        labels: of the rewards in ledgers, in their order.
        options: of the command.
        output_dir: has a folder for each preset.
        identity: of the run, if it has one.
        trigger_words: of the run.
    """

    run: Path
    presets: dict[str, SamplePlan]
    rewards: Sequence[RewardEntry]
    labels: Sequence[str]
    options: WatchSection
    output_dir: Path
    identity: Identity | None = None
    trigger_words: Sequence[str] = ()

    @property
    def config(self) -> TrainConfig:
        """Model and options, which all presets share."""
        return next(iter(self.presets.values())).config


def plan_watch(run: Path, options: WatchSection, flags: RawOptions) -> WatchPlan:
    """Plan the samples of each checkpoint, and check the plan.

    Args:
        run: the run directory.
        options: of the command.
        flags: options of a run that override its own.

    Raises:
        ConfigError: all problems, at once.
    """
    findings = Findings()
    if launched_processes() > 1:
        message = "a watch is one process; start it without a launcher, on its own device (--device)"
        findings.error("launcher", message, "unsupported")
    if not (run / "config.toml").is_file():
        reason = (
            "has no config.toml; use a run's --output_dir" if run.is_dir() else missing_path_problem(run, folder=True)
        )
        raise ConfigError([*findings.errors, Problem("RUN", f"{run} {reason}", "not_found")])
    try:
        requested = read_presets(options)
    except ConfigError as error:
        findings.errors += error.problems
        requested = {AS_VALIDATION: Preset()}  # to check prompts and images, which all presets share
    target = Target(str(run), BASE, run_source(run), run)
    config = build_config([target.source, RawOptions(dict(flags.values), dict(flags.where))])
    output_dir = options.output_dir or run / "watch"
    rewards, best_by = _rewards(config, options, output_dir, findings)
    labels = [label_of(entry, rewards) for entry in rewards]
    if not options.no_track:
        check_tracker(config, findings)
    identity = read_identity(run)
    for name in requested:
        if are_different(read_identity_file(output_dir / name / WATCHED), identity):
            message = f"{output_dir / name} holds the clips of another run; use another directory"
            findings.error("output_dir", message, "occupied")
    presets: dict[str, SamplePlan] = {}
    for name, preset in requested.items():
        try:
            sized = preset or Preset(size=_class_size(name, config, options, target))
            presets[name] = _plan(target, options, flags, sized, output_dir / name)
        except ConfigError as error:
            findings.errors += error.problems
    words = readable_trigger_words(config.data)
    _check_trigger_gap(best_by, presets, words, findings)
    if findings.errors:
        raise ConfigError(list(dict.fromkeys(findings.errors)), of="this watch")
    options = options.model_copy(update={"best_by": best_by})
    return WatchPlan(run, presets, rewards, labels, options, output_dir, identity, words)


def _check_trigger_gap(
    best_by: str | None, presets: Mapping[str, SamplePlan], words: Sequence[str], findings: Findings
) -> None:
    if best_by is None or not best_by.endswith(TRIGGER_GAP):
        return
    if not all(trigger_pairs(plan.prompts, words) for plan in presets.values()):
        message = "requires prompts with the run's trigger word (id_token), and the same prompts without it"
        findings.error("best_by", f"{best_by} {message}; set --prompts", "required")


def _plan(target: Target, options: WatchSection, flags: RawOptions, preset: Preset, folder: Path) -> SamplePlan:
    section = SampleSection.model_validate({
        **{name: getattr(options, name) for name in _TAKEN},
        "size": None if preset.size is None else "x".join(map(str, preset.size)),
        "num_inference_steps": preset.steps, "guidance_scale": preset.guidance, "output_dir": folder,
    })  # fmt: skip
    plan = plan_targets([target.given], [target], section, flags, Findings(), fixed_size=True)
    return replace(plan, variants=[])


def _native(config: TrainConfig, options: WatchSection, target: Target) -> Size:
    """Return the size that the run trains on, or else the largest size of its prompts.

    Raises:
        ConfigError: neither is known.
    """
    if (size := size_of_run(config, target)) is not None:
        return size
    section = config.validation
    if options.prompts is not None:
        update = {"validation_prompts": options.prompts, **dict.fromkeys(MEDIA_OPTIONS.values())}
        section = section.model_copy(update=update)
    sizes = [prompt.size for prompt in parse_validation_prompts(section) if prompt.size is not None]
    if not sizes:
        message = "the training size of the run is unknown; set your own presets: --preset NAME=49x512x768"
        raise ConfigError([Problem("--presets", message, "required")])
    return max(sizes, key=math.prod)


def _class_size(name: str, config: TrainConfig, options: WatchSection, target: Target) -> Size:
    """Return the size of a preset that follows from the run and its model, as far as the model's files exist here."""
    native = _native(config, options, target)
    config, family = resolve_family(config)
    facts = family.facts_of(config.model)
    rate = options.frame_rate or config.validation.validation_frame_rate or facts.geometry.fps
    return class_size(name, native, facts.geometry, rate)


def _rewards(
    config: TrainConfig, options: WatchSection, output_dir: Path, findings: Findings
) -> tuple[list[RewardEntry], str | None]:
    """Return the requested rewards, or else those of the run, and the label of the reward that selects the best."""
    entries = list(options.reward) or evaluation_rewards(config)
    for entry in entries:
        problems = reward_problems(entry, config.run.parts)
        findings.errors += [Problem.from_error("--reward", error) for error in problems]
        if not problems and (problem := single_clip_problem(entry)) is not None:
            findings.error("reward", problem, "unsupported")
    label = options.best_by
    if label is not None:
        suffix = TRIGGER_GAP if label.endswith(TRIGGER_GAP) else ""
        entries, label = _with_best(label.removesuffix(suffix), entries, output_dir, findings)
        label += suffix
    if not findings.errors:
        repositories = dict.fromkeys(repo for entry in entries for repo in missing_repositories(entry))
        away = ask(list(repositories))
        findings.errors += [
            Problem("--reward", unavailable_weights_problem(repo, away), "unavailable") for repo in repositories if away
        ]
    return entries, label


def _with_best(
    requested: str, entries: list[RewardEntry], output_dir: Path, findings: Findings
) -> tuple[list[RewardEntry], str]:
    """Return the rewards with the one that selects the best, and its label; `eval_reward/NAME` means NAME."""
    label = requested.removeprefix("eval_reward/").removeprefix("reward/")
    labels = [label_of(entry, entries) for entry in entries]
    if label in labels:
        return entries, label
    if label == "weighted_sum":
        message = (
            f"{requested} sums several rewards, and the best checkpoint is chosen by one; valid: {', '.join(labels)}"
        )
        findings.error("best_by", message, "unsupported")
        return entries, label
    try:
        entry = RewardEntry.model_validate(parse_reward(label))
        problems = reward_problems(entry)
    except ValueError:  # pydantic's errors are subclasses
        problems = [InputError(f"{requested!r} is not the name of a reward", "unknown")]
    if problems:
        hint = nearest(label, {*labels, *recorded_labels(output_dir)}, listed=0)
        errors = [InputError(f"unknown reward {requested!r}{hint}", "unknown")] if hint else problems
        findings.errors += [Problem.from_error("--best_by", error) for error in errors]
        return entries, label
    entries = [*entries, entry]  # clips with its score are not scored again
    return entries, label_of(entry, entries)


def use_device(device: str | None) -> None:
    """Make only one device visible to this process, before torch is loaded.

    Raises:
        ConfigError: there is no such device.
    """
    if device is None:
        return
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    index = device.removeprefix("cuda:")
    if not index.isdecimal():
        raise ConfigError([Problem("--device", f"must be cpu or cuda:N, got {device!r}")])
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if visible and int(index) >= len(visible):
        message = f"{device}: CUDA_VISIBLE_DEVICES={','.join(visible)} leaves {len(visible)}, counted from cuda:0"
        raise ConfigError([Problem("--device", message, "conflict")])
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(index)] if visible else index
    if likely_device_type() != "cuda":
        message = (
            f"{device}: torch has no usable GPU here, and would use the CPU; if that is intended, set --device cpu"
        )
        raise ConfigError([Problem("--device", message, "unavailable")])
