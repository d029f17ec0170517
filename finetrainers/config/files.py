"""Read text files that options name; every failure is a `ConfigError`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from finetrainers.utils import reading
from finetrainers.utils.text import nearest

from .errors import ConfigError, Problem
from .values import check_place

#: Largest number of files in a directory to search for the nearest name.
_MOST_FILES = 2000


def nearest_file(path: Path) -> str:
    """Return a clause to append to an error: the file beside a missing one whose name is nearest, if there is one."""
    try:
        names = [entry.name for entry in itertools.islice(path.parent.iterdir(), _MOST_FILES) if entry.is_file()]
    except OSError:
        return ""
    return nearest(path.name, names, listed=0)


def read_text(path: str | Path, *, option: str, others: Iterable[str] = ()) -> tuple[Path, str]:
    """Read a UTF-8 file: its path with `~` expanded, and its text without BOM.

    Args:
        path: the file.
        option: which names it, for messages.
        others: names that the option takes besides paths, to suggest where the file is missing.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        path = Path(check_place(str(path)))
        return path, reading.read_text(path)
    except FileNotFoundError:
        hint = nearest_file(Path(path)) or nearest(str(path), others, listed=0 if Path(path).suffix else 100)
        raise ConfigError([Problem(option, f"file not found: {path}{hint}", "not_found")]) from None
    except ValueError as error:
        raise ConfigError([Problem.from_error(option, error)]) from None
