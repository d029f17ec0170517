"""Loading of flags, TOML files and Python arguments into one checked `TrainConfig`, and writing it back to TOML."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import tomli_w
from pydantic import SecretStr, ValidationError

from finetrainers.utils.logs import NOTES
from finetrainers.utils.packaged import find_shared, recipes
from finetrainers.utils.reading import TOMLDecodeError, parse_toml
from finetrainers.utils.spelling import spelled
from finetrainers.utils.text import nearest, shortened

from .dialects.aliases import FOREIGN, translate
from .dialects.dancegrpo_command import read_command
from .dialects.diffusion_pipe import is_diffusion_pipe, translate_document
from .errors import ConfigError, Problem, value_kind, value_message
from .files import read_text
from .given import Locate, RawOptions
from .methods import METHODS, trait
from .names import DEPENDENT, INSTEAD, SAME, VALUES, translate_dependent, translate_names, unknown_option
from .presets import fill_noise, fill_preset, imply_method
from .root import OWN_TABLES, TrainConfig, belongs, fields, flat_name, former_names, has_table, sections, split_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import Options

#: Lines of a TOML file: a part of a key, the header of a table, and a key with its value.
_PART = r"""[\w-]+|"[^"]*"|'[^']*'"""
_PATH = rf"(?:{_PART})(?:\s*\.\s*(?:{_PART}))*"
_HEADER = re.compile(rf"\s*\[+\s*({_PATH})\s*\]+\s*(?:#.*)?$")
_KEY = re.compile(rf"\s*({_PATH})\s*=")
#: Options that an object of Python, which `train` is given, takes the place of, by its name.
REPLACED = {
    "network": ("transformer_id", "init_from", "export_formats"),
    "optimizer": (
        "optimizer", "use_8bit_bnb", "beta1", "beta2", "beta3", "weight_decay", "epsilon", "use_cpu_offload_optimizer",
        "offload_gradients", "optimizer_in_backward", "lr", "scale_lr",
    ),
    "lr_at": ("lr", "scale_lr", "lr_scheduler", "lr_warmup_steps", "lr_cooldown_steps", "lr_num_cycles", "lr_power"),
}  # fmt: skip
#: Most parts of a key that are searched for.
_DEEPEST = 8
#: Problems after which the nearest names are left out: each search takes milliseconds.
_MOST_SUGGESTIONS = 100
#: Table of config.toml with the values that a run has chosen for open options, in a table for each source.
CHOSEN = "chosen"
#: Suffixes of scripts, among them the configs of other trainers, and advice on them.
SCRIPTS = (".py", ".sh")
SCRIPT_ADVICE = "docs/reference/published-commands.md has the commands that replace those of published guides"
#: Names of torch's dtypes, where those of options differ.
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
#: Names that are not ours, each read or refused by a dialect.
OTHER_NAMES = frozenset((*SAME, *INSTEAD, *FOREIGN, *DEPENDENT))


#: What functions of Python take for a configuration.
Source: TypeAlias = str | Path | Mapping[str, Any] | TrainConfig


def load_config(source: Source | None = None, /, **options: Unpack[Options]) -> TrainConfig:
    """Load a configuration from a source, from options by name, or from both.

        config = load_config("run.toml", lr=5e-5, output_dir="runs/second")
        print(config.optimizer.lr, config.get("lr"))

    Args:
        source: a TOML file, the name of a recipe, a dictionary like the content of a file, or another configuration.
        options: override those of `source`, by name (`lr=1e-4`) or in their table (`dpo={"beta": 500}`). Paths, and
            torch's dtypes and devices, may stand for their names.

    Raises:
        ConfigError: anything unknown, missing or out of bounds; all of it at once.
    """
    values: dict[str, Any] = dict(options)
    if source is None:
        source = values.pop("path", None)  # the name of `source` in earlier versions
    sources = [_values_source(values)]
    if isinstance(source, TrainConfig):
        sources.insert(0, _config_source(source))
    elif isinstance(source, Mapping):
        sources.insert(0, _values_source(source))
    elif source is not None:
        sources.insert(0, file_source(Path(source)))
    return build_config(sources)


def as_config(source: Source) -> TrainConfig:
    """Return a configuration unchanged, and load any other source.

    Raises:
        ConfigError: see `load_config`.
    """
    return source if isinstance(source, TrainConfig) else load_config(source)


def _values_source(values: Mapping[str, Any]) -> RawOptions:
    """Return options that are given as Python values; their names are their places."""
    options = RawOptions()
    take_options(options, as_in_toml(values), lambda table, name: ".".join(part for part in (table, name) if part))
    return options


