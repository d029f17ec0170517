"""Reader of a dataset: its items are media files with cleaned captions.

Nothing is opened here but the metadata itself, and containers whose media have to be unpacked (tars, parquet). Every
problem is collected, so that one run shows all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from finetrainers.config.sections import DataSection
from finetrainers.utils.map_paths import map_paths_threaded
from finetrainers.utils.text import plural, quoted

from .media import require_content, require_file
from .sources import folder, hub, python_rows, tables, tars
from .sources.captions import LONG_CAPTION, clean_caption
from .sources.masks import masks_root, note_unread_masks
from .sources.paths import Root
from .sources.rows import (
    IMAGE_SUFFIXES,
    MAX_CAPTION_BYTES,
    NO_EXTRA,
    DataError,
    Findings,
    Row,
    is_absent,
    path_error,
    printable_name,
)
from .sources.unpacked import MediaFolder
from .status import InvalidSample, InvalidSampleError

Kind = Literal["video", "image"]

TABLES = (".csv", ".json", ".jsonl")
_IMAGES = tuple(IMAGE_SUFFIXES)


@dataclass(slots=True)  # not frozen: as for `Clip`
class Item:
    """A media file and its captions; it never changes after creation.

    Attributes:
        index: its place among the items of a run.
        path: the file.
        captions: cleaned; of several, one is drawn each time. Never empty, but may hold the empty text.
        kind: video or image.
        name: its name in messages; does not depend on where the dataset is.
        where: where it is listed (`videos.txt line 3`); empty for files found in a folder.
        unusable: the reason why it cannot be used regardless of the file, which is then not opened; or None.
        state: the file's `stat`, or None if the file is not to be opened.
        extra: further columns of its row.
        rate: its frame rate, or 0 for the one of training, if that of its file does not count.
    """

    index: int
    path: Path
    captions: tuple[str, ...]
    kind: Kind
    name: str
    where: str = ""
    unusable: InvalidSample | None = None
    state: os.stat_result | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: NO_EXTRA)
    rate: float | None = None

    @property
    def caption(self) -> str:
        """The first caption."""
        return self.captions[0]


class Reading(NamedTuple):
    """The items of a dataset, and the media that belong to them, as items.

    Attributes:
        items: of the dataset.
        warnings: oddities of the dataset, each with a count.
        further: every item's further media, by name.
        masks: the masks of items that have one, by the item's index.
    """

    items: list[Item]
    warnings: list[str]
    further: Mapping[str, list[Item]] = MappingProxyType({})
    masks: Mapping[int, Item] = MappingProxyType({})


def read_dataset(data: DataSection, *, media_dir: Path | None = None, first: int = 0, prefix: str = "") -> Reading:
    """Read the dataset that `data` names.

    The source is `hf_dataset`, or `dataset_file` (.csv, .json, .jsonl, .parquet, .tar) if given; else the two text
    files `video_column` and `caption_column` in `data_root` (or `videos.txt` and `prompts.txt`), one entry a line; else
    every media file below `data_root`, each with its caption in a .txt file of the same name. If none has a caption,
    `data_root` is read by the one metadata file that it holds. Media paths are relative to `data_root`, or without it
    to the metadata file, and may not lead out of that folder.

    Args:
        data: its options.
        media_dir: where media of tars and parquet files are unpacked.
        first: index of the first item.
        prefix: of the items' names.

    Raises:
        DataError: there are malformed rows, or no items but skipped ones. Single unusable items raise nothing.
    """
    findings, data = Findings(), folder.with_known_lists(data)
    root = _find_root(data)
    rows = _read_rows(data, root, media_dir, findings)
    if (table := _caption_table(rows, data, root)) is not None:
        findings, data = Findings(), data.model_copy(update={"dataset_file": table})
        rows = _read_rows(data, root, media_dir, findings)
        folder.note_unlisted([row.media for row in rows], root, table.name, findings)
    rows = rows[: data.max_items]
    items = _make_items(rows, data, root, findings, first=first, prefix=prefix)
    further = {}
    for name, column in sorted(data.extra_columns):
        # Each column is read as the clips are, whatever the source; captions and their warnings are known already.
        try:
            column_rows = _further_rows(rows, column, data, root, media_dir, findings)
        except DataError as error:
            raise DataError(f"--extra_columns {name}={column}: {error}", kind=error.kind) from error
        further[name] = _make_items(column_rows, data, root, Findings(), first=first)
    masks = _mask_items(rows, data, root, media_dir, findings, first=first)
    source = data.hf_dataset or str(data.dataset_file or data.data_root)
    if findings.problems:
        raise DataError(f"{source}: {plural(len(findings.problems), 'problem')}", findings.problems)
    if all(item.unusable is not None and item.unusable.status == "skipped" for item in items):
        warnings = f" ({'; '.join(findings.warnings)})" if findings.warnings else ""
        raise DataError(f"{source}: no items found{warnings}", kind="not_found")
    return Reading(items, findings.warnings, further, masks)


def tables_in(directory: Path) -> list[Path]:
    """Return the metadata files in a directory, without empty ones."""
    paths = sorted(path for path in directory.iterdir() if path.suffix.lower() in TABLES)
    return [path for path in paths if path.is_file() and path.stat().st_size]


def _caption_table(rows: Sequence[Row], data: DataSection, root: Root) -> Path | None:
    """Return the one metadata file in a directory of clips that all lack the captions that they need, or None."""
    needs_captions = folder.lacks_lists(data) and data.caption_missing in (None, "error")
    if not needs_captions or not rows or any(row.captions is not None or row.unusable for row in rows):
        return None
    tables = tables_in(root.folder)
    return tables[0] if len(tables) == 1 else None


def media_kind(path: str) -> Kind:
    """Return the kind of a media file by its name."""
    return "image" if path.lower().endswith(_IMAGES) else "video"


def is_packed(data: DataSection) -> bool:
    """Return whether the media of a dataset are in archives, parquet files or on the Hub."""
    return data.hf_dataset is not None or (
        data.dataset_file is not None and data.dataset_file.suffix.lower() not in TABLES
    )


def _further_rows(
    rows: Sequence[Row], column: str, data: DataSection, root: Root, media_dir: Path | None, findings: Findings
) -> Sequence[Row]:
    """Return the row of another column of media for each row."""
    if folder.lacks_lists(data):
        return [row._replace(media=str(Path(column, row.media))) for row in rows]
    column_findings = Findings()
    column_data = data.model_copy(update={"video_column": column})
    column_rows = _read_rows(column_data, root, media_dir, column_findings)[: data.max_items]
    findings.problems += [problem for problem in column_findings.problems if problem not in findings.problems]
    # Numbers of lines in the lists; a refused sample of an archive has its index there instead.
    line_numbers, column_numbers = (
        [(row.where or row.media).rpartition(" ")[2] for row in listing] for listing in (rows, column_rows)
    )
    if not findings.problems and line_numbers != column_numbers:  # two text files: a line may be blank in one of them
        last = column_numbers[-1] if column_numbers else "1"
        line = next((number for number in line_numbers if number not in column_numbers), last)
        message = f"its lines do not match those of {data.video_column!r}; see line {line}"
        raise DataError(message, kind="mismatch")
    return column_rows


def _mask_items(
    rows: Sequence[Row], data: DataSection, root: Root, media_dir: Path | None, findings: Findings, *, first: int
) -> dict[int, Item]:
    """Return the masks of items that have one, by the item's index; masks in containers only if a column is named."""
    if is_packed(data):
        mask_rows = _further_rows(rows, data.mask_column, data, root, media_dir, findings) if data.mask_column else rows
        masks = [row if data.mask_column and not is_absent(row) else None for row in mask_rows]
    else:
        masks = [Row(row.where, row.mask) if row.mask else None for row in rows]
        if folder.lacks_lists(data):
            root = masks_root(data, root)
        elif data.dataset_file is not None and data.mask_column is None and not any(masks):
            note_unread_masks((row.media for row in rows), root.folder, findings)
    masked = [(first + index, row._replace(captions=("",))) for index, row in enumerate(masks) if row is not None]
    items = _make_items(
        [row for _, row in masked], data.model_copy(update={"caption_missing": None}), root, Findings(), first=0
    )
    return {index: item for (index, _), item in zip(masked, items, strict=True)}


