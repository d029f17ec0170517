"""Spelling of options in messages, which are written with flags: they stay in commands, and are keywords in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_commands = 0  # that run in this process, one within the other
_keywords: Callable[[str], str] | None = None


@contextlib.contextmanager
def in_command() -> Iterator[None]:
    """Keep the flags of messages within the block, which is a command."""
    global _commands
    _commands += 1
    try:
        yield
    finally:
        _commands -= 1


def is_command() -> bool:
    """Return whether a command runs in this process."""
    return _commands > 0


def spell_keywords_by(replace: Callable[[str], str]) -> None:
    """Set the function that replaces the flags of a text by keywords; options are declared in a higher layer."""
    global _keywords
    _keywords = replace


def spelled(text: str) -> str:
    """Return a message as its reader types options: with flags in a command, with keywords in Python."""
    return text if _commands or _keywords is None or "--" not in text else _keywords(text)
