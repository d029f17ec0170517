"""Flags of commands: numbers, options of a run beside their own, and the sections of the commands that sample."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from finetrainers.config.arguments import ArgumentParser, ArgumentType, near_flag, split_unknown, unknown_flags
from finetrainers.config.base import LARGEST
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.flags import flat_flag, parse_flags
from finetrainers.config.given import RawOptions
from finetrainers.config.names import INSTEAD, unknown_option
from finetrainers.config.root import TrainConfig, fields
from finetrainers.config.sample import VALIDATION_NAMES, S, options_of_runs, read_options
from finetrainers.config.shape import choices, is_list, is_switch, kind
from finetrainers.utils.text import shortened

_DIGITS = 40  # of any number; Python refuses to read thousands


def make_number_type(message: str, lowest: int, highest: float = LARGEST) -> ArgumentType[int]:
    """Return the type of an argument that is a whole number.

    Args:
        message: the problem with another value.
        lowest, highest: bounds.
    """

    def read(text: str) -> int:
        is_long = len(text) > _DIGITS
        if not text.isdecimal() or is_long or not lowest <= int(text) <= highest:
            limit = f" and at most {highest:g}" if text.isdecimal() and (is_long or int(text) > LARGEST) else ""
            raise ValueError(f"{message}{limit}, got {shortened(repr(text))}")
        return int(text)

    return ArgumentType(read)


#: Type of arguments that count something.
positive_integer = make_number_type("must be a whole number of at least 1", 1)


def read_run_config(parser: ArgumentParser, flags: Sequence[str], problems: list[Problem]) -> TrainConfig:
    """Return the configuration of a run in the flags that are not the command's own.

    Args:
        parser: of the command's own options.
        flags: the other ones.
        problems: those with the command's own options.

    Raises:
        ConfigError: all problems.
    """
    config, _ = parse_flags(flags, prog=parser.prog, own=parser.flags, own_problems=problems)
    if config is None:
        raise ConfigError([Problem("--list_models", "is an option of `finetrainers train`", "unknown")])
    return config


@dataclass(frozen=True)
class Arguments(Generic[S]):
    """Parsed command line.

    Attributes:
        targets: arguments before the flags, between them, or after them.
        options: the command's own options; invalid ones have their defaults.
        flags: options of a run.
        problems: problems with the command line.
        unclear: whether unknown flags make the command line ambiguous.
    """

    targets: list[str]
    options: S
    flags: RawOptions
    problems: list[Problem]
    unclear: bool


def read_arguments(parser: ArgumentParser, section: type[S], argv: Sequence[str]) -> Arguments[S]:
    """Read the targets and options of a command line of a command that samples."""
    namespace, unknown = parser.parse_known_args([flat_flag(argument) for argument in argv])
    flags_of_none, more = split_unknown(unknown)
    values = vars(namespace)
    targets = [*values.pop("targets"), *more]  # argparse takes those that stand together
    problems = [*unknown_flags(flags_of_none, partial(unknown_flag, section)), *parser.problems([])]
    own = {name: values.pop(name) for name in list(values) if name in section.model_fields}
    options, wrong = read_options(section, own)
    flags = RawOptions(values, {name: f"--{name}" for name in values})
    return Arguments(targets, options, flags, [*problems, *wrong], bool(flags_of_none))


def options_parser(section: type[S], *, prog: str, usage: str, about: str, epilog: str) -> ArgumentParser:
    """Return a parser of positional `targets` and of flags; its result lacks flags that are not given.

    Args:
        section: the command's own options, with help.
        prog, usage, about, epilog: parts of its help.
    """
    parser = ArgumentParser(
        prog=prog, usage=usage, description=about, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", type=str, nargs="*", metavar="TARGET", help=argparse.SUPPRESS)
    for name, field in section.model_fields.items():
        # The section judges values.
        more: dict[str, Any] = {"default": argparse.SUPPRESS, "help": (field.description or "").replace("%", "%%")}
        more |= {} if is_switch(field) else {"type": str}
        if is_switch(field):
            more["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        elif is_list(field):
            more |= {"nargs": "+", "metavar": "X"}
        else:
            values = choices(field.annotation)
            metavars = {"integer": "N", "number": "X", "path": "FOLDER", "size": "SIZE"}
            metavar = "FILE" if name.endswith("_file") else metavars.get(kind(field.annotation), "TEXT")
            more["metavar"] = "{" + ",".join(values) + "}" if values else metavar
        parser.add_argument(f"--{name}", **more)
    for name in options_of_runs():
        if name in section.model_fields:
            continue
        more = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if is_switch(fields()[name].field):
            more["action"] = argparse.BooleanOptionalAction
        else:
            more |= {"type": str, "nargs": "*"} if is_list(fields()[name].field) else {"type": str}
        parser.add_argument(f"--{name}", **more)
    return parser


def unknown_flag(section: type[S], flag: str) -> Problem:
    """Return the problem with a flag that the command does not have."""
    name = flag.lstrip("-").removeprefix("no-")
    option_name = VALIDATION_NAMES.get(name)
    if option_name in section.model_fields:
        return Problem(flag, f"unknown flag; here it is --{option_name}", "unknown")
    if name in fields():
        message = "unknown flag; it is a training option that does not affect samples, remove it"
        return Problem(flag, message, "unknown")
    names = (*section.model_fields, *options_of_runs())
    is_advised = any(f"--{known_name} " in f"{INSTEAD.get(name)} " for known_name in names)
    close = None if is_advised else near_flag(flag, [f"--{known_name}" for known_name in names])
    return Problem(flag, f"unknown flag; did you mean {close}?", "unknown") if close else unknown_option(name, flag)