def _make_items(
    rows: Sequence[Row], data: DataSection, root: Root, findings: Findings, *, first: int, prefix: str = ""
) -> list[Item]:
    """Return the items of rows, with files looked up and captions cleaned."""
    items: list[Item] = []
    below = str(root.folder / "_")[:-1]
    for row, (path, state_or_problem) in zip(
        rows, map_paths_threaded(lambda row: _look_up(row, root), rows), strict=True
    ):
        captions = _clean_captions(row, data, findings)
        unusable, state = None, None
        if isinstance(captions, InvalidSample):
            unusable, captions = captions, ("",)
        if isinstance(state_or_problem, InvalidSample):
            has_file = row.unusable is None or row.rate is None  # an unusable row of Python has none
            if has_file and (unusable is None or unusable.status != "skipped"):
                unusable = state_or_problem
        elif unusable is None:
            state = state_or_problem
        path_text = str(path)
        name = row.media if row.stored is not None else path_text.removeprefix(below)
        index = first + len(items)
        kind, origin = media_kind(path_text), f"{prefix}{name}"
        items.append(Item(index, path, captions, kind, origin, row.where, unusable, state, row.extra, row.rate))
    return items


def _find_root(data: DataSection) -> Root:
    folder = data.data_root
    if folder is not None and not folder.is_dir():
        if folder.suffix in TABLES and folder.is_file() and data.dataset_file is None:
            path = quoted(str(folder))
            raise DataError(
                f"data_root {path} is a file, not a directory; if it lists clips, use --dataset_file {path}"
            )
        raise path_error("data_root", folder, folder=True)
    if folder is None and data.dataset_file is not None:
        folder = data.dataset_file.parent
    if folder is None and data.hf_dataset is not None:
        folder = Path(data.hf_dataset) if Path(data.hf_dataset).is_dir() else Path()
    if folder is None:
        raise DataError(
            "no dataset: set `data_root` (a directory), `dataset_file` (.csv, .json, .jsonl, .parquet, .tar), "
            "`hf_dataset` or `dataset`",
            kind="required",
        )
    return Root(folder, allow_outside=data.allow_outside)


