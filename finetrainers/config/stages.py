"""File of stages: training runs that follow one another, each with options over those that all share."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from finetrainers.utils.text import nearest, quoted

from .errors import ConfigError, Problem
from .given import Locate, RawOptions
from .load import build_config, file_source, find_inputs, find_line, read_toml, take_options
from .root import TrainConfig

#: Part of an earlier stage that a stage begins from: all weights, the LoRA, or the training state with the optimizer.
Load = Literal["weights", "lora", "state"]
#: Keys of a stage that are not options.
_KEYS = ("name", "init", "config")
_HEADER = re.compile(r"\s*(\[+)\s*([\w-]+)(?:\.[\w.-]+)?\s*\]+")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
#: Options that a file of stages cannot set, and the reason.
_REFUSED = {
    "resume_from_checkpoint": "`finetrainers run` resumes an interrupted stage by itself; remove it",
    "reset": "a stage begins from the weights of another stage by `init`, or from its complete training state by "
    '`init = { stage = "NAME", load = "state" }`; remove it',
    "dry_run": "`finetrainers run FILE --plan` checks all stages without training",
}


@dataclass(frozen=True)
class Init:
    """Earlier stage that a stage begins from, and the part of its training state to take."""

    stage: str
    load: Load


@dataclass(frozen=True)
class Stage:
    """Stage of a file.

    Attributes:
        name: unique name, and the directory of its run.
        config: its options; of a stage with problems, the valid ones, or None if these are not a configuration.
        init: the start from an earlier stage, or None to begin from the model or from its own `init_from`.
        other_expert: the earlier stage that trains the other expert, or None without one.
        problems: problems of the stage.
        wrong: flat names of the options that `config` lacks.
    """

    name: str
    config: TrainConfig | None
    init: Init | None = None
    other_expert: str | None = None
    problems: Sequence[Problem] = ()
    wrong: frozenset[str] = frozenset()


def read_stages(path: Path, flags: RawOptions) -> list[Stage]:
    """Read a file of stages; each has its problems.

    Args:
        path: the file.
        flags: of the command line, which override the options of every stage.

    Raises:
        ConfigError: there are no stages.
    """
    path, text, document = read_toml(path)
    tables = document.pop("stage", None)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, Mapping) for table in tables):
        problem = Problem(
            str(path),
            "has no [[stage]] tables; use `finetrainers train --config` for a file of one configuration",
            "required",
        )
        if tables:
            problem = Problem(str(path), "`stage` must be a list of tables; begin every stage by a line [[stage]]")
        raise ConfigError([problem])
    lines = _stage_lines(text)
    shared = RawOptions()
    take_options(shared, document, _locate(path, lines[None], ""))
    find_inputs(shared, path.parent)
    stages: list[Stage] = []
    for number, table in enumerate(tables):
        locate = _locate(path, lines.get(number, (0, "")), "stage")
        stages.append(
            _read_stage(table, copy.deepcopy(shared), copy.deepcopy(flags), locate, path.parent, before=stages)
        )
    return _with_merged(stages)


def _stage_lines(text: str) -> dict[int | None, tuple[int, str]]:
    """Return the lines of each stage by its number, and under None those that all share.

    Lines of others are empty, and those before a stage are left out and counted: a file may have many stages.
    """
    lines: dict[int | None, list[str]] = {None: []}
    starts: dict[int | None, int] = {None: 0}
    number, place = -1, None
    for index, line in enumerate(text.splitlines()):
        header = _HEADER.match(line)
        if header is not None:
            is_stage = header[2] == "stage"
            number += is_stage and header[1] == "[[" and "." not in header[0]
            place = number if is_stage else None
        start, owned = starts.setdefault(place, index), lines.setdefault(place, [])
        owned += [""] * (index - start - len(owned))
        owned.append(line)
    return {stage: (starts[stage], "\n".join(owned)) for stage, owned in lines.items()}


def _locate(path: Path, lines: tuple[int, str], above: str) -> Locate:
    """Return a function that locates an option in a part of the file, whose tables are below another table.

    Args:
        path: the file.
        lines: how many lines come before the part, and its text.
        above: the table, or empty.
    """
    start, text = lines

    def locate(table: str | None, name: str | None) -> str:
        headed = ".".join(part for part in (above, table) if part)
        line = find_line(text, name, headed if table else above or None)
        if line == 1 and name is not None:  # `data.max_items = 8`, without a header
            line = find_line(text, name, table)
        return f"{path}:{start + line}"

    return locate


def _read_stage(
    table: Mapping[str, Any],
    shared: RawOptions,
    flags: RawOptions,
    locate: Locate,
    directory: Path,
    *,
    before: Sequence[Stage],
) -> Stage:
    """Return a stage of a file in `directory`, over the options that all share."""
    problems: list[Problem] = []
    name = _read_name(table, locate, before, problems)
    init = _read_init(table, locate, before, problems)
    options = {key: value for key, value in table.items() if key not in _KEYS}
    other_expert = None
    if isinstance(options.get("other_expert"), Mapping):
        other = _find_stage("other_expert", options.pop("other_expert"), locate, before, problems)
        other_expert = None if other is None else other.name
    here = RawOptions()
    take_options(here, options, locate)
    find_inputs(here, directory)
    sources = [shared, here, flags]
    if "config" in table:
        try:
            sources.insert(1, file_source(Path(str(table["config"]))))
        except ConfigError as error:
            return Stage(name, None, init, problems=[*problems, *error.problems])
    for source in sources:
        _refuse(source, problems)
    config: TrainConfig | None
    wrong: frozenset[str] = frozenset()
    try:
        config = build_config(sources)
    except ConfigError as error:
        problems += error.problems
        config, wrong = error.rest, error.wrong
    if config is not None:
        if "output_dir" not in here.values or "output_dir" in flags.values:
            run = config.run.model_copy(update={"output_dir": config.run.output_dir / name})
            config = config.model_copy(update={"run": run})
        problems += _conflicts(name, config, init, here.where, before)
    return Stage(name, config, init, other_expert, problems, wrong)


def _conflicts(
    name: str, config: TrainConfig, init: Init | None, where: Mapping[str, str], before: Sequence[Stage]
) -> Iterator[Problem]:
    """Yield the problems of a stage's start and directory; `where` are the places of its options in the file."""
    if init is not None and config.training.init_from is not None:
        message = f"cannot be combined with init, which names stage {init.stage}; remove one of them"
        yield Problem(where.get("init_from", "init_from"), message, "conflict")
    directory = os.path.realpath(config.run.output_dir)
    for stage in before:
        if stage.config and stage.name != name and os.path.realpath(stage.config.run.output_dir) == directory:
            message = f"{config.run.output_dir} is also the directory of stage {stage.name}"
            yield Problem(where.get("output_dir", "output_dir"), message, "duplicate")
            return


