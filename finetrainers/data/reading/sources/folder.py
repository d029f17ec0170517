"""Reads folders: two text files that correspond line by line, or media files with caption files of their names."""

from __future__ import annotations

import contextlib
import os
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from finetrainers.config.sections import DataSection
from finetrainers.utils.text import nearest, plural, quoted

from ..status import Unusable, UnusableError
from .captions import captions_of_text
from .masks import find_unreadable_masks, is_beside, listed_masks, masks_inside, masks_root, match_masks
from .paths import Root
from .rows import MAX_CAPTION_BYTES, MEDIA_SUFFIXES, DataError, Findings, Row, decode_text, read_lines, shown

#: Files that every run writes at its start: its samples, in the same folder, are no training data.
_OF_A_RUN = {"config.toml", "manifest.jsonl"}


#: Options that name columns of a table, or two text files of a folder.
LISTS = ("video_column", "caption_column")


def lacks_lists(data: DataSection) -> bool:
    """Whether a dataset is a folder without the two text files."""
    if data.data_root is None or data.dataset_file is not None or data.hf_dataset is not None:
        return False
    return not any((data.data_root / getattr(data, name)).is_file() for name in LISTS)


def read_folder(root: Root, data: DataSection, found: Findings) -> list[Row]:
    """Rows of the two text files `video_column` and `caption_column` if they are there, else of all media files.

    Raises:
        DataError: one of the two is missing, or both though other names were given; they differ in length, or there is
            nothing.
    """
    media_list, caption_list = root.folder / data.video_column, root.folder / data.caption_column
    if media_list.is_file() and caption_list.is_file():
        rows = _read_two_files(_listed(root, data.video_column), _listed(root, data.caption_column), found)
        if data.mask_column:
            path = _listed(root, data.mask_column)
            masks = listed_masks(path, len(read_lines(media_list)), read_lines(path))
            rows = [row._replace(mask=masks[int(row.where.rpartition(" ")[2]) - 1]) for row in rows]
        further = [root.folder / column for _, column in data.extra_columns]
        theirs = [name for path in further if path.is_file() for name in read_lines(path)]
        theirs += [row.mask for row in rows if row.mask]
        _note_unlisted([*(row.media for row in rows), *theirs], root, media_list.name, found)
        return rows
    given = [name for name in LISTS if getattr(data, name) != DataSection.model_fields[name].default]
    if given or media_list.is_file() or caption_list.is_file():
        files = [path for path in root.folder.iterdir() if path.is_file()]
        media = {path.stem for path in files if path.suffix.lower() in MEDIA_SUFFIXES}
        names = [path.name for path in files if path.stem not in media]  # captions of single clips are not meant
        missing = [path.name for path in (media_list, caption_list) if not path.is_file()]
        [there] = [name for name in (media_list.name, caption_list.name) if name not in missing] or [""]
        hints = [(name, nearest(name, names, listed=0).removeprefix("; ")) for name in missing]
        what = " nor ".join(f"{name!r}{f' ({hint})' if hint else ''}" for name, hint in hints)
        way_out = (
            f"; leave out --{' and --'.join(given)} if each clip has a text file of its own name" if not there else ""
        )
        raise DataError(
            f"{quoted(str(root.folder))} holds {f'{there!r} but not' if there else 'neither'} {what} (set by `video_column` and "
            f"`caption_column`){way_out}"
        )
    rows = _read_sidecars(root, data, found)
    if not rows and not found.problems:
        others = f"; {'; '.join(found.warnings)}" if found.warnings else ""
        raise DataError(
            f"no clips in {quoted(str(root.folder))}: put videos or images there, each with a text file of the same name that holds its "
            "caption (dog.mp4 and dog.txt). Or give --dataset_file, a table of paths and captions, or the two text files "
            f"--video_column and --caption_column with a line for each clip{others}"
        )
    return rows


def _listed(root: Root, name: str) -> Path:
    """The path of one of the two text files. A link out of the root could put any file into captions or messages."""
    try:
        return root.find(name)
    except UnusableError as error:
        raise DataError(f"{name} {error}") from error


def _read_two_files(media_list: Path, caption_list: Path, found: Findings) -> list[Row]:
    """Pair line n of one file with line n of the other, so that a blank caption stays with its clip."""
    media, captions = read_lines(media_list), read_lines(caption_list)
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
        where = f"{media_list.name} line {number}"
        if name:
            rows.append(Row(where, name, (caption,)))
        elif caption:
            found.problems.append(f"{where} is empty, but {caption_list.name} has a caption there")
    return rows


def _note_unlisted(names: Sequence[str], root: Root, listed_in: str, found: Findings) -> None:
    """Warn of media files that are in the folders of listed ones, or of the list, and are not listed."""
    listed = {unicodedata.normalize("NFC", os.path.normpath(root.relative(name))) for name in names}
    for folder in sorted({"", *map(os.path.dirname, listed)}):
        if os.path.isabs(folder) or folder.split(os.sep)[0] == os.pardir:
            continue
        try:
            names = [entry.name for entry in os.scandir(root.folder / folder) if not entry.name.startswith(".")]
        except OSError:  # then the items say so
            continue
        for name in sorted(names):
            path = os.path.join(folder, name)
            is_media = os.path.splitext(name)[1].lower() in MEDIA_SUFFIXES
            if is_media and unicodedata.normalize("NFC", path) not in listed:
                found.note(f"in the folder but not listed in {listed_in}, so not used", shown(path))


