"""Reads what the user calls a data set (text files, CSV, JSON, JSONL or a folder) into a list of items.

Nothing is opened here but the metadata itself. Every problem is collected, so that one run shows all of them.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finetrainers.config.sections import DataSection
from finetrainers.utils.text import nearest, plural

from .fates import Refusal

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".gif"})

Kind = Literal["video", "image"]

_VERBS = (
    "shows|showcases|depicts|displays|features|captures|highlights|introduces|presents|portrays|illustrates|"
    "(?:opens|begins|starts) (?:with|on)"
)
_SUBJECT = "(?:this|the) (?:short )?(?:video|clip|image|picture|photo|animation|scene|footage|sequence)(?: clip)?"
# "This video shows a cat", "The scene opens with a cat", "In this video, a cat": what language models like to
# begin with and no user types as a prompt. The verb needs a following blank, so that "shows" alone is kept.
_LLM_PREFIX = re.compile(rf"^\s*(?:{_SUBJECT} (?:{_VERBS})\s+|in {_SUBJECT}\s*,\s*(?:we see\s+)?)", re.IGNORECASE)

_SHOWN = 20


class DataError(ValueError):
    """A data set that cannot be used; `problems` holds every reason, the message the first 20 and their count."""

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.problems = list(problems)
        lines = [summary, *(f"  - {problem}" for problem in self.problems[:_SHOWN])]
        if len(self.problems) > _SHOWN:
            lines.append(f"  ... and {len(self.problems) - _SHOWN} more ({plural(len(self.problems), 'problem')})")
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the data set.

    Attributes:
        index: place in the list.
        path: the media file, which may not exist.
        caption: cleaned caption.
        kind: video or image.
        where: where it is listed (`videos.txt line 3`); empty for files found in a folder.
        refused: why it cannot be used, whatever the file is; then the file is not opened.
    """

    index: int
    path: Path
    caption: str
    kind: Kind
    where: str = ""
    refused: Refusal | None = None


class _Row(NamedTuple):
    """A media path and a caption as written, and where they were written (`videos.txt line 3`)."""

    where: str
    media: Path
    caption: str
    refused: Refusal | None = None


def read_items(data: DataSection) -> list[Item]:
    """Read the data set that `data` names.

    The source is `dataset_file` (.csv, .json, .jsonl) if given; else the two text files `video_column` and
    `caption_column` in `data_root`, one entry a line; else every media file below `data_root`, each with its caption
    in a .txt file of the same name. Media paths are relative to `data_root`, or without it to the metadata file.

    Whether the media exist is not asked here.

    Raises:
        DataError: anything that is wrong with the metadata.
    """
    if data.data_root is not None and not data.data_root.is_dir():
        raise DataError(f"data_root {str(data.data_root)!r} is not a folder")
    problems: list[str] = []
    source, rows = _find_source(data, problems)
    items: list[Item] = []
    for row in rows:
        kind: Kind = "image" if row.media.suffix.lower() in IMAGE_SUFFIXES else "video"
        caption = clean_caption(
            row.caption, id_token=data.id_token, remove_prefixes=data.remove_common_llm_caption_prefixes
        )
        items.append(Item(len(items), row.media, caption, kind, row.where, row.refused))
    if problems:
        raise DataError(f"{source}: {plural(len(problems), 'problem')}", problems)
    if not items:
        raise DataError(f"{source}: no items found")
    return items


def clean_caption(caption: str, *, id_token: str | None = None, remove_prefixes: bool = False) -> str:
    """The caption as the text encoder gets it: blanks trimmed, opening phrase removed, `id_token` put before it."""
    caption = caption.strip()
    if remove_prefixes:
        caption = _LLM_PREFIX.sub("", caption, count=1) or caption
    if id_token and id_token.strip():
        caption = f"{id_token.strip()} {caption}".strip()
    return caption


def _find_source(data: DataSection, problems: list[str]) -> tuple[str, list[_Row]]:
    """The name of the source, for messages, and its rows."""
    if data.dataset_file is not None:
        return str(data.dataset_file), _read_metadata(data.dataset_file, data, problems)
    if data.data_root is None:
        raise DataError("no data set: give `data_root` (a folder) or `dataset_file` (.csv, .json, .jsonl)")
    media_list, caption_list = data.data_root / data.video_column, data.data_root / data.caption_column
    if media_list.is_file() and caption_list.is_file():
        return str(data.data_root), _read_two_files(media_list, caption_list, data.data_root, problems)
    if media_list.is_file() or caption_list.is_file():
        there, missing = sorted((media_list, caption_list), key=lambda path: not path.is_file())
        names = [path.name for path in data.data_root.iterdir() if path.is_file()]
        raise DataError(
            f"{str(data.data_root)!r} holds {there.name!r} but not {missing.name!r}{nearest(missing.name, names)} "
            "(set by `video_column` and `caption_column`)"
        )
    rows = _read_folder(data.data_root)
    if not rows:
        raise DataError(
            f"no data in {str(data.data_root)!r}: neither the text files {data.video_column!r} and "
            f"{data.caption_column!r} (set by `video_column` and `caption_column`), nor media files with .txt captions"
        )
    return str(data.data_root), rows


