"""Errors and warnings from the rules between options, and the rule of options that need another option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetrainers.utils.failures import Kind

from ..errors import Problem
from ..root import fields

#: Finding of a rule: a warning; or an error, as a problem or as its option, message and kind.
Finding = str | Problem | tuple[str, str] | tuple[str, str, Kind]


@dataclass
class Findings:
    """Errors, which stop the run, and warnings about options that have no effect or an unexpected one."""

    errors: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def error(self, option: str, message: str, kind: Kind = "invalid", *, is_local: bool = False) -> None:
        """Record an error about an option; `kind` and `is_local`: see `Problem`."""
        self.errors.append(Problem(f"--{option}", message, kind, is_local=is_local))

    def add(self, *rules: Iterable[Finding]) -> None:
        """Record what rules find."""
        for rule in rules:
            for finding in rule:
                if isinstance(finding, str):
                    self.warnings.append(finding)
                elif isinstance(finding, Problem):
                    self.errors.append(finding)
                else:
                    self.error(*finding)

    def allow_local(self) -> None:
        """Turn errors that only this machine has into warnings, for a run on another machine."""
        self.warnings += [f"{problem} (on the machine that trains)" for problem in self.errors if problem.is_local]
        self.errors = [problem for problem in self.errors if not problem.is_local]


def check_needs(name: str, get_value: Callable[[str], Any]) -> Iterator[Finding]:
    """Warn of an option that was given without the one that it needs."""
    if (lacks := _unmet(name, get_value)) is not None:
        yield f"--{name} has no effect {lacks}"


def _unmet(name: str, get_value: Callable[[str], Any]) -> str | None:
    """Return a clause naming the option that `name` needs and that is not set, or None if nothing is missing."""
    needs = fields()[name].needs
    if needs is None:
        return None
    needed, _, allowed = needs.partition("=")
    if (lacks := _unmet(needed, get_value)) is not None:
        return lacks
    value = get_value(needed)
    if allowed:
        met = set(allowed.split("|")) & set(value if isinstance(value, list) else [value])
        return None if met else f"without --{needed} {allowed.replace('|', ' or ')}"
    if value:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"while --{needed} is {value:g}" if is_number else f"without --{needed}"
