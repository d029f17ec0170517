"""Parser of command lines that collects mistakes, so that all of them are reported at once."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from finetrainers.utils.failures import Kind, error_kind
from finetrainers.utils.files import folder_problem
from finetrainers.utils.logs import NOTES
from finetrainers.utils.text import nearest, quoted, shortened

from .base import check_text, read_path
from .errors import MAX_ALIKE, ConfigError, Problem

T = TypeVar("T")

_NUMBER = re.compile(r"-\.?\d")
_KINDS = {"float": "a number", "int": "a whole number"}
#: Characters of an argument without a type, and magnitude of a number: that of 64 bits, as seeds have.
_MAX_TEXT, _MAX_NUMBER = 4096, 2.0**63


@dataclass(frozen=True)
class ArgumentType(Generic[T]):
    """Type of an argument; the parser enforces both functions for every command.

    Attributes:
        read: reads it; a ValueError is the problem with it.
        check: returns the problem with a readable value, and its kind, or None; the command's own check is made even
            so, to report all problems together.
    """

    read: Callable[[str], T]
    check: Callable[[T], tuple[str, Kind] | None] | None = None

    def __call__(self, text: str) -> T:
        """Read an argument for argparse."""
        return self.read(text)


def read_command(text: str) -> list[str]:
    """Return the words of a command that exists on this machine.

    Raises:
        ValueError: a quotation is not closed, or there is no such program.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot split {shortened(quoted(text))} into words: {error}") from None
    if not words:
        raise ValueError("must not be empty; set a command, or remove the option")
    if shutil.which(words[0]) is None:
        raise ValueError(f"program {shortened(quoted(words[0]))} not found; install it, or use its full path")
    return words


def _check_directory(path: Path) -> tuple[str, Kind] | None:
    problem = folder_problem(path)
    return None if problem is None else (problem, "invalid")


def _check_new_directory(path: Path) -> tuple[str, Kind] | None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        return f"{path} is not an empty directory; use a new one", "occupied"
    return _check_directory(path)


def _read_plain_text(text: str) -> str:
    """Return the text of an argument without a type.

    Raises:
        ValueError: it is empty, too long, or not text.
    """
    if not text.strip():
        raise ValueError("must not be empty")
    if len(text) > _MAX_TEXT:
        raise ValueError(f"must have at most {_MAX_TEXT} characters, got {len(text)}")
    check_text(text)
    return text


#: Types of arguments that are commands: as words, and as text.
command_argument = ArgumentType(read_command)
command_text = ArgumentType(lambda text: shlex.join(read_command(text)))
#: Types of arguments that are paths: of any kind, of an output directory, and of one that must be new or empty.
path_argument = ArgumentType(read_path)
output_directory = ArgumentType(read_path, check=_check_directory)
new_directory = ArgumentType(read_path, check=_check_new_directory)


