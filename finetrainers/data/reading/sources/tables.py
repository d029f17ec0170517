"""Reader of metadata files: CSV, JSON and JSONL."""

from __future__ import annotations

import csv
import io
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from finetrainers.config.errors import Problem
from finetrainers.config.sections import DataSection
from finetrainers.utils.failures import InputError, Kind, error_kind
from finetrainers.utils.reading import parse_json
from finetrainers.utils.text import nearest

from .masks import MASK
from .rows import MEDIA_SUFFIXES, NO_EXTRA, DataError, Findings, Row, path_error, read_lines, read_text

Records = Iterator[tuple[str, Any]]


def read_table(path: Path, data: DataSection, findings: Findings) -> list[Row]:
    """Return rows of a .csv, .json or .jsonl file.

    Raises:
        DataError: the file cannot be read.
    """
    if not path.is_file():
        raise path_error("dataset_file", path)
    readers = {".csv": _csv_records, ".json": _json_records, ".jsonl": _jsonl_records}
    suffix = path.suffix.lower()
    columns = None
    rows = []
    is_masked = False
    incomplete: dict[frozenset[str], list[Problem]] = defaultdict(list)  # by the columns that the rows lack
    for where, record in readers[suffix](path, findings):
        columns = columns or Columns(with_known_columns(data, record))
        is_masked = is_masked or (isinstance(record, dict) and columns.mask in record)
        if suffix == ".csv" and (missing := columns.missing(record)) is not None:  # otherwise every row would report it
            raise DataError(f"{path.name} line 1: {missing}", kind="not_found")
        if isinstance(record, dict) and (absent := columns.needed - record.keys()):
            incomplete[frozenset(absent)].append(Problem(where, str(columns.missing(record)), "not_found"))
            continue
        try:
            rows.append(columns.row(where, record))
        except ValueError as error:
            findings.problems.append(Problem.from_error(where, error))
    for problems in incomplete.values():
        if not rows and len(problems) > 1:  # the columns have other names, rather than single rows fewer columns
            problems = [Problem(path.name, f"{problems[0].message} ({len(problems)} rows)", "not_found")]
        findings.problems += problems
    if rows and data.mask_column and not is_masked:
        raise DataError(f"{path.name}: no column {data.mask_column!r} (set by `mask_column`)", kind="not_found")
    return rows


#: Columns of other programs' tables, which are read where the column of the default name is missing.
_KNOWN_COLUMNS = {"video_column": ("file_name", "media_path"), "caption_column": ("caption", "prompt")}


def with_known_columns(data: DataSection, record: Any) -> DataSection:
    """Return options that name the columns of a record where they have their defaults, and it has others' names."""
    names: dict[str, str] = {}
    for option, columns in _KNOWN_COLUMNS.items():
        default = DataSection.model_fields[option].default
        if isinstance(record, Mapping) and getattr(data, option) == default and default not in record:
            names |= dict.fromkeys([option], next((name for name in columns if name in record), default))
    return data.model_copy(update=names)


