"""Reads a dataset into items: media files with cleaned captions.

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
from finetrainers.utils.files import not_there
from finetrainers.utils.map_paths import map_paths_threaded
from finetrainers.utils.text import plural, quoted

from .media import require_content, require_file
from .sources import folder, hub, tables, tars
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
    shown,
)
from .sources.unpacked import MediaFolder
from .status import Unusable, UnusableError

Kind = Literal["video", "image"]

TABLES = (".csv", ".json", ".jsonl")
_IMAGES = tuple(IMAGE_SUFFIXES)


@dataclass(slots=True)  # not frozen: as for `Clip`
class Item:
    """A media file and its captions; never changed once it is made.

    Attributes:
        index: its place among the items of a run.
        path: the file.
        captions: cleaned; of several, one is drawn each time. Never empty, but may hold the empty text.
        kind: video or image.
        name: what messages call it; does not depend on where the dataset is.
        where: where it is listed (`videos.txt line 3`); empty for files found in a folder.
        unusable: why it cannot be used, whatever the file is; then the file is not opened.
        state: what the file system says of the file; None where it is not to be opened.
        extra: further columns of its row.
    """

    index: int
    path: Path
    captions: tuple[str, ...]
    kind: Kind
    name: str
    where: str = ""
    unusable: Unusable | None = None
    state: os.stat_result | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: NO_EXTRA)

    @property
    def caption(self) -> str:
        """The first one."""
        return self.captions[0]


class Reading(NamedTuple):
    """The items of a dataset, what is odd about it, each with a count, and what belongs to items, as items.

    Attributes:
        items, warnings: see above.
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
    files `video_column` and `caption_column` in `data_root`, one entry a line; else every media file below `data_root`,
    each with its caption in a .txt file of the same name. Media paths are relative to `data_root`, or without it to the
    metadata file, and may not lead out of that folder.

    Args:
        data: its options.
        media_dir: where media of tars and parquet files are unpacked.
        first: index of the first item.
        prefix: of the items' names.

    Raises:
        DataError: there are malformed rows, or no items but skipped ones; single items may be unusable all the same.
    """
    found = Findings()
    root = _root(data)
    rows = _rows(data, root, media_dir, found)[: data.max_items]
    items = _items(rows, data, root, found, first=first, prefix=prefix)
    further = {}
    for name, column in sorted(data.extra_columns):
        # Each column is read as the clips are, whatever the source; captions and their warnings are known already.
        try:
            theirs = _further_rows(rows, column, data, root, media_dir, found)
        except DataError as error:
            raise DataError(f"--extra_columns {name}={column}: {error}") from error
        further[name] = _items(theirs, data, root, Findings(), first=first)
    masks = _masks(rows, data, root, media_dir, found, first=first)
    source = data.hf_dataset or str(data.dataset_file or data.data_root)
    if found.problems:
        raise DataError(f"{source}: {plural(len(found.problems), 'problem')}", found.problems)
    if all(item.unusable is not None and item.unusable.status == "skipped" for item in items):
        why = f" ({'; '.join(found.warnings)})" if found.warnings else ""
        raise DataError(f"{source}: no items found{why}")
    return Reading(items, found.warnings, further, masks)


def kind_of(path: str) -> Kind:
    """What a media file is by its name."""
    return "image" if path.lower().endswith(_IMAGES) else "video"


def is_packed(data: DataSection) -> bool:
    """Whether the media of a dataset are in archives, parquet files or on the hub."""
    return data.hf_dataset is not None or (
        data.dataset_file is not None and data.dataset_file.suffix.lower() not in TABLES
    )


def _further_rows(
    rows: Sequence[Row], column: str, data: DataSection, root: Root, media_dir: Path | None, found: Findings
) -> Sequence[Row]:
    """For each row, that of another column of media."""
    if folder.lacks_lists(data):
        return [row._replace(media=str(Path(column, row.media))) for row in rows]
    others = Findings()
    of_column = data.model_copy(update={"video_column": column})
    theirs = _rows(of_column, root, media_dir, others)[: data.max_items]
    found.problems += [problem for problem in others.problems if problem not in found.problems]
    # The number of a line of either list; a sample of an archive that is refused is named by its place there.
    ours_at, theirs_at = ([(row.where or row.media).rpartition(" ")[2] for row in some] for some in (rows, theirs))
    if not found.problems and ours_at != theirs_at:  # two text files: a line may be blank in one of them
        place = next((where for where in ours_at if where not in theirs_at), theirs_at[-1] if theirs_at else "1")
        raise DataError(f"its lines do not belong to those of {data.video_column!r}; see line {place}")
    return theirs


def _masks(
    rows: Sequence[Row], data: DataSection, root: Root, media_dir: Path | None, found: Findings, *, first: int
) -> dict[int, Item]:
    """The masks of items that have one, by the item's index. Of containers they are read where a column is named."""
    if is_packed(data):
        theirs = _further_rows(rows, data.mask_column, data, root, media_dir, found) if data.mask_column else rows
        masks = [one if data.mask_column and not is_absent(one) else None for one in theirs]
    else:
        masks = [Row(row.where, row.mask) if row.mask else None for row in rows]
        if folder.lacks_lists(data):
            root = masks_root(data, root)
        elif data.dataset_file is not None and data.mask_column is None and not any(masks):
            note_unread_masks((row.media for row in rows), root.folder, found)
    there = [(first + place, row._replace(captions=("",))) for place, row in enumerate(masks) if row is not None]
    items = _items(
        [row for _, row in there], data.model_copy(update={"caption_missing": None}), root, Findings(), first=0
    )
    return {index: item for (index, _), item in zip(there, items, strict=True)}


