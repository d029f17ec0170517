"""Rows, the common result of all readers: media and captions as written, with problems and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from finetrainers.config.errors import Problem
from finetrainers.utils.failures import FileError, InputError, Kind
from finetrainers.utils.files import missing_path_problem
from finetrainers.utils.reading import MAX_RECORDS, read_bytes
from finetrainers.utils.text import plural, quoted

from ..status import InvalidSample

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
VIDEO_SUFFIXES = frozenset({
    ".mp4", ".mov", ".m4v", ".3gp", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".flv", ".wmv",
    ".gif",
})  # fmt: skip
MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEO_SUFFIXES

#: A larger file is not a caption: text encoders read only a few hundred words.
MAX_CAPTION_BYTES = 1 << 20

#: No further columns; shared, since most rows have none.
NO_EXTRA: Mapping[str, Any] = {}

_MAX_PROBLEMS = 20
_MAX_NAMES = 5


class DataError(InputError):
    """A dataset that cannot be used; `problems` holds every reason, the message the first 20 and their count.

    Its kind is that of all problems, if they have one.
    """

    def __init__(self, summary: str, problems: Sequence[str | Problem] = (), kind: Kind = "invalid") -> None:
        self.problems = list(map(str, problems))
        kinds = {problem.kind if isinstance(problem, Problem) else kind for problem in problems}
        lines = [summary, *(f"  - {problem}" for problem in self.problems[:_MAX_PROBLEMS])]
        if len(self.problems) > _MAX_PROBLEMS:
            lines.append(
                f"  ... and {len(self.problems) - _MAX_PROBLEMS} more ({plural(len(self.problems), 'problem')})"
            )
        super().__init__("\n".join(lines), kinds.pop() if len(kinds) == 1 else kind)


class OversizedError(DataError):
    """A container that unpacks to more than media can have."""


def path_error(option: str, path: Path, *, folder: bool = False, hint: str = "") -> DataError:
    """Return the error about an option whose path is not that of a file, or of a folder."""
    kind: Kind = "invalid" if path.exists() else "not_found"
    return DataError(f"{option} {quoted(str(path))} {missing_path_problem(path, folder=folder)}{hint}", kind=kind)


class Row(NamedTuple):
    """A media file and its captions as written.

    Attributes:
        where: where they were written (`videos.txt line 3`).
        media: the media path as written, relative to the root; for an unpacked file, its name in messages.
        captions: as written; one is drawn each time. None if there is not even an empty one.
        extra: further columns; of a container, JSON values.
        stored: the file itself, where it is not in the dataset's folder; its reader may leave out the media folder.
        size: of an unpacked file, in bytes.
        refused: the reason why a container's sample is not a clip, or None if it is one.
        expected: where a caption was looked for.
        unusable: the reason why it cannot be used, or None if it can.
        mask: the path of its mask as written, or empty if it has none.
        rate: its frame rate, or 0 for the one of training, if that of its file does not count.
    """

    where: str
    media: str
    captions: tuple[str, ...] | None = None
    extra: Mapping[str, Any] = NO_EXTRA
    stored: Path | None = None
    size: int | None = None
    refused: str | None = None
    expected: str = ""
    unusable: InvalidSample | None = None
    mask: str = ""
    rate: float | None = None


def is_absent(row: Row) -> bool:
    """Return whether a container's sample has no media, which is allowed for optional media."""
    return row.unusable is not None and row.unusable.reason.endswith(("has no media file", "holds no media"))


@dataclass
class Findings:
    """Problems and warnings of a reader, with the names that they concern."""

    problems: list[Problem] = field(default_factory=list)
    names_by_warning: dict[str, list[str]] = field(default_factory=dict)

    def note(self, kind: str, name: str) -> None:
        """Record a warning, which is counted with others of its kind (`items without a caption left out`)."""
        self.names_by_warning.setdefault(kind, []).append(name)

    @property
    def warnings(self) -> list[str]:
        """A sentence for each kind of warning, with a count and the first names."""
        return [summarize_items(names, kind) for kind, names in self.names_by_warning.items()]


def printable_name(name: str) -> str:
    """Return a file name for a message, with line breaks and undecodable bytes as escapes."""
    return name if name.isprintable() else ascii(name)


def summarize_items(names: Sequence[str], description: str, singular: str | None = None) -> str:
    """Return `2 items without a caption: a.mp4, b.mp4`, with the first five names.

    `singular` replaces `description` for a single item.
    """
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    description = singular if singular is not None and len(names) == 1 else description
    return f"{plural(len(names), 'item')} {description}: {', '.join(map(printable_name, names[:_MAX_NAMES]))}{more}"


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a file without BOM and carriage returns.

    Raises:
        DataError: it cannot be read, or there are other bytes; with the position of the first.
    """
    try:
        return decode_text(read_bytes(path, limit=MAX_RECORDS), str(path))
    except FileError as error:
        raise DataError(str(error), kind=error.kind) from error


def decode_text(content: bytes, name: str) -> str:
    """Return bytes as text, like `read_text`; errors begin with `name`."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The offset in the file: the decoder does not count a BOM that it removed.
        offset = error.start + len(content) - len(error.object)
        raise DataError(
            f"{name} is not UTF-8 text: byte {offset} is {error.object[error.start]:#04x}", kind="unreadable"
        ) from error
    return text.replace("\r\n", "\n")


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, without blanks around them."""
    # Not splitlines(): that also splits at characters such as U+2028, which occur inside captions.
    return [line.strip() for line in read_text(path).removesuffix("\n").split("\n")]
