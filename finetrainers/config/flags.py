"""The command line: flags made from the schema, with every mistake reported at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from .aliases import REFUSED, SWITCHES, WITHOUT_EFFECT, foreign_names
from .errors import ConfigError, Problem
from .load import Source, build_config, file_source
from .load_variants import LOAD_VARIANTS
from .names import INSTEAD, SAME, unknown_option
from .root import TrainConfig, fields


class _Parser(argparse.ArgumentParser):
    """argparse whose errors join the others instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem("", message)])


def is_list(field: FieldInfo) -> bool:
    """Whether the option takes several values."""
    return get_origin(field.annotation) is list


def is_switch(field: FieldInfo) -> bool:
    """Whether the option is a boolean flag."""
    return field.annotation is bool


def choices(annotation: Any) -> tuple[str, ...]:
    """Allowed values of a Literal, of an optional Literal, or of a list of Literals."""
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    if origin in (list, Union, UnionType, Annotated):
        for argument in get_args(annotation):
            found = choices(argument)
            if found:
                return found
    return ()


def default_text(field: FieldInfo) -> str:
    """The default as a user would write it."""
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def make_parser(prog: str, *, description: str | None = None) -> argparse.ArgumentParser:
    """The parser of a training command, or of one with the same options; one argument group a section."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description
        or (
            "Finetune a video diffusion model. Options come from --config FILE.toml and from flags; flags win.\n"
            f"Example: {prog} --config run.toml --data_root clips --output_dir runs/first"
        ),
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file of options; repeat flags to override it."
    )
    parser.add_argument("--list_models", action="store_true", help="Print the model families and exit.")
    # Some launchers (`deepspeed`) add it to the command; they say the same in the environment, where it is read.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    groups: dict[str, Any] = {}
    for name, (section, field) in fields().items():
        if section not in groups:
            groups[section] = parser.add_argument_group(section, TrainConfig.model_fields[section].description)
        help_text = f"{field.description} [{default_text(field)}]".replace("%", "%%")
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text}
        if is_switch(field):
            options["action"] = argparse.BooleanOptionalAction
        else:
            allowed = choices(field.annotation)
            options["metavar"] = "{" + ",".join(allowed) + "}" if allowed else name.rsplit("_", 1)[-1].upper()
            if is_list(field):
                options["nargs"] = "*"
        groups[section].add_argument(f"--{name}", **options)
    for name, shape in _other_flags().items():
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **shape)
    return parser


def _other_flags() -> dict[str, dict[str, Any]]:
    """Names of other programs, and what `add_argument` has to know of each."""
    alone: dict[str, Any] = {"nargs": "?", "const": True}
    any_number: dict[str, Any] = {"nargs": "*"}
    found = dict.fromkeys(INSTEAD, any_number)
    for name in foreign_names():
        found[name] = any_number if name in REFUSED or name in WITHOUT_EFFECT else alone if name in SWITCHES else {}
    for name, option in SAME.items():
        field = fields()[option][1]
        found[name] = alone if is_switch(field) else any_number if is_list(field) else {}
    for name in LOAD_VARIANTS:
        found[name] = alone if name == "start_from_scratch" else {}
    return found


def underscored(argument: str) -> str:
    """A flag as it is written here: `--data-root=x` is `--data_root=x`; what is no flag stays."""
    flag, equals, value = argument.partition("=")
    if not flag.startswith("--") or flag == "--":
        return argument
    name = flag[2:].replace("-", "_")
    switch = fields().get(name.removeprefix("no_"))
    if name.startswith("no_") and switch is not None and is_switch(switch[1]):
        name = f"no-{name[3:]}"
    return f"--{name}{equals}{value}"


def is_secret(argument: str) -> bool:
    """Whether an argument is a flag whose value nobody may read: of the hub or of a tracker."""
    name = underscored(argument).partition("=")[0].removeprefix("--")
    return argument.startswith("--") and (
        SAME.get(name, name) == "hub_token" or name.endswith(("api_key", "wandb_key"))
    )


def parse_flags(
    argv: Sequence[str], *, prog: str = "train.py", description: str | None = None
) -> tuple[TrainConfig | None, bool]:
    """The configuration that the arguments describe, and whether only the model list was asked for.

    Raises:
        ConfigError: unknown flags (with the nearest valid name), wrong values, file errors; all at once.
        SystemExit: after `--help`.
    """
    parser = make_parser(prog, description=description)
    namespace, unknown = parser.parse_known_args([underscored(argument) for argument in argv])
    values = vars(namespace)
    config_path = values.pop("config")
    values.pop("local_rank")
    if values.pop("list_models"):
        return None, True
    flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("--")]
    problems = [unknown_option(flag[2:].removeprefix("no-"), flag) for flag in flags]
    stray = [argument for argument in unknown if not argument.startswith("--")]
    if stray and not problems:
        problems.append(Problem("command line", f"unexpected {' '.join(map(repr, stray))}; values follow their flag"))
    sources: list[Source] = []
    if config_path is not None:
        try:
            sources.append(file_source(config_path))
        except ConfigError as error:  # what the file would have set is not known, so nothing more can be judged
            raise ConfigError([*problems, *error.problems]) from None
    sources.append(Source(values, lambda name: f"--{name}", problems))
    return build_config(sources), False