class ArgumentParser(argparse.ArgumentParser):
    """Argparse parser that collects problems, where argparse ends the process at the first mistake.

    `parse_args` raises all problems. After `parse_known_args`, `problems` has those of values and of missing arguments.
    """

    # argparse sets its attributes in `__init__`; these are of one command line.
    _messages: dict[argparse.Action, list[tuple[str, Kind]]]
    _unusable: list[Problem]  # with values that can be read
    _seen_actions: set[argparse.Action]
    _required: list[argparse.Action]

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None, *, checked: bool = False
    ) -> Any:
        """Return the arguments.

        A command sets further checks, such as those of paths, with `set_defaults(check=function)`: the function takes
        the arguments, and returns the problems or raises them. Arguments that are already wrong have their defaults.

        Args:
            args: the command line.
            namespace: gets the arguments.
            checked: whether the command's own check is made.

        Raises:
            ConfigError: all problems with them.
            SystemExit: after `--help`.
        """
        namespace, unknown = self.parse_known_args(args, namespace)
        *ancestors, parser = self._parser_chain(namespace)
        problems = [problem for ancestor in ancestors for problem in ancestor.problems([])] + parser.problems(unknown)
        hint = f"{parser.prog} --help lists the options" if problems else ""
        check = getattr(namespace, "check", None) if checked else None
        if check is not None and not unknown and parser._is_clear():
            try:
                problems += check(namespace)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems, of="this command", hint=hint)
        return namespace

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the arguments, with defaults in place of wrong values, and the unknown arguments."""
        self._messages, self._unusable, self._seen_actions = {}, [], set()
        self._negative_number_matcher = _NUMBER  # argparse takes -1e-4 for a flag
        self.allow_abbrev = False
        self._required = [action for action in self._actions if action.required]
        for action in self._required:
            action.required = False  # argparse would end here
        try:
            return super().parse_known_args(self._readable(args or ()), namespace)
        finally:
            for action in self._required:
                action.required = True

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help or the version; argparse itself ignores that a disk is full."""
        (file or sys.stderr).write(message or "")

    def problems(self, unknown: Sequence[str]) -> list[Problem]:
        """Return the problems of the last command line, with unknown arguments first.

        Args:
            unknown: arguments that the parser does not know, as `parse_known_args` gives them.
        """
        flags, stray = split_unknown(unknown)
        suggestions = {flag: near_flag(flag, self.flags) for flag in flags[:MAX_ALIKE]}

        def describe(flag: str) -> Problem:
            near = suggestions[flag]
            return Problem(flag, f"unknown flag{f'; did you mean {near}?' if near else ''}", "unknown")

        problems = unknown_flags(flags, describe)
        if stray:
            problems.append(Problem("", f"unexpected {format_arguments(stray)}"))
        for action, messages in self._messages.items():
            if action.option_strings or not flags:  # it may be the value of an unknown flag
                problems += [
                    Problem(display_name(action), message, kind, about=(action.dest,))
                    for message, kind in dict.fromkeys(messages)
                ]
        problems += self._unusable
        for action in self._required:
            if action not in self._seen_actions and not {*action.option_strings} & {*suggestions.values()}:
                problems.append(Problem(display_name(action), f"is required: {_describe_values(action)}", "required"))
        return problems

    def _is_clear(self) -> bool:
        """Return whether all positional and required arguments are given and readable."""
        is_wrong = any(not action.option_strings for action in self._messages)
        return not is_wrong and all(action in self._seen_actions for action in self._required)

    @property
    def flags(self) -> list[str]:
        """Flags that the parser knows."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def error(self, message: str) -> NoReturn:
        """Raise the mistake that argparse cannot continue after, with all earlier problems."""
        where, reason = "", message
        if message.startswith("argument "):
            where, _, reason = message.removeprefix("argument ").partition(": ")
        self._raise(Problem(where, reason))

    def _raise(self, problem: Problem) -> NoReturn:
        """Raise all earlier problems and this one."""
        raise ConfigError(
            [*self.problems([]), problem], of="this command", hint=f"{self.prog} --help lists the options"
        )

    def _parser_chain(self, namespace: argparse.Namespace) -> Iterator[ArgumentParser]:
        """Yield the parsers of the command, of its subcommand, and so on."""
        yield self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parser = action.choices.get(str(getattr(namespace, action.dest, None)))
                if isinstance(parser, ArgumentParser):
                    yield from parser._parser_chain(namespace)

    def _readable(self, args: Iterable[str]) -> Iterator[str]:
        """Yield arguments with flags spelled as the parser has them, without the values that switches do not take."""
        for argument in args:
            flag, equals, value = argument.partition("=")
            spelled = flag if flag in self._option_string_actions else f"--{flag[2:].replace('-', '_')}"
            action = self._option_string_actions.get(spelled) if flag.startswith("--") else None
            if action is None:
                yield argument
            elif equals and action.nargs == 0:
                no = next((f"; {name} turns it off" for name in action.option_strings if name.startswith("--no-")), "")
                self._refuse(action, f"takes no value, got {shortened(quoted(value))}{no}")
            else:
                yield f"{spelled}{equals}{value}"

    def _refuse(self, action: argparse.Action, message: str, kind: Kind = "invalid") -> None:
        self._seen_actions.add(action)
        self._messages.setdefault(action, []).append((message, kind))

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)  # type: ignore[misc,no-any-return]
        except argparse.ArgumentError:
            self._refuse(action, f"requires a value: {_describe_values(action)}".removesuffix(": "), "required")
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Repeated flags are perhaps meant as one list.
        if action in self._seen_actions and action.option_strings and action.nargs in ("*", "+"):
            NOTES.warning("%s is set twice; the last one counts. Put all values after one flag", display_name(action))
        self._seen_actions.add(action)
        if not arg_strings and action in self._messages and action.nargs != 0:
            return action.default
        values = super()._get_values(action, arg_strings)  # type: ignore[misc]
        if action in self._messages:
            return action.default
        if isinstance(action.type, ArgumentType):
            self._check_values(action, action.type, values if isinstance(values, list) else [values])
        return values

    def _check_values(self, action: argparse.Action, kind: ArgumentType[Any], values: Sequence[Any]) -> None:
        """Record the problems with readable values of an argument: those of its type, and repeated paths."""
        problems = [kind.check(value) for value in values if kind.check is not None and value is not None]
        paths = Counter(os.path.realpath(value) for value in values if isinstance(value, Path))
        problems += [(f"{path} is given {count} times; give it once", "duplicate")
                     for path, count in paths.items() if count > 1]  # fmt: skip
        self._unusable += [Problem(display_name(action), *problem, (action.dest,)) for problem in problems if problem]

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            if isinstance(action.type, ArgumentType):
                return action.type.read(arg_string)
            if action.type is None and action.choices is None:
                return _read_plain_text(arg_string)
            value = super()._get_value(action, arg_string)  # type: ignore[misc]
            if isinstance(value, (int, float)) and not abs(value) < _MAX_NUMBER:
                raise ValueError(f"must be a finite number below 2^63, got {shortened(quoted(arg_string))}")
            return value
        except argparse.ArgumentError as error:
            kind = _KINDS.get(getattr(action.type, "__name__", ""))
            self._refuse(action, f"must be {kind}, got {shortened(quoted(arg_string))}" if kind else error.message)
        except ValueError as error:
            self._refuse(action, str(error), error_kind(error))
        return arg_string

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        valid = [str(choice) for choice in action.choices]
        hint = nearest(str(value), valid, listed=0)
        listing = f"{'' if hint else ';'} {'Valid' if hint else 'valid'}: {', '.join(valid)}"
        message = f"unknown value {shortened(quoted(str(value)))}{hint}{listing}"
        if isinstance(action, argparse._SubParsersAction):  # the arguments of the subcommand are not known
            self._raise(Problem(display_name(action), message, "unknown"))
        self._refuse(action, message, "unknown")


def split_unknown(unknown: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return unknown flags, and arguments that belong to none: those after an unknown flag may be its values."""
    unknown = [argument for argument in unknown if argument != "--"]
    is_flag = [argument.startswith("-") and argument != "-" and not _NUMBER.match(argument) for argument in unknown]
    first = is_flag.index(True) if True in is_flag else len(unknown)
    flags = [argument.partition("=")[0] for argument, flag in zip(unknown, is_flag, strict=True) if flag]
    return list(dict.fromkeys(flags)), list(unknown[:first])


