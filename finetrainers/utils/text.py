"""Text helpers for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def nearest(name: str, valid: Iterable[str], *, listed: int = 12) -> str:
    """Return a clause for an error: the nearest valid name, ignoring case, else the list of at most `listed` names."""
    names = sorted(valid)
    by_lower_case = {valid_name.lower(): valid_name for valid_name in names}
    close = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {by_lower_case[close[0]]!r}?"
    return f"; valid: {', '.join(names)}" if 0 < len(names) <= listed else ""


def shortened(text: str, limit: int = 100) -> str:
    """Return the text, or its beginning and its length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def quoted(text: str) -> str:
    """Return a value in quotes as the user wrote it, without control characters.

    Backslashes of Windows paths stay single.
    """
    return f"'{printable(text)}'"


def file_size(count: float) -> str:
    """Return `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:  # of three digits
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def duration(seconds: float) -> str:
    """Return `0.4 s`, `45 s`, `12 min`, `3.4 h`, `5 d`; a negative duration, from clocks that differ, counts as 0."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.{int(unit == 'h')}f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{max(0.0, seconds):.1g} s"


def plural(count: int, noun: str, many: str | None = None) -> str:
    """Return `1 clip`, `2 clips`; `many` is the plural of a noun that takes no plain s."""
    return f"{count} {noun}" if count == 1 else f"{count} {many or noun + 's'}"


def listed(names: Sequence[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def printable(text: str) -> str:
    """Return untrusted text with visible line breaks, terminal escapes and bytes that are not UTF-8."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def without_controls(text: str) -> str:
    """Return untrusted text of several lines as `printable`, but with its line breaks."""
    return text if text.isascii() and text.isprintable() else "\n".join(map(printable, text.split("\n")))


def is_encodable(text: str) -> bool:
    """Return whether text is UTF-8, as files and environment variables need."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of a table: the first column to the left, numbers to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip() for row in rows]
