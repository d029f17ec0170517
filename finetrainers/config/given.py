"""Options before their values are validated: by flat name, with the place of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from finetrainers.utils.failures import Kind

from .errors import Problem

#: Place of an option, for messages: from the table, or None without one, and the name, or None for the table itself.
Locate = Callable[[str | None, str | None], str]


@dataclass
class RawOptions:
    """Options from one place or several. Names of other programs among them are replaced by ours, dialect by dialect.

    Attributes:
        values: by flat name.
        where: the place of each, for messages; that of a replaced name stays.
        problems: problems with the names.
        notes: interpretations of names, for the user.
        chosen: the values that an earlier run has chosen for open options, each with its source.
    """

    values: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)

    @property
    def lost(self) -> list[str]:
        """Options that refused names would have set."""
        return [option for problem in self.problems for option in problem.about]

    def override(self, other: RawOptions) -> None:
        """Add options that override those of the same name."""
        self.chosen = {name: source for name, source in self.chosen.items() if name not in other.values}
        self.chosen |= other.chosen
        self.values |= other.values
        self.where |= other.where
        self.problems += other.problems
        self.notes += other.notes

    def refuse(self, name: str, message: str, *about: str, kind: Kind = "invalid") -> None:
        """Remove a name that cannot be read; `about` are the options that it would have set."""
        self.values.pop(name, None)
        self.problems.append(Problem(self.where[name], message, kind, about))

    def put(self, option: str, value: Any, *names: str) -> bool:
        """Set an option instead of other names; return False, and record a problem, if its own name also sets it."""
        for name in names:
            self.values.pop(name, None)
        if self.values.get(option) is not None:
            self.refuse(
                names[0],
                f"{', '.join(names)} and {option} ({self.where[option]}) set the same option; remove one of them",
                option,
                kind="conflict",
            )
            return False
        self.values[option] = value
        self.where[option] = ", ".join(self.where[name] for name in names)
        return True