def unknown_flags(flags: Sequence[str], describe: Callable[[str], Problem]) -> list[Problem]:
    """Return the problems with unknown flags; suggestions, which take time, only for those that a message lists."""
    others = [Problem(flag, "unknown flag", "unknown") for flag in flags[MAX_ALIKE:]]
    return [*map(describe, flags[:MAX_ALIKE]), *others]


def near_flag(flag: str, flags: Iterable[str]) -> str | None:
    """Return the flag that was probably meant, or None if none is near: one that ends in its words, or is like it."""
    name, flags = flag.lstrip("-").replace("-", "_").lower(), list(flags)
    ending = [candidate for candidate in flags if candidate.endswith(f"_{name}")]
    return ending[0] if len(ending) == 1 else next(iter(get_close_matches(f"--{name}", flags, n=1, cutoff=0.6)), None)


def format_arguments(arguments: Sequence[str]) -> str:
    """Return unexpected arguments as text for a message."""
    return " ".join(shortened(quoted(argument)) for argument in arguments)


def display_name(action: argparse.Action) -> str:
    """Return the flag of an action, or its placeholder in the usage."""
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)


def _describe_values(action: argparse.Action) -> str:
    """Return the values that an argument takes, for a message."""
    if isinstance(action, argparse._SubParsersAction):
        return f"one of {', '.join(action.choices)}"
    return "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
