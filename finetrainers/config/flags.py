"""Command line: flags made from the schema, with every mistake reported at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from .arguments import ArgumentParser, format_arguments, near_flag, path_argument, split_unknown, unknown_flags
from .errors import ConfigError, Problem
from .given import RawOptions
from .help import TRAIN, Guide, help_text
from .load import OTHER_NAMES, build_config, file_source
from .names import SAME, unknown_option
from .root import TrainConfig, belongs, fields, sections, split_name
from .shape import is_list, is_switch


class _Help(argparse.Action):
    """`--help [WORD]`."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, guide: Guide) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS)
        self.guide = guide

    def __call__(self, parser: argparse.ArgumentParser, *call: Any) -> None:
        _, word, _ = call
        sys.stdout.write(help_text(parser.prog, word, guide=self.guide))
        parser.exit()


def make_parser(prog: str, *, guide: Guide = TRAIN) -> ArgumentParser:
    """Return the parser of a training command, or of one with the same options."""
    parser = ArgumentParser(prog=prog, add_help=False)
    parser.add_argument("-h", "--help", action=_Help, guide=guide)
    parser.add_argument("--config", type=path_argument)
    parser.add_argument("--list_models", action="store_true")
    # Some launchers (`deepspeed`) add it to the command; they also set it in the environment, where it is read.
    parser.add_argument("--local_rank")
    for name, option in fields().items():
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{prog} --help {name} says which"}
        if is_switch(option.field):
            options["action"] = argparse.BooleanOptionalAction
        else:  # the sections judge values
            options |= {"type": str, "nargs": "*"} if is_list(option.field) else {"type": str}
        parser.add_argument(f"--{name}", **options)
    for name in OTHER_NAMES:
        parser.add_argument(f"--{name}", action=_Other, type=str, nargs="*", default=argparse.SUPPRESS)
    return parser


class _Other(argparse.Action):
    """Flag of another program. Our option that it becomes checks its value later; alone it is a switch."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        is_several = len(values) > 1 or (self.dest in SAME and is_list(fields()[SAME[self.dest]].field))
        setattr(namespace, self.dest, values if is_several else values[0] if values else True)


def flat_flag(argument: str) -> str:
    """Return a flag as the parser has it: `--data_root=x` for `--data-root=x`, and `--eta` for `--grpo.eta`."""
    flag, equals, value = argument.partition("=")
    if not flag.startswith("--") or flag == "--":
        return argument
    name = flag[2:].replace("-", "_")
    if name.startswith("no_") or ".no_" in name:
        switch = _without_table(name.removeprefix("no_").replace(".no_", ".", 1))
        if switch in fields() and is_switch(fields()[switch].field):
            return f"--no-{switch}{equals}{value}"
    return f"--{_without_table(name)}{equals}{value}"


def _without_table(name: str) -> str:
    """Return a flag's name without the table of its option, if it is the right one and not part of the name."""
    table, key = split_name(name)
    option = SAME.get(key, key)
    plain = table is not None and not sections()[table].qualified and option in fields() and belongs(option, table)
    return key if plain else name


def is_secret(argument: str) -> bool:
    """Return whether an argument is a flag with a secret value: a token of the Hub or of a tracker."""
    name = flat_flag(argument).partition("=")[0].removeprefix("--")
    return argument.startswith("--") and (
        SAME.get(name, name) == "hub_token" or name.endswith(("api_key", "wandb_key"))
    )


def parse_flags(
    argv: Sequence[str],
    *,
    prog: str = "train.py",
    guide: Guide = TRAIN,
    own: Collection[str] = (),
    own_problems: Sequence[Problem] = (),
) -> tuple[TrainConfig | None, bool]:
    """Parse flags: return the configuration, and whether only the list of models was requested.

    A file of options may come first, without its flag.

    Args:
        argv: the flags.
        prog, guide: of the help.
        own: other flags of the command, to suggest for unknown ones.
        own_problems: problems with those, which are reported together with the others.

    Raises:
        ConfigError: unknown flags (with the nearest valid name), wrong values, file errors; all at once.
        SystemExit: after `--help`.
    """
    path, flags = read_flags(argv, prog=prog, guide=guide, own=own, own_problems=own_problems)
    if flags is None:
        return None, True
    sources: list[RawOptions] = []
    if path is not None:
        try:
            sources.append(file_source(path))
        except ConfigError as error:  # the file's options are not known, so nothing more can be judged
            raise ConfigError([*flags.problems, *error.problems]) from None
    return build_config([*sources, flags]), False


def read_flags(
    argv: Sequence[str],
    *,
    prog: str,
    guide: Guide = TRAIN,
    own: Collection[str] = (),
    own_problems: Sequence[Problem] = (),
) -> tuple[Path | None, RawOptions | None]:
    """Read flags: return the path of the config file, which is not read, and the flags with their problems.

    The flags are None if only the list of models was requested.

    Args:
        argv, prog, guide, own, own_problems: see `parse_flags`.

    Raises:
        SystemExit: after `--help`.
    """
    arguments = [flat_flag(argument) for argument in argv]  # which adds the tables of installed packages' methods
    parser = make_parser(prog, guide=guide)
    first = ["--config"] if argv and not argv[0].startswith("-") else []
    namespace, unknown = parser.parse_known_args([*first, *arguments])
    values = vars(namespace)
    path = values.pop("config")
    values.pop("local_rank")
    if values.pop("list_models"):
        return path, None
    flags, stray = split_unknown(unknown)

    def describe(flag: str) -> Problem:
        near, name = near_flag(flag, own), flag.lstrip("-").removeprefix("no-")
        other = unknown_option(name, f"--{name}")
        return Problem(flag, f"unknown flag; did you mean {near}?" if near else other.message, "unknown", other.about)

    problems = [*own_problems, *unknown_flags(flags, describe)]
    if stray:
        problems.append(Problem("command line", f"unexpected {format_arguments(stray)}; values follow their flag"))
    problems += parser.problems([])
    return path, RawOptions(values, {name: f"--{name}" for name in values}, problems)
