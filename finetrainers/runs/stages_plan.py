"""The plan of a file of stages: every check of every stage before the first one trains, and a table of what they will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.stages import Stage
from finetrainers.plan.automatic import within_budget
from finetrainers.plan.check_upload import check_upload
from finetrainers.plan.dry_run import build_without_weights, why_unseen
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.ownership import inside_problem
from finetrainers.plan.preflight import preflight, resolve_family
from finetrainers.plan.ready import check_rewards, preflight_by_model
from finetrainers.plan.start_report import print_line, print_warnings
from finetrainers.utils.text import file_size, listed, plural

from .stages import Standing, look_at, missing_before, outdated, resolved, resume_flags, unfit, used_elsewhere

_HEADINGS = ("stage", "model", "method", "steps", "begins from", "planned", "status")
_KINDS = {"full-finetune": "full"}
_LOADS = {"weights": "weights of", "lora": "LoRA of", "state": "state of"}


@dataclass(frozen=True)
class _Checked:
    """A stage that passed its checks: its options as they are resolved, and its planned peak in bytes, if that is known."""

    config: TrainConfig
    peak: float | None = None


def plan_stages(
    stages: Sequence[Stage], *, again_from: str | None = None, keep_finished: bool = False, trains: bool = True
) -> None:
    """Check all stages, and print what they will do.

    Args:
        stages: of the file.
        again_from: the stage from which on all are to be trained again.
        keep_finished: whether stages are taken as they are that were trained otherwise than the file says now.
        trains: whether they are to be trained now; else a model need not be on this disk.

    Raises:
        ConfigError: everything that is wrong with all of them.
    """
    standings = look_at(stages, again_from=again_from)
    problems: list[tuple[str, Problem]] = [(stage.name, one) for stage in stages for one in stage.problems]
    warnings: list[tuple[str, str]] = []
    checked: dict[str, _Checked] = {}
    for standing in standings:
        try:
            checked[standing.name] = _check(standing, warnings, trains=trains)
        except ConfigError as error:
            new = [one for one in error.problems if not any(name in str(one) for name in standing.stage.wrong)]
            problems += [(standing.name, one) for one in new]
        problems += [(standing.name, one) for one in _init_problems(standing, checked)]
        problems += [(standing.name, one) for one in _inside_problems(standing, standings)]
    found = _of_stages(problems, len(stages))
    found += used_elsewhere(standings)
    found += [] if again_from is None else missing_before(standings, again_from)
    changed = [] if keep_finished else outdated(standings)
    if not found:
        _print_table(standings, checked, changed)
        print_warnings(_warnings(warnings, len(stages)))
    if found or changed:
        raise ConfigError([*found, *changed], of="the stages")


def _check(standing: Standing, warnings: list[tuple[str, str]], *, trains: bool) -> _Checked:
    """Check a stage as its run would be; of one that is finished nothing.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    if standing.is_done:
        return _Checked(resolved(standing))
    config = _as_planned(standing, trains=trains)
    if standing.stage.problems:
        preflight(config)
        return _Checked(config)
    checked = preflight_by_model(config)
    check_upload(checked.config)
    if config.memory.memory_budget is not None:
        print_line(f"stage {standing.name}:")
    checked = check_rewards(within_budget(checked))
    checked, transformer = build_without_weights(checked)
    warnings += [(standing.name, warning) for warning in checked.warnings]
    peak = None if why_unseen(checked) is not None else RunMemory(checked, transformer).plan().peak
    return _Checked(checked.config, peak)


def _as_planned(standing: Standing, *, trains: bool) -> TrainConfig:
    """The options of a stage as its run will have them, without the weights that an earlier stage will make."""
    config = standing.stage.config if standing.is_promised else standing.config
    assert config is not None
    flags = {} if standing.is_promised and not standing.step else resume_flags(standing)
    training = {
        "resume_from_checkpoint": flags.get("--resume_from_checkpoint", "auto"),
        "reset": [flags["--reset"]] if "--reset" in flags else [],
    }
    run: dict[str, object] = {"dry_run": not trains}
    if standing.is_again:  # what is there will be set aside
        run["output_dir"] = config.run.output_dir.with_name(f"{config.run.output_dir.name}.again")
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=training),
            "run": config.run.model_copy(update=run),
        }
    )


