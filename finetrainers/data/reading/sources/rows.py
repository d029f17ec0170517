"""Rows, the common result of all readers: media and captions as written, with problems and warnings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from finetrainers.utils.text import plural

from ..status import Unusable

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
VIDEO_SUFFIXES = frozenset({
    ".mp4", ".mov", ".m4v", ".3gp", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".flv", ".wmv", ".gif",
})  # fmt: skip
MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEO_SUFFIXES

#: A caption file of more bytes is none; what a text encoder sees of it are a few hundred words.
MAX_CAPTION_BYTES = 1 << 20

#: No further columns; shared, since most rows have none.
NO_EXTRA: Mapping[str, Any] = {}

_SHOWN = 20
_NAMED = 5


class DataError(ValueError):
    """A dataset that cannot be used; `problems` holds every reason, the message the first 20 and their count."""

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.problems = list(problems)
        lines = [summary, *(f"  - {problem}" for problem in self.problems[:_SHOWN])]
        if len(self.problems) > _SHOWN:
            lines.append(f"  ... and {len(self.problems) - _SHOWN} more ({plural(len(self.problems), 'problem')})")
        super().__init__("\n".join(lines))


class Row(NamedTuple):
    """A media file and its captions as written.

    Attributes:
        where: where they were written (`videos.txt line 3`).
        media: the media path as written, relative to the root; of an unpacked file, what messages call it.
        captions: as written, one of which is drawn each time; None: there is none, not even an empty one.
        extra: further columns; of a container, JSON values.
        stored: the file itself, where it is not in the dataset's folder; its reader may leave out the media folder.
        size: of an unpacked file, in bytes.
        refused: why a container's sample is none, if it is none.
        expected: where a caption was looked for.
        unusable: why it cannot be used.
        mask: the path of its mask as written; empty: it has none.
    """

    where: str
    media: str
    captions: tuple[str, ...] | None = None
    extra: Mapping[str, Any] = NO_EXTRA
    stored: Path | None = None
    size: int | None = None
    refused: str | None = None
    expected: str = ""
    unusable: Unusable | None = None
    mask: str = ""


def is_absent(row: Row) -> bool:
    """Whether a container's sample is refused because nothing is there, which is no mistake of a medium that need not be."""
    return row.unusable is not None and row.unusable.reason.endswith(("has no media file", "holds no media"))


@dataclass
class Findings:
    """Problems and warnings of a reader, with the names that they concern."""

    problems: list[str] = field(default_factory=list)
    odd: dict[str, list[str]] = field(default_factory=dict)

    def note(self, kind: str, name: str) -> None:
        """Record a warning, which is counted with others of its kind (`items without a caption left out`)."""
        self.odd.setdefault(kind, []).append(name)

    @property
    def warnings(self) -> list[str]:
        """A sentence for each kind of warning, with a count and the first names."""
        return [counted(names, kind) for kind, names in self.odd.items()]


def shown(name: str) -> str:
    """A file name for a message: line breaks and bytes that are no text are written as escapes."""
    return name if name.isprintable() else ascii(name)


def counted(names: Sequence[str], what: str, one: str | None = None) -> str:
    """`2 items without a caption: a.mp4, b.mp4`, with the first five names; `one` is the text for a single item."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    what = one if one is not None and len(names) == 1 else what
    return f"{plural(len(names), 'item')} {what}: {', '.join(map(shown, names[:_NAMED]))}{more}"


def parse_json(text: str, **options: Any) -> Any:
    """`json.loads`, with one kind of error for all that is malformed.

    Raises:
        ValueError: it is not JSON, or nested deeper than anybody means it.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_text(path: Path) -> str:
    """UTF-8 text without BOM and carriage returns.

    Raises:
        DataError: other bytes, with the place of the first.
    """
    return decode_text(path.read_bytes(), str(path))


def decode_text(content: bytes, what: str) -> str:
    """`read_text` of bytes."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The place in the file: the decoder does not count a BOM that it took off.
        place = error.start + len(content) - len(error.object)
        raise DataError(f"{what} is not UTF-8 text: byte {place} is {error.object[error.start]:#04x}") from error
    return text.replace("\r\n", "\n")


def read_lines(path: Path) -> list[str]:
    """Lines of a text file, blanks around them removed."""
    # Not splitlines(): that also splits at characters such as U+2028, which occur inside captions.
    return [line.strip() for line in read_text(path).removesuffix("\n").split("\n")]