def as_in_toml(value: Any) -> Any:
    """Return a value with paths, and torch's dtypes and devices, as text."""
    if isinstance(value, Mapping):
        return {key: as_in_toml(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_in_toml(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        text = str(value).removeprefix("torch.")
        return _DTYPES.get(text, text)
    return value


def _config_source(config: TrainConfig) -> RawOptions:
    """Return the options of a configuration that were given, and those that a run has chosen, with their sources."""
    values = {name: config.get(name) for name in fields() if config.is_given(name) or name in config.chosen}
    return RawOptions(values, where={name: name for name in values}, chosen=dict(config.chosen))


def file_source(path: Path) -> RawOptions:
    """Read a TOML file or a recipe; options stand in their section's table, or flat at the top level.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    path, text, document = read_toml(path)

    def locate(table: str | None, name: str | None) -> str:
        return f"{path}:{find_line(text, name, table)}"

    options = RawOptions()
    if is_diffusion_pipe(document):
        document = translate_document(document, options, locate)
    take_options(options, document, locate)
    find_inputs(options, path.parent)
    return options


def find_inputs(options: RawOptions, directory: Path) -> None:
    """Replace paths of data and prompts that are not in the working directory by those in `directory` or packaged."""
    for name, value in options.values.items():
        if name not in fields() or fields()[name].place != "input" or not isinstance(value, str) or not value:
            continue
        with suppress(OSError, ValueError):  # prompts that cannot be paths
            if not Path(value).exists():
                path = directory / value if (directory / value).exists() else find_shared(value)
                options.values[name] = value if path is None else str(path)


def take_options(options: RawOptions, document: Mapping[str, Any], locate: Locate) -> None:
    """Add options that stand in their section's table, or flat at the top level; values may be tables themselves."""
    for entry, value in document.items():
        if not isinstance(value, Mapping) or (not has_table(entry) and _is_option(entry)):
            _take_option(options, *split_name(entry), value, locate)
        elif entry == CHOSEN:
            for source, chosen in value.items():
                for name, inner in chosen.items() if isinstance(chosen, Mapping) else ():
                    _take_option(options, *split_name(name), inner, locate)
                    options.chosen[name] = source
        elif has_table(entry):
            for name, inner in value.items():
                _take_option(options, entry, name, inner, locate)
        else:
            others = sections() if len(options.problems) < _MOST_SUGGESTIONS else ()
            message = "; ".join([f"unknown table [{entry}]{nearest(entry, others)}", *METHODS.broken])
            options.problems.append(Problem(locate(entry, None), message, "unknown"))


def _is_option(name: str) -> bool:
    """Return whether a name is an option's, of ours or of another trainer."""
    return name.replace("-", "_") in fields() or name.replace("-", "_") in OTHER_NAMES


def _take_option(options: RawOptions, table: str | None, name: str, value: Any, locate: Locate) -> None:
    where = locate(table, name)
    name = flat_name(name.replace("-", "_"), table)
    option = former_names().get(name, name)
    if option in fields() and not belongs(option, table):
        options.problems.append(Problem(where, f"{name!r} belongs in [{fields()[option].section}], not in [{table}]"))
    elif option not in fields() and name not in OTHER_NAMES:
        options.problems.append(unknown_option(name, where, suggest=len(options.problems) < _MOST_SUGGESTIONS))
    elif name in options.values:
        options.problems.append(Problem(where, f"{name!r} is set twice", "duplicate"))
    else:
        options.values[name], options.where[name] = value, where


def read_toml(path: Path) -> tuple[Path, str, dict[str, Any]]:
    """Read a TOML file, or the recipe of this name: return its path, its text and its parsed content.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    with suppress(OSError):  # a name that is too long
        path = path if path.is_file() else find_shared(path) or path
        if path.is_dir():
            config, command = path / "config.toml", f"finetrainers init {shlex.quote(str(path))}"
            remedy = f"use {config}" if config.is_file() else f"`{command}` writes a config file for its clips"
            raise ConfigError([Problem("--config", f"{path} is a directory; {remedy}")])
    if path.suffix in SCRIPTS:
        raise ConfigError([Problem("--config", f"{path} is a script, and config files are TOML; {SCRIPT_ADVICE}")])
    path, text = read_text(path, option="--config", others=recipes())
    try:
        return path, text, parse_toml(text)
    except TOMLDecodeError as error:
        message = f"not valid TOML: {error}"
        if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
            message = "is JSON, and config files are TOML: write `rank = 64`; see docs/reference/configuration.md"
        elif path.suffix.lower() in (".yaml", ".yml") or re.match(r"(\s*#.*\n|---\s*\n)*\s*\w+:\s", text):
            message = (
                "is YAML, and config files are TOML: write `rank = 64`, no colon; see docs/reference/configuration.md"
            )
        raise ConfigError([Problem(str(path), message, "unreadable")]) from None


def find_line(text: str, name: str | None, table: str | None) -> int:
    """Return the line number of `name` (in `table` if given), or of the table itself; 1 if it is not found.

    A name may begin a dotted key or a header: `mask_ratios.random = 0.1` and `[data.mask_ratios]` give `mask_ratios`.
    """
    key = (*(table.split(".") if table else ()), *((name,) if name is not None else ()))
    return _lines(text).get(tuple(part.replace("-", "_") for part in key), 1)


@lru_cache(maxsize=4)
def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line number of each key by its parts, whole or from the second or third, with `_` for `-`."""
    lines: tuple[dict[tuple[str, ...], int], ...] = ({}, {}, {})
    header: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        opened = _HEADER.match(line)
        match = opened or _KEY.match(line)
        if match is None:
            continue
        parts = [part.strip("\"'").replace("-", "_") for part in re.findall(_PART, match[1])]
        header = parts if opened else header
        path = parts if opened else [*header, *parts]
        for start, numbers in enumerate(lines):
            for end in range(start + 1, min(len(path), _DEEPEST) + 1):
                numbers.setdefault(tuple(path[start:end]), number)
    return lines[2] | lines[1] | lines[0]  # a key at the top wins over one of its name in a table


def build_config(sources: Sequence[RawOptions]) -> TrainConfig:
    """Merge sources (later ones override), translate other programs' names, apply the preset, and validate.

    Raises:
        ConfigError: all problems of all sources at once.
    """
    command = read_command(sources, FOREIGN)
    sources = [*([] if command is None else [command]), *sources]
    method = next((source.values["method"] for source in reversed(sources) if "method" in source.values), None)
    merged = RawOptions()
    for source in sources:
        translate_names(source, others=FOREIGN if trait(method, "compares") else ())
        merged.override(source)
    translate_dependent(merged)
    imply_method(merged)
    translate(merged)
    fill_preset(merged)
    fill_noise(merged)
    if os.environ.get("RANK", "0") == "0":
        for note in merged.notes:
            NOTES.warning(spelled(note))
    return _validated(merged)


def _validated(options: RawOptions) -> TrainConfig:
    """Return the validated configuration of flat options.

    Raises:
        ConfigError: there are problems already, or a value is invalid.
    """
    problems, wrong, config = list(options.problems), list(options.lost), None
    try:
        config = TrainConfig.model_validate(_by_table(options.values)).with_chosen({}, options.chosen)
    except ValidationError as error:
        value_problems = {
            name: problem for name, problem in _translate(error, options.where).items() if name not in wrong
        }
        problems += value_problems.values()
        wrong += value_problems
        valid_values = {name: value for name, value in options.values.items() if name not in value_problems}
        with suppress(ValidationError):  # a required option is among the invalid ones
            config = TrainConfig.model_validate(_by_table(valid_values))
    if problems or config is None:
        raise ConfigError(problems, rest=config, wrong=wrong)
    return config


def _by_table(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return flat options in the tables of their sections."""
    tables: dict[str, dict[str, Any]] = {"model": {}}
    for name, value in values.items():
        tables.setdefault(fields()[name].section, {})[fields()[name].key] = value
    return tables


def _translate(error: ValidationError, where: Mapping[str, str]) -> dict[str, Problem]:
    """Return pydantic's errors by option, each as a problem that names the option, its value and the allowed values."""
    problems: dict[str, Problem] = {}
    for entry in error.errors():
        table, key = str(entry["loc"][0]), str(entry["loc"][1])
        name = flat_name(key, table)
        option = fields()[name].field
        if entry["type"] == "missing" and len(entry["loc"]) > 2:
            value = shortened(repr(entry["input"]))
            problems[name] = Problem(where.get(name, f"--{name}"), f"{value} is incomplete: {option.description}")
            continue
        if entry["type"] == "missing":
            problems[name] = Problem(f"--{name}", f"is required: {option.description}", "required")
            continue
        message = value_message(entry, secret=SecretStr in get_args(option.annotation), synonyms=VALUES.get(name))
        place = where.get(name, f"--{name}")
        message = message if place.endswith(name) else f"{name}: {message}"
        problems.setdefault(name, Problem(place, message, value_kind(entry)))
    return problems


def dump_toml(config: TrainConfig, *, defaults: bool = True) -> str:
    """Dump the configuration as TOML that loads back to an equal one; see `Option.dumped`.

    Args:
        config: the configuration.
        defaults: whether options at their defaults are written, too, if they were not given.
    """
    tables = OWN_TABLES | {config.training.method}  # tables of other packages' methods are called like these
    values = {n: value for n, value in config.plain().items() if value is not None and fields()[n].section in tables}
    if "train_steps" in config.chosen:  # where epochs stand, steps are not chosen
        del values["train_epochs"]
    for part in config.run.parts:
        for name in REPLACED.get(part.partition("=")[0], ()):
            values.pop(name, None)
    if not defaults:
        values = {name: value for name, value in values.items() if config.is_given(name) or config.changed(name)}
    document: dict[str, Any] = _by_table({name: value for name, value in values.items() if name not in config.chosen})
    for name, source in config.chosen.items():
        if name in values:
            document.setdefault(CHOSEN, {}).setdefault(source, {})[name] = values[name]
    return tomli_w.dumps(document)
