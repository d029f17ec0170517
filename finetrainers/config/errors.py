"""Configuration errors: all problems at once, each with its place and a fix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetrainers.utils.failures import Kind, error_kind
from finetrainers.utils.spelling import is_command, spelled
from finetrainers.utils.text import nearest, plural, quoted, shortened

from .keywords import keyword_place

#: Our messages for pydantic's kinds of errors whose own messages are written for programmers.
_WORDS = {
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a number of reasonable size",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "list_type": "must be a list",
}
#: Messages for kinds of bounds; pydantic has the bound under the name in brackets.
_BOUNDS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}
#: Problems of one kind that a message lists.
MAX_ALIKE = 50
#: Default subject of problems in messages.
CONFIGURATION = "this configuration"


@dataclass(frozen=True)
class Problem:
    """One problem with a configuration.

    Attributes:
        where: the flag, the option's name, or `file:line`, that has to change.
        message: the problem, with the value, and how to fix it.
        kind: what is wrong, for programs; messages may change.
        about: flat names of the options that were probably meant; rules that depend on them are not checked.
        is_local: whether only this machine has it: a package or a compiler that is not installed.
    """

    where: str
    message: str
    kind: Kind = "invalid"
    about: tuple[str, ...] = ()
    is_local: bool = False

    def __str__(self) -> str:
        """Return place and message, both with keywords instead of flags outside of commands."""
        where = self.where if is_command() else keyword_place(self.where)
        return f"{where}: {spelled(self.message)}" if where else spelled(self.message)

    @classmethod
    def from_error(cls, where: str, error: Exception) -> Problem:
        """Return the problem that an error at this place reports, with its kind."""
        return cls(where, str(error), error_kind(error))


class ConfigError(ValueError):
    """Error for a configuration that cannot be run.

    Attributes:
        problems: all the reasons, each with `where`, `message` and `kind`.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        rest: Any = None,
        wrong: Collection[str] = (),
        of: str = CONFIGURATION,
        hint: str = "",
    ) -> None:
        """Args:
        problems: the reasons.
        rest: the configuration without its wrong options, so that rules between the others can be checked too.
        wrong: flat names of the options that `rest` lacks.
        of: the thing that has the problems, for the message.
        hint: a last line: where to read more.
        """
        self.problems = list(problems)
        self.rest = rest
        self.wrong = frozenset(wrong)
        self.of = of
        self._hint = hint
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        texts = list(self._texts())
        if len(texts) == 1 and "\n" in texts[0]:  # one that is a list already
            return texts[0]
        lines = "\n".join("  - " + text.replace("\n", "\n    ") for text in texts)
        return f"{count} with {self.of}:\n{lines}{f'{chr(10)}{self._hint}' if self._hint else ''}"

    def _texts(self) -> Iterator[str]:
        """Yield the text of each problem; of many of one kind, the first, and the number of the others."""
        counts: Counter[Kind] = Counter()
        for problem in self.problems:
            counts[problem.kind] += 1
            if counts[problem.kind] <= MAX_ALIKE:
                yield str(problem)
        for kind, count in counts.items():
            if count > MAX_ALIKE:
                yield f"and {plural(count - MAX_ALIKE, 'more problem')} of the kind {kind!r}"


def _number(bound: Any) -> str:
    return f"{bound:g}" if bound % 1 else str(int(bound))


def value_kind(entry: Mapping[str, Any]) -> Kind:
    """Return the kind of one of `pydantic.ValidationError.errors()`."""
    if entry["type"] == "value_error":
        return error_kind(entry["ctx"]["error"])
    kinds: dict[str, Kind] = {"literal_error": "unknown", "extra_forbidden": "unknown", "missing": "required"}
    return kinds.get(entry["type"], "invalid")


def value_message(entry: Mapping[str, Any], *, secret: bool = False, synonyms: Mapping[str, str] | None = None) -> str:
    """Return the problem with a value, in one sentence.

    Args:
        entry: one of `pydantic.ValidationError.errors()`.
        secret: whether the value must not be shown.
        synonyms: other programs' names of values that are allowed, in lower case, to our values.
    """
    kind, message, value = entry["type"], entry["msg"].removeprefix("Value error, "), entry["input"]
    if kind == "value_error":
        return message
    if kind in _BOUNDS:
        message = _BOUNDS[kind].format(**{name: _number(bound) for name, bound in entry["ctx"].items()})
    if secret:
        return f"{_WORDS.get(kind) or message[0].lower() + message[1:]} (its value is not shown)"
    value_text = shortened(quoted(value) if isinstance(value, str) else repr(value))
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", entry["ctx"]["expected"])
        suggestion = (synonyms or {}).get(str(value).lower())
        hint = f"; did you mean {suggestion!r}?" if suggestion else nearest(str(value), valid, listed=0)
        return (
            f"unknown value {value_text}{hint}{'' if hint else ';'} {'Valid' if hint else 'valid'}: {', '.join(valid)}"
        )
    if kind in _WORDS:
        forms = {"path_type": "a text in quotes", "string_type": "a text in quotes", "list_type": 'a list: ["..."]'}
        return f"{_WORDS[kind]}, got {value_text}{f'; in a file, write {forms[kind]}' if kind in forms else ''}"
    return f"{message[0].lower() + message[1:]}, got {value_text}"
