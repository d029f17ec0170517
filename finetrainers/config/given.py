"""Options as they are given: by flat name, with the place of each, before their values are validated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import Problem

#: Where something is given, for messages: from the table (None: none) and the name (None: the table itself).
Locate = Callable[[str | None, str | None], str]


@dataclass
class Given:
    """Options from one place or several. Names of other programs among them are replaced by ours, dialect by dialect.

    Attributes:
        values: by flat name.
        where: the place of each, for messages; that of a replaced name stays.
        problems: what is wrong with the names.
        notes: how names were understood, for the user.
        is_translated: whether options were read from a command or a file of another trainer.
    """

    values: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_translated: bool = False

    @property
    def lost(self) -> list[str]:
        """The options that refused names would have set."""
        return [option for problem in self.problems for option in problem.about]

    def override(self, other: Given) -> None:
        """Add options that override those of the same name."""
        self.values |= other.values
        self.where |= other.where
        self.problems += other.problems
        self.notes += other.notes
        self.is_translated |= other.is_translated

    def refuse(self, name: str, message: str, *about: str) -> None:
        """Remove a name that cannot be read; `about` are the options that it would have set."""
        self.values.pop(name, None)
        self.problems.append(Problem(self.where[name], message, about))

    def put(self, option: str, value: Any, *names: str) -> bool:
        """Set an option instead of other names; False: it is given by its own name too, which is a problem."""
        for name in names:
            self.values.pop(name, None)
        if self.values.get(option) is not None:
            message = f"{', '.join(names)} and {option} ({self.where[option]}) set the same; give one of them"
            self.refuse(names[0], message, option)
            return False
        self.values[option] = value
        self.where[option] = ", ".join(self.where[name] for name in names)
        return True