def _inside_problems(standing: Standing, standings: Sequence[Standing]) -> list[Problem]:
    """Return the problem that another stage writes into the directory of a stage."""
    config = standing.config
    try:
        trained = resolve_family(config)[1].facts.trained
    except ConfigError:  # which is reported with the stage
        return []
    found = [inside_problem(config, one.root, trained=trained) for one in standings]
    return [Problem("--output_dir", message) for message in found if message is not None][:1]


def _init_problems(standing: Standing, checked: Mapping[str, _Checked]) -> list[Problem]:
    """Why a stage cannot begin from the one that it names."""
    source, load = standing.source, standing.load
    if source is None or load is None or standing.is_done or not {source.name, standing.name} <= checked.keys():
        return []
    found = unfit(checked[source.name].config, checked[standing.name].config, load)
    return (
        [Problem("init", f"the {_LOADS[load]} stage {source.name} does not fit: {'; '.join(found)}")] if found else []
    )


# ---- in words ------------------------------------------------------------------------------------------------------------------


def _of_stages(problems: Sequence[tuple[str, Problem]], count: int) -> list[Problem]:
    """Each problem once, with the stages that have it."""
    stages: dict[Problem, list[str]] = {}
    for name, problem in problems:
        stages.setdefault(problem, []).append(name)
    found = []
    for problem, names in stages.items():
        of = _named(names, count)
        found.append(replace(problem, where=f"{of}, {problem.where}" if problem.where else of))
    return found


def _named(names: Sequence[str], count: int) -> str:
    """Stages, in words."""
    names = list(dict.fromkeys(names))
    if len(names) == count > 1:
        return "all stages"
    return f"stage{'s' if len(names) > 1 else ''} {listed(names)}"


def _warnings(warnings: Sequence[tuple[str, str]], count: int) -> list[str]:
    stages: dict[str, list[str]] = {}
    for name, warning in warnings:
        stages.setdefault(warning, []).append(name)
    return [f"{_named(names, count)}: {warning}" for warning, names in stages.items()]


def _print_table(standings: Sequence[Standing], checked: Mapping[str, _Checked], changed: Sequence[Problem]) -> None:
    """What every stage will do; a model that all share is said once."""
    outdated_names = {problem.where for problem in changed}
    rows = [_row(one, checked[one.name], f"stage {one.name}" in outdated_names) for one in standings]
    models = list(dict.fromkeys(row[1] for row in rows))
    print_line(f"{plural(len(rows), 'stage')}{f' of {models[0]}' if len(models) == 1 else ''}:")
    columns = [n for n in range(len(_HEADINGS)) if n != 1 or len(models) > 1]
    lines = [[row[n] for n in columns] for row in [_HEADINGS, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    folders: dict[Path, list[str]] = {}
    for one in standings:
        folders.setdefault(one.root if one.root.name != one.name else one.root.parent, []).append(one.name)
    for folder, names in folders.items():
        of = f"stage {names[0]}" if len(names) == 1 and folder.name != names[0] and len(standings) > 1 else "each stage"
        place = folder if folder in [one.root for one in standings] else folder / "STAGE"
        print_line(f"output of {of}: {place}")


def _row(one: Standing, checked: _Checked, is_outdated: bool) -> tuple[str, ...]:
    config = checked.config
    model, training, total = config.model, config.training, config.training.train_steps
    kind = _KINDS.get(training.training_type, training.training_type)
    init = training.init_from or "the model" if one.source is None else f"{_LOADS[str(one.load)]} {one.source.name}"
    status = "done" if one.is_done else f"at step {one.step}" if one.step else "to do"
    return (
        one.name,
        f"{model.model_name} ({model.pretrained_model_name_or_path})",
        f"{training.method} {kind}",
        f"{total}" if total else plural(training.train_epochs, "epoch"),
        init,
        "" if checked.peak is None else file_size(checked.peak),
        f"{status}, changed" if is_outdated else status,
    )
