"""The plan of a file of stages: all checks of all stages before the first one trains, and a table of the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.stages import Stage
from finetrainers.plan.automatic import within_budget
from finetrainers.plan.check_upload import check_upload
from finetrainers.plan.dry_run import build_without_weights, unseen_reason
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.ownership import inside_problem
from finetrainers.plan.preflight import preflight, resolve_family, with_options
from finetrainers.plan.ready import check_rewards, preflight_by_model
from finetrainers.plan.start_report import print_line, print_warnings
from finetrainers.utils.text import file_size, listed, plural

from .stages import (
    StageStatus,
    changed_stages,
    incompatibilities,
    look_at,
    missing_before,
    resolved_config,
    resume_flags,
    used_elsewhere,
)

T = TypeVar("T")

_HEADINGS = ("stage", "model", "method", "steps", "begins from", "planned", "status")
_KINDS = {"full-finetune": "full"}
_LOADS = {"weights": "weights of", "lora": "LoRA of", "state": "state of"}


@dataclass(frozen=True)
class _Checked:
    """Stage that passed its checks: its resolved options, and its planned peak in bytes, or None if it is unknown."""

    config: TrainConfig
    peak: float | None = None


def plan_stages(
    stages: Sequence[Stage], *, again_from: str | None = None, keep_finished: bool = False, trains: bool = True
) -> list[str]:
    """Check all stages, print their plan, and return the warnings that it has.

    Args:
        stages: of the file.
        again_from: the first of the stages that are all to be trained again.
        keep_finished: whether to accept stages that were trained with other options than those of the file.
        trains: whether they are to be trained now; otherwise a model need not be on this disk.

    Raises:
        ConfigError: all problems of all stages.
    """
    statuses = look_at(stages, again_from=again_from)
    problems: list[tuple[str, Problem]] = [(stage.name, problem) for stage in stages for problem in stage.problems]
    warnings: list[tuple[str, str]] = []
    checked: dict[str, _Checked] = {}
    for status in statuses:
        own: list[Problem] = []
        try:
            checked[status.name] = _check(status, warnings, trains=trains)
        except ConfigError as error:
            own = [p for p in error.problems if not any(name in str(p) for name in status.stage.wrong)]
        own += [*_init_problems(status, checked), *_inside_problems(status, statuses)]
        problems += [(status.name, problem) for problem in own]
    merged = [
        replace(problem, where=f"{owners}, {problem.where}" if problem.where else owners)
        for problem, owners in _merge(problems, len(stages)).items()
    ]
    merged += used_elsewhere(statuses)
    merged += [] if again_from is None else missing_before(statuses, again_from)
    changed = [] if keep_finished else changed_stages(statuses)
    if not merged:
        _print_table(statuses, checked, changed)
        print_warnings(f"{owners}: {warning}" for warning, owners in _merge(warnings, len(stages)).items())
    if merged or changed:
        raise ConfigError([*merged, *changed], of="the stages")
    return [warning for _, warning in warnings]


def _check(status: StageStatus, warnings: list[tuple[str, str]], *, trains: bool) -> _Checked:
    """Check a stage as its run would; a finished stage needs no check.

    Raises:
        ConfigError: all problems of the stage.
    """
    if status.is_done:
        return _Checked(resolved_config(status))
    config = _plan_config(status, trains=trains)
    if status.stage.problems:
        preflight(config)
        return _Checked(config)
    checked = preflight_by_model(config)
    check_upload(checked.config)
    if config.memory.memory_budget is not None:
        print_line(f"stage {status.name}:")
    checked = check_rewards(within_budget(checked))
    checked, transformer = build_without_weights(checked)
    warnings += [(status.name, warning) for warning in checked.warnings]
    peak = None if unseen_reason(checked) is not None else RunMemory(checked, transformer).plan().peak
    return _Checked(checked.config, peak)


def _plan_config(status: StageStatus, *, trains: bool) -> TrainConfig:
    """Return a stage's options as its run will have them, without weights that an earlier stage has yet to make."""
    config = status.stage.config if status.is_promised else status.config
    assert config is not None
    flags = {} if status.is_promised and not status.step else resume_flags(status)
    config = with_options(config, "run", dry_run=not trains)
    if status.is_again:  # the existing directory will be renamed
        output_dir = config.run.output_dir.with_name(f"{config.run.output_dir.name}.again")
        config = with_options(config, "run", output_dir=output_dir)
    reset = [flags["--reset"]] if "--reset" in flags else []
    checkpoint = flags.get("--resume_from_checkpoint", "auto")
    return with_options(config, "training", resume_from_checkpoint=checkpoint, reset=reset)