class Columns:
    """The columns of a record that are the media, the captions, and neither.

    Attributes:
        media: the column of the clips, or of a further medium of each of them.
        is_further: whether `media` is a further medium.
        mask: the column of masks, which tables need not have, or empty if masks are not read.
    """

    def __init__(self, data: DataSection) -> None:
        self.media = data.video_column
        self.mask = MASK if data.mask_column is None else data.mask_column
        further = {column for _, column in data.extra_columns} | ({data.mask_column} if data.mask_column else set())
        self.is_further = self.media in further
        self.captions = tuple(data.caption_columns) or (data.caption_column,)
        self.option = "caption_columns" if data.caption_columns else "caption_column"
        # With a policy, a record without a caption is not malformed.
        self.needed = {self.media, *(self.captions if data.caption_missing in (None, "error") else ())}
        self._own_columns = {self.media, *self.captions, *further}

    def missing(self, record: Mapping[str, Any]) -> str | None:
        """Return a message about the columns that a record lacks, or None if it has all."""
        set_by = {
            self.media: "extra_columns" if self.is_further else "video_column",
            **dict.fromkeys(self.captions, self.option),
        }
        names = [name for name in set_by if name not in record]
        if not names:
            return None
        present = ", ".join(map(str, record)) or "none"
        options = " and ".join(dict.fromkeys(f"`{set_by[name]}`" for name in names))
        hint = self._flags_for(names, record) or nearest(names[0], map(str, record), listed=0)
        return f"no column {' and '.join(map(repr, names))} (set by {options}); it has: {present}{hint}"

    def _flags_for(self, names: Sequence[str], record: Mapping[str, Any]) -> str:
        """Return a clause with the flags that name a record's own columns, or an empty text if these are unclear.

        The medium is the column with the name of a media file, and the caption the one of a similar name or else the
        longest other text.
        """
        texts = {str(name): value for name, value in record.items() if isinstance(value, str)}
        media = next((name for name, value in texts.items() if Path(value).suffix.lower() in MEDIA_SUFFIXES), None)
        captions = [name for name in texts if name not in (media, self.media)]
        flags = []
        if self.media in names and not self.is_further and media is not None:
            flags.append(f"--video_column {shlex.quote(media)}")
        if self.captions[0] in names and self.option == "caption_column" and captions:
            similar = get_close_matches(self.captions[0], captions, n=1)
            caption = similar[0] if similar else max(captions, key=lambda name: len(texts[name]))
            flags.append(f"--caption_column {shlex.quote(caption)}")
        return f"; use {' '.join(flags)}" if flags else ""

    def extra(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the other columns of the clip's record."""
        if self.is_further or self._own_columns >= record.keys():
            return NO_EXTRA
        return {name: value for name, value in record.items() if name not in self._own_columns}

    def row(self, where: str, record: Any) -> Row:
        """Return the row of a record that has the columns it needs, and whose media is a path.

        Raises:
            ValueError: it is malformed.
        """
        if not isinstance(record, dict):
            raise ValueError(f"must be an object, got {record!r}")
        media = record[self.media]
        if not isinstance(media, str) or not media.strip():
            raise ValueError(f"column {self.media!r} must be a path, got {media!r}")
        mask = record.get(self.mask) if self.mask and not self.is_further else None
        if mask is not None and not isinstance(mask, str):
            raise ValueError(
                f"column {self.mask!r} must be the path of a mask, or null for none, got {mask!r}; set another "
                '`mask_column`, or "" to read no masks'
            )
        extra = self.extra(record)
        if self.mask and self.mask in extra:
            extra = {name: value for name, value in extra.items() if name != self.mask}
        return Row(where, media.strip(), self.read_captions(record), extra, mask=(mask or "").strip())

    def read_captions(self, record: Mapping[str, Any]) -> tuple[str, ...] | None:
        """Return the captions of a record, or None if there is not even an empty one.

        Raises:
            ValueError: a caption is neither text nor a list of strings.
        """
        captions: list[str] = []
        for name in self.captions:
            value = record.get(name)
            if isinstance(value, str):
                captions.append(value)
            elif isinstance(value, list) and all(isinstance(text, str) for text in value):
                captions += value
            elif value is not None:
                raise ValueError(f"column {name!r} must be text or a list of strings, got {value!r}")
        return tuple(captions) or None


def _csv_records(path: Path, findings: Findings) -> Records:
    # Strict: otherwise a quote that is never closed silently makes the rest of the file one caption.
    reader = csv.reader(io.StringIO(read_text(path), newline=""), skipinitialspace=True, strict=True)
    try:
        header = next(reader, [])
        duplicates = {name for name in header if header.count(name) > 1}
        if duplicates:
            raise DataError(
                f"{path.name} line 1: column {min(duplicates)!r} occurs twice; rename one", kind="duplicate"
            )
        first = reader.line_num + 1  # of the next row, which may have several lines
        for fields in reader:
            where, first = f"{path.name} line {first}", reader.line_num + 1
            if not fields:
                continue
            if len(fields) > len(header):
                message = "more fields than the header has; quote captions that contain commas"
                findings.problems.append(Problem(where, message))
            elif len(fields) < len(header):
                findings.problems.append(Problem(where, "fewer fields than the header has"))
            else:
                yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{path.name} line {reader.line_num}: {error}", kind="unreadable") from error


def _json_records(path: Path, findings: Findings) -> Records:
    try:
        records = parse_json(read_text(path), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", kind=_json_kind(error)) from error
    if not isinstance(records, list):
        raise DataError(f"{path} must hold a list of objects, got {type(records).__name__}")
    for number, record in enumerate(records):
        yield f"{path.name} entry {number}", record


def _jsonl_records(path: Path, findings: Findings) -> Records:
    name = path.name  # a property that is computed at each access
    for number, line in enumerate(read_lines(path), start=1):
        if not line:
            continue
        where = f"{name} line {number}"
        try:
            record = parse_json(line, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        except ValueError as error:
            findings.problems.append(Problem("", f"{where} is not JSON: {error}", _json_kind(error)))
        else:
            yield where, record


def _json_kind(error: Exception) -> Kind:
    return error_kind(error) if isinstance(error, InputError) else "unreadable"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; write null, or remove the key")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise InputError(f"the key {repeated!r} occurs twice", "duplicate")
    return record