def _read_rows(data: DataSection, root: Root, media_dir: Path | None, findings: Findings) -> Sequence[Row]:
    file = data.dataset_file
    if file is None and data.hf_dataset is None:
        return folder.read_folder(root, data, findings)
    if file is not None and file.suffix.lower() in TABLES:
        return tables.read_table(file, data, findings)
    if file is not None and python_rows.is_rows(file):
        return python_rows.read_rows(file, data)
    is_tar = file is not None and file.name.lower().endswith(tars.SUFFIXES)
    if not is_tar and file is not None and file.suffix.lower() != ".parquet":
        message = f"dataset_file {quoted(str(file))} must end in .csv, .json, .jsonl, .parquet or .tar"
        raise DataError(message, kind="unsupported")
    assert media_dir is not None, "media of this dataset must be unpacked"
    if file is not None and is_tar:
        return tars.read_tars(file, data, MediaFolder(media_dir), findings)
    return hub.read_hub(data, root, MediaFolder(media_dir), findings)


def _look_up(row: Row, root: Root) -> tuple[Path, os.stat_result | InvalidSample]:
    """Return the file of a row, and its `stat` or the reason why it must not be opened."""
    path = row.stored or root.folder / row.media
    try:
        if row.stored is not None:
            return path, require_file(path)
        path, state = root.look_up(row.media)
        return path, require_content(state)
    except InvalidSampleError as error:
        return path, error.unusable


def _text_problem(captions: Sequence[str]) -> str | None:
    """Return the reason why a caption cannot be encoded, or None if all can."""
    longest = max(map(len, captions))
    if longest > MAX_CAPTION_BYTES:
        return f"the caption has {longest} characters, more than the limit of {MAX_CAPTION_BYTES}"
    for caption in captions:
        if "\0" in caption:
            return "the caption holds a NUL character"
        try:
            if not caption.isascii():
                caption.encode()
        except UnicodeEncodeError:
            return "the caption holds half of a surrogate pair, which is not a character"
    return None


def _clean_captions(row: Row, data: DataSection, findings: Findings) -> tuple[str, ...] | InvalidSample:
    """Return the cleaned captions of a row, or the reason why it cannot be used."""
    if row.unusable is not None:
        return row.unusable
    raw = row.captions
    captions = tuple([caption for caption in raw or () if caption.strip()])
    if not captions:
        policy = data.caption_missing
        if policy == "skip":
            findings.note("without a caption left out", printable_name(row.media))
            return InvalidSample("skipped", "no caption, and `caption_missing` is skip")
        if policy == "error" or (policy is None and raw is None):
            missing = "no caption" if raw is None else "an empty caption"
            hint = f"; expected it in {row.expected}" if row.expected else ""
            return InvalidSample("caption_missing", f"{missing}{hint}")
        captions = ("",)
    if (reason := _text_problem(captions)) is not None:
        return InvalidSample("caption_missing", reason)
    cleaned = tuple(clean_caption(caption, data) for caption in captions)
    longest = max(map(len, cleaned))
    if longest > LONG_CAPTION:
        findings.note(
            f"with a caption of more than {LONG_CAPTION} characters (text encoders read only the beginning)",
            f"{printable_name(row.media)} ({longest})",
        )
    return cleaned