def _read_text(path: Path) -> str:
    """UTF-8 text without BOM and carriage returns."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error
    return text.replace("\r\n", "\n")


def _read_lines(path: Path) -> list[str]:
    # Not splitlines(): that also splits at characters such as U+2028, which occur inside captions.
    return [line.strip() for line in _read_text(path).removesuffix("\n").split("\n")]


def _read_two_files(media_list: Path, caption_list: Path, root: Path, problems: list[str]) -> list[_Row]:
    """Pair line n of one file with line n of the other, so that a blank caption stays with its clip."""
    media, captions = _read_lines(media_list), _read_lines(caption_list)
    while media and not media[-1]:
        media.pop()
    while len(captions) > len(media) and not captions[-1]:
        captions.pop()
    if len(media) != len(captions):
        raise DataError(
            f"{media_list} has {plural(len(media), 'line')} but {caption_list} has {plural(len(captions), 'line')}; "
            "line n of one belongs to line n of the other, and an empty caption is an empty line"
        )
    rows = []
    for number, (name, caption) in enumerate(zip(media, captions, strict=True), start=1):
        if name:
            rows.append(_Row(f"{media_list.name} line {number}", root / name, caption))
        elif caption:
            problems.append(f"{media_list.name} line {number} is empty, but {caption_list.name} has a caption there")
    return rows


def _read_folder(root: Path) -> list[_Row]:
    """Every media file below `root`, in order of its path, with its caption in a text file beside it."""
    rows = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.suffix.lower() not in IMAGE_SUFFIXES | VIDEO_SUFFIXES or any(p.startswith(".") for p in name.parts):
            continue
        sidecar = path.with_suffix(".txt")
        if not sidecar.is_file():
            reason = f"no caption; expected it in {sidecar.relative_to(root)}"
            rows.append(_Row("", path, "", Refusal("caption_missing", reason)))
            continue
        rows.append(_Row("", path, " ".join(_read_text(sidecar).split())))
    return rows


def _read_metadata(path: Path, data: DataSection, problems: list[str]) -> list[_Row]:
    """Rows of a .csv, .json or .jsonl file."""
    readers: dict[str, Callable[[Path, list[str]], Iterator[tuple[str, dict[str, Any]]]]] = {
        ".csv": _csv_records,
        ".json": _json_records,
        ".jsonl": _jsonl_records,
    }
    if path.suffix.lower() not in readers:
        raise DataError(f"dataset_file {str(path)!r} must end in .csv, .json or .jsonl")
    if not path.is_file():
        raise DataError(f"dataset_file {str(path)!r} does not exist")
    root = data.data_root if data.data_root is not None else path.parent
    rows = []
    for where, record in readers[path.suffix.lower()](path, problems):
        columns = (data.video_column, data.caption_column)
        missing = [name for name in columns if name not in record]
        if missing:
            have = ", ".join(map(str, record)) or "none"
            problem = (
                f"{where}: no column {' and '.join(map(repr, missing))} (set by `video_column` and `caption_column`); "
                f"it has: {have}{nearest(missing[0], map(str, record))}"
            )
            if path.suffix.lower() == ".csv":  # one header: every row would say the same
                raise DataError(problem)
            problems.append(problem)
            continue
        media, caption = (record[name] for name in columns)
        if not isinstance(media, str) or not media.strip():
            problems.append(f"{where}: column {data.video_column!r} must be a path, got {media!r}")
        elif not isinstance(caption, str):
            problems.append(f"{where}: column {data.caption_column!r} must be text, got {caption!r}")
        else:
            rows.append(_Row(where, root / media.strip(), caption))
    return rows


def _csv_records(path: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), skipinitialspace=True)
    try:
        for row in reader:
            where = f"{path.name} line {reader.line_num}"
            if None in row:
                problems.append(f"{where}: more fields than the header has; quote captions that contain commas")
            elif None in row.values():
                problems.append(f"{where}: fewer fields than the header has")
            else:
                yield where, row
    except csv.Error as error:
        raise DataError(f"{path.name} line {reader.line_num}: {error}") from error


def _json_records(path: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        records = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(records, list):
        raise DataError(f"{path} must hold a list of objects, got {type(records).__name__}")
    for number, record in enumerate(records):
        if isinstance(record, dict):
            yield f"{path.name} entry {number}", record
        else:
            problems.append(f"{path.name} entry {number}: must be an object, got {record!r}")


def _jsonl_records(path: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_read_lines(path), start=1):
        where = f"{path.name} line {number}"
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"{where} is not JSON: {error}")
            continue
        if isinstance(record, dict):
            yield where, record
        else:
            problems.append(f"{where}: must be an object, got {record!r}")