def _read_sidecars(root: Root, data: DataSection, found: Findings) -> list[Row]:
    """Every media file below the root, in order of its path, with its caption in a text file of the same name."""
    others: list[str] = []
    columns = [*(column for _, column in data.extra_columns), masks_inside(data, root)]
    of_further = tuple(os.path.normpath(column) + os.sep for column in columns if column is not None)
    walked = [name for name in _media_files(root, others, found) if not name.startswith(of_further)]
    names = sorted((name for name in walked if not is_beside(name)), key=lambda name: name.split(os.sep))
    masks = _masks(names, [name for name in walked if is_beside(name)], others, root, data, found)
    sharing: dict[str, list[str]] = {}
    rows = []
    for name in names:
        sidecar = os.path.splitext(name)[0] + ".txt"
        sharing.setdefault(sidecar, []).append(name)
        try:
            captions = captions_of_text(_read_caption(root, sidecar), each_line=data.caption_lines)
        except FileNotFoundError:
            rows.append(Row("", name, None, expected=shown(sidecar)))
        except (DataError, UnusableError) as error:
            unusable = Unusable("caption_missing", f"the caption {shown(sidecar)} {error}")
            rows.append(Row("", name, None, unusable=unusable))
        else:
            rows.append(Row("", name, captions))
        rows[-1] = rows[-1]._replace(mask=masks.get(name, ""))
    for name in sorted(name for name in others if name not in sharing and not name.endswith(os.sep)):
        found.note("in the folder, neither media nor a caption of one", shown(name))
    for sidecar, both in sharing.items():
        if len(both) > 1:
            found.note("sharing a caption file", f"{' and '.join(map(shown, both))} ({shown(sidecar)})")
    lists = _unread_lists(root, names, others) if all(row.captions is None for row in rows) else None
    if lists is not None:
        flags = " ".join(f"--{option} {shlex.quote(name)}" for option, name in zip(LISTS, lists, strict=True))
        rows = [row._replace(expected=f"{row.expected}, or with {flags} in {lists[1]}") for row in rows]
    return rows


def _unread_lists(root: Root, media: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of two text files that could be the lists of media and captions, or None if there are none."""
    texts: dict[str, list[str]] = {}
    for name in sorted(name for name in others if name.endswith(".txt") and os.sep not in name):
        with contextlib.suppress(DataError, UnusableError, OSError):
            texts[name] = "\n".join(read_lines(root.find(name))).rstrip("\n").split("\n")
    known = {"", *media}
    listing = [
        name
        for name, lines in texts.items()
        if {os.path.normpath(root.relative(line)) for line in lines if line} <= known
    ]
    for name in (name for name in listing if any(texts[name])):
        for other, lines in texts.items():
            if other not in listing and len(lines) == len(texts[name]):
                return name, other
    return None


def _masks(
    names: Sequence[str], beside: Sequence[str], others: Sequence[str], root: Root, data: DataSection, found: Findings
) -> dict[str, str]:
    """Return the mask of each clip that has one: of those beside clips, or of the folder that is named."""
    if data.mask_column is None:
        find_unreadable_masks(names, (name.rstrip(os.sep) for name in others), found, beside=True)
        return match_masks(names, beside, found, beside=True)
    unused = "not read because of --mask_column" if data.mask_column else "and no masks are read"
    for name in beside:
        found.note(f"beside a clip and named as its mask, {unused}", shown(name))
    if not data.mask_column:
        return {}
    unreadable: list[str] = []
    masks = [*_media_files(masks_root(data, root), unreadable, found)]
    find_unreadable_masks(names, (name.rstrip(os.sep) for name in unreadable), found, beside=False)
    return match_masks(names, masks, found, beside=False)


def _read_caption(root: Root, name: str) -> str:
    try:
        path = root.find(name)
    except UnusableError as error:
        if error.status == "missing" and not os.path.lexists(root.folder / name):
            raise FileNotFoundError(name) from error
        raise
    size = path.stat().st_size
    if size > MAX_CAPTION_BYTES:
        raise DataError(f"has {size} bytes, more than the {MAX_CAPTION_BYTES} of any caption")
    try:
        return decode_text(path.read_bytes(), "file")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}") from error


def _media_files(root: Root, others: list[str], found: Findings) -> Iterator[str]:
    """Yield names below the root that look like media; others, and directories named so (with a `/`), go to `others`."""
    top = os.fspath(root.folder)
    walked = {os.path.realpath(top)}
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            found.problems.append(f"{os.path.relpath(folder, top)}: cannot be listed: {error.strerror or error}")
            continue
        if folder != top and {entry.name for entry in entries} >= _OF_A_RUN:
            found.note("left out, being the folder of a run", shown(os.path.relpath(folder, top)))
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            is_media = os.path.splitext(entry.name)[1].lower() in MEDIA_SUFFIXES
            name = os.path.relpath(entry.path, top)
            if entry.is_dir(follow_symlinks=False) or _is_link_to_follow(entry, root, walked, found):
                waiting.append(entry.path)
                if is_media or is_beside(entry.name):
                    others.append(name + os.sep)
            elif not _is_dir(entry):
                if is_media:
                    yield name
                else:
                    others.append(name)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder; a link that leads back to itself is a file, whose probe reports it."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_link_to_follow(entry: os.DirEntry[str], root: Root, walked: set[str], found: Findings) -> bool:
    """Whether an entry is a link to a folder that is read: one outside, where that is allowed, and not read yet."""
    if not (entry.is_symlink() and _is_dir(entry)):
        return False
    top, real = os.fspath(root.folder), os.path.realpath(entry.path)
    if root.is_outside(entry.path):
        found.problems.append(
            f"{os.path.relpath(entry.path, top)} is a link to {real!r}; give --allow_outside to follow it"
        )
        return False
    if real in walked or real.startswith(os.path.realpath(top) + os.sep):
        return False
    walked.add(real)
    return True