def _refuse(source: RawOptions, problems: list[Problem]) -> None:
    """Take out the options that a file of stages cannot set."""
    for name, reason in _REFUSED.items():
        if name in source.values:
            del source.values[name]
            problems.append(Problem(source.where[name], f"{name}: {reason}", "unsupported"))


def _read_name(table: Mapping[str, Any], locate: Locate, before: Sequence[Stage], problems: list[Problem]) -> str:
    """Return the name of a stage, or its number if it has no usable name."""
    name, number = table.get("name"), len(before) + 1
    if name is None:
        problems.append(Problem(locate(None, None), f'stage {number} has no name; add one: name = "low"', "required"))
    elif not isinstance(name, str) or not _NAME.fullmatch(name):
        problems.append(
            Problem(
                locate(None, "name"),
                f"name: must be a directory name of letters, digits, `_`, `-` and `.`, got {quoted(str(name))}",
            )
        )
    elif name in (stage.name for stage in before):
        problems.append(
            Problem(locate(None, "name"), f"name: stage name {name!r} is used twice; names must be unique", "duplicate")
        )
    else:
        return name
    return str(number)


def _read_init(
    table: Mapping[str, Any], locate: Locate, before: Sequence[Stage], problems: list[Problem]
) -> Init | None:
    """Return the start of a stage, or None, with problems recorded if it cannot be read."""
    if "init" not in table:
        return None
    entry, where = table["init"], locate(None, "init")
    source = _find_stage("init", entry, locate, before, problems, keys=("stage", "load"))
    if source is None:
        return None
    is_lora = source.config is not None and source.config.training.training_type == "lora"
    load = entry.get("load", "lora" if is_lora else "weights")
    if load not in get_args(Load):
        problems.append(
            Problem(where, f"init: unknown load {quoted(str(load))}{nearest(str(load), get_args(Load))}", "unknown")
        )
        return None
    if load == "lora" and source.config is not None and not is_lora:
        problems.append(
            Problem(
                where,
                f'init: stage {source.name} trains all weights, so it has no LoRA; use load = "weights"',
                "conflict",
            )
        )
        return None
    return Init(source.name, load)


def _find_stage(
    key: str, entry: Any, locate: Locate, before: Sequence[Stage], problems: list[Problem],
    keys: Sequence[str] = ("stage",),
) -> Stage | None:  # fmt: skip
    """Return the earlier stage that a key of a stage names, or None, with problems recorded if there is none."""
    where = locate(None, key)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("stage"), str):
        example = f'{key} = {{ stage = "{before[-1].name if before else "low"}" }}'
        problems.append(Problem(where, f"{key}: must name an earlier stage; write {example}", "required"))
        return None
    for name in entry:
        if name not in keys:
            problems.append(Problem(where, f"{key}: unknown key {name!r}{nearest(name, keys)}", "unknown"))
    source = next((stage for stage in before if stage.name == entry["stage"]), None)
    if source is None:
        names = [stage.name for stage in before]
        hint = nearest(entry["stage"], names) if names else "; it is the first stage"
        problems.append(Problem(where, f"{key}: no earlier stage {entry['stage']!r}{hint}", "unknown"))
    return source


def _with_merged(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages; LoRA stages whose weights another stage takes in full also export merged weights."""
    merged = {stage.init.stage for stage in stages if stage.init is not None and stage.init.load == "weights"}
    exporting = []
    for stage in stages:
        config = stage.config
        if stage.name in merged and config is not None and config.training.training_type == "lora":
            formats = list(dict.fromkeys([*config.run.export_formats, "merged"]))
            run = config.run.model_copy(update={"export_formats": formats})
            stage = replace(stage, config=config.model_copy(update={"run": run}))
        exporting.append(stage)
    return exporting
