"""Flags of the commands that sample: a section of their own, and the options of a run that samples depend on."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from finetrainers.config.base import Section
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.names import unknown_option
from finetrainers.config.root import fields
from finetrainers.config.sample import VALIDATION_NAMES, options_of_runs
from finetrainers.config.shape import choices, is_list, is_switch, kind
from finetrainers.utils.text import nearest


class OptionsParser(argparse.ArgumentParser):
    """Raises its errors, so that they are reported with the others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem("command line", message)])


def options_parser(section: type[Section], *, prog: str, usage: str, about: str, epilog: str) -> OptionsParser:
    """A parser of positional `targets` and of flags, each of which is absent unless it is given.

    Args:
        section: the command's own options, with help.
        prog, usage, about, epilog: texts of its help.
    """
    parser = OptionsParser(
        prog=prog, usage=usage, description=about, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=argparse.SUPPRESS)
    for name, field in section.model_fields.items():
        more: dict[str, Any] = {"default": argparse.SUPPRESS, "help": (field.description or "").replace("%", "%%")}
        if is_switch(field):
            more["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        elif is_list(field):
            more |= {"nargs": "+", "metavar": "X"}
        else:
            of = choices(field.annotation)
            words = {"integer": "N", "number": "X", "path": "FOLDER", "size": "SIZE"}
            word = "FILE" if name.endswith("_file") else words.get(kind(field.annotation), "TEXT")
            more["metavar"] = "{" + ",".join(of) + "}" if of else word
        parser.add_argument(f"--{name}", **more)
    for name in options_of_runs():
        if name in section.model_fields:
            continue
        more = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if is_switch(fields()[name].field):
            more["action"] = argparse.BooleanOptionalAction
        elif is_list(fields()[name].field):
            more["nargs"] = "*"
        parser.add_argument(f"--{name}", **more)
    return parser


def unknown_flag(section: type[Section], flag: str) -> Problem:
    """What is wrong with a flag that the command does not have."""
    name = flag[2:].removeprefix("no-")
    ours = VALIDATION_NAMES.get(name)
    if ours in section.model_fields:
        return Problem(flag, f"unknown flag; here it is --{ours}")
    if name in fields():
        return Problem(flag, "unknown flag; it is an option of training that no sample depends on, remove it")
    known = (*section.model_fields, *options_of_runs())
    close = nearest(name, known, listed=0)
    return Problem(flag, f"unknown flag{close}") if close else unknown_option(name, flag)