def _items(
    rows: Sequence[Row], data: DataSection, root: Root, found: Findings, *, first: int, prefix: str = ""
) -> list[Item]:
    """The items of rows, with files looked up and captions cleaned."""
    items: list[Item] = []
    below = str(root.folder / "_")[:-1]
    for row, (path, looked) in zip(rows, map_paths_threaded(lambda row: _look_up(row, root), rows), strict=True):
        captions = _captions(row, data, found)
        unusable, state = None, None
        if isinstance(captions, Unusable):
            unusable, captions = captions, ("",)
        if isinstance(looked, Unusable):
            if unusable is None or unusable.status != "skipped":
                unusable = looked
        elif unusable is None:
            state = looked
        text = str(path)
        name = row.media if row.stored is not None else text.removeprefix(below)
        index = first + len(items)
        items.append(
            Item(index, path, captions, kind_of(text), f"{prefix}{name}", row.where, unusable, state, row.extra)
        )
    return items


def _root(data: DataSection) -> Root:
    if data.data_root is not None and not data.data_root.is_dir():
        if data.data_root.suffix in TABLES and data.data_root.is_file() and data.dataset_file is None:
            place = quoted(str(data.data_root))
            raise DataError(
                f"data_root {place} is not a folder but a file; if it lists clips, give --dataset_file {place}"
            )
        raise DataError(f"data_root {quoted(str(data.data_root))} {not_there(data.data_root, folder=True)}")
    if data.data_root is not None:
        folder = data.data_root
    elif data.dataset_file is not None:
        folder = data.dataset_file.parent
    elif data.hf_dataset is not None:
        folder = Path(data.hf_dataset) if Path(data.hf_dataset).is_dir() else Path()
    else:
        raise DataError(
            "no dataset: give `data_root` (a folder), `dataset_file` (.csv, .json, .jsonl, .parquet, .tar), "
            "`hf_dataset` or `dataset`"
        )
    return Root(folder, allow_outside=data.allow_outside)


def _rows(data: DataSection, root: Root, media_dir: Path | None, found: Findings) -> Sequence[Row]:
    file = data.dataset_file
    if file is None and data.hf_dataset is None:
        return folder.read_folder(root, data, found)
    if file is not None and file.suffix.lower() in TABLES:
        return tables.read_table(file, data, found)
    is_tar = file is not None and file.name.lower().endswith(tars.SUFFIXES)
    if not is_tar and file is not None and file.suffix.lower() != ".parquet":
        raise DataError(f"dataset_file {quoted(str(file))} must end in .csv, .json, .jsonl, .parquet or .tar")
    assert media_dir is not None, "media of this dataset have to be unpacked"
    if file is not None and is_tar:
        return tars.read_tars(file, data, MediaFolder(media_dir), found)
    return hub.read_hub(data, root, MediaFolder(media_dir), found)


def _look_up(row: Row, root: Root) -> tuple[Path, os.stat_result | Unusable]:
    """The file of a row, and what the file system says of it, or why it must not be opened."""
    path = row.stored or root.folder / row.media
    try:
        if row.stored is not None:
            return path, require_file(path)
        path, state = root.look_up(row.media)
        return path, require_content(state)
    except UnusableError as error:
        return path, error.unusable


def _text_problem(captions: Sequence[str]) -> str | None:
    """Return why one of these is no text that can be encoded, or None if all are."""
    longest = max(map(len, captions))
    if longest > MAX_CAPTION_BYTES:
        return f"the caption has {longest} characters, more than the {MAX_CAPTION_BYTES} of any caption"
    for caption in captions:
        if "\0" in caption:
            return "the caption holds a NUL character"
        try:
            if not caption.isascii():
                caption.encode()
        except UnicodeEncodeError:
            return "the caption holds half of a surrogate pair, which is no character"
    return None


def _captions(row: Row, data: DataSection, found: Findings) -> tuple[str, ...] | Unusable:
    """The cleaned captions of a row, or why it cannot be used."""
    if row.unusable is not None:
        return row.unusable
    raw = row.captions
    kept = tuple([caption for caption in raw or () if caption.strip()])
    if not kept:
        policy = data.caption_missing
        if policy == "skip":
            found.note("without a caption left out", shown(row.media))
            return Unusable("skipped", "no caption, and `caption_missing` is skip")
        if policy == "error" or (policy is None and raw is None):
            what = "no caption" if raw is None else "an empty caption"
            place = f"; expected it in {row.expected}" if row.expected else ""
            return Unusable("caption_missing", f"{what}{place}")
        kept = ("",)
    if (reason := _text_problem(kept)) is not None:
        return Unusable("caption_missing", reason)
    cleaned = tuple(
        clean_caption(caption, id_token=data.id_token, remove_prefixes=data.remove_common_llm_caption_prefixes)
        for caption in kept
    )
    longest = max(map(len, cleaned))
    if longest > LONG_CAPTION:
        found.note(
            f"with a caption of more than {LONG_CAPTION} characters, of which text encoders read only the beginning",
            f"{shown(row.media)} ({longest})",
        )
    return cleaned
