"""Configuration errors: every problem at once, each with where it stands and the way out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Attributes:
        where: the flag, or `file:line`, that has to change.
        message: what is wrong, with the value, and how to mend it.
    """

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class ConfigError(ValueError):
    """A configuration cannot be run; `problems` lists all the reasons."""

    def __init__(self, problems: Sequence[Problem], *, rest: Any = None, wrong: Collection[str] = ()) -> None:
        """Args:
        problems: the reasons.
        rest: the configuration without its wrong options, so that rules between the others can be checked too.
        wrong: flat names of the options that `rest` lacks.
        """
        self.problems = list(problems)
        self.rest = rest
        self.wrong = frozenset(wrong)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{count} with this configuration:\n{lines}")