def _inside_problems(status: StageStatus, statuses: Sequence[StageStatus]) -> list[Problem]:
    """Return the problem that another stage writes into the directory of a stage."""
    config = status.config
    try:
        trained = resolve_family(config)[1].facts.trained
    except ConfigError:  # its error is reported with the stage
        return []
    messages = [inside_problem(config, other.root, trained=trained) for other in statuses]
    return [Problem("--output_dir", message, "occupied") for message in messages if message is not None][:1]


def _init_problems(status: StageStatus, checked: Mapping[str, _Checked]) -> list[Problem]:
    """Return the problem that a stage cannot begin from its source, or that both train the same expert."""
    source, other, load = status.source, status.other, status.load
    if other and not status.is_done and {other.name, status.name} <= checked.keys():
        expert, own_expert = (checked[name].config.model.expert for name in (other.name, status.name))
        if expert == own_expert:
            model = "a model with one network for all noise levels" if expert is None else f"the expert `{expert}`"
            message = f"stage {other.name} trains {model}, like this stage; remove it, or set another --expert"
            return [Problem("other_expert", message, "mismatch")]
    if not (source and load) or status.is_done or not {source.name, status.name} <= checked.keys():
        return []
    reasons = incompatibilities(checked[source.name].config, checked[status.name].config, load)
    message = f"the {_LOADS[load]} stage {source.name} does not fit: {'; '.join(reasons)}"
    return [Problem("init", message, "mismatch")] if reasons else []


# ---- output ----------------------------------------------------------------------------------------------------------


def _merge(items: Sequence[tuple[str, T]], count: int) -> dict[T, str]:
    """Return each problem or warning once, with a phrase for the stages that have it.

    Args:
        items: each with the name of a stage.
        count: of all stages.
    """
    stages: dict[T, list[str]] = {}
    for name, item in dict.fromkeys(items):
        stages.setdefault(item, []).append(name)
    return {
        item: "all stages" if len(names) == count > 1 else f"stage{'s' if len(names) > 1 else ''} {listed(names)}"
        for item, names in stages.items()
    }


def _print_table(statuses: Sequence[StageStatus], checked: Mapping[str, _Checked], changed: Sequence[Problem]) -> None:
    """Print a row for each stage; a model that all share is printed once."""
    changed_names = {problem.where for problem in changed}
    rows = [_row(status, checked[status.name], f"stage {status.name}" in changed_names) for status in statuses]
    models = list(dict.fromkeys(row[1] for row in rows))
    print_line(f"{plural(len(rows), 'stage')}{f' of {models[0]}' if len(models) == 1 else ''}:")
    lines = [_HEADINGS, *rows] if len(models) > 1 else [(row[0], *row[2:]) for row in [_HEADINGS, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    folders: dict[Path, list[str]] = {}
    for status in statuses:
        folder = status.root.parent if status.root.name == status.name else status.root
        folders.setdefault(folder, []).append(status.name)
    for folder, names in folders.items():
        has_one_stage = len(names) == 1 and folder.name != names[0] and len(statuses) > 1
        path = folder if folder in [status.root for status in statuses] else folder / "STAGE"
        print_line(f"output of {f'stage {names[0]}' if has_one_stage else 'each stage'}: {path}")


def _row(status: StageStatus, checked: _Checked, is_changed: bool) -> tuple[str, ...]:
    config = checked.config
    model, training, total = config.model, config.training, config.training.train_steps
    weights_type = _KINDS.get(training.training_type, training.training_type)
    init = (
        training.init_from or "the model"
        if status.source is None
        else f"{_LOADS[str(status.load)]} {status.source.name}"
    )
    progress = "done" if status.is_done else f"at step {status.step}" if status.step else "to do"
    return (
        status.name,
        f"{model.model_name} ({model.pretrained_model_name_or_path})",
        f"{training.method} {weights_type}",
        f"{total}" if total else plural(training.train_epochs, "epoch"),
        init,
        "" if checked.peak is None else file_size(checked.peak),
        f"{progress}, changed" if is_changed else progress,
    )
