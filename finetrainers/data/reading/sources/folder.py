"""Reader of folders: two text files that correspond line by line, or media files with caption files of their names."""

from __future__ import annotations

import contextlib
import os
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from finetrainers.config.errors import Problem
from finetrainers.config.sections import DataSection
from finetrainers.utils.reading import read_bytes
from finetrainers.utils.text import nearest, plural, quoted

from ..status import InvalidSample, InvalidSampleError
from .captions import split_captions
from .masks import is_beside, listed_masks, masks_inside, masks_root, match_masks
from .paths import Root
from .rows import MAX_CAPTION_BYTES, MEDIA_SUFFIXES, DataError, Findings, Row, decode_text, printable_name, read_lines

#: Files that every run writes at its start: its samples, in the same folder, are not training data.
_RUN_FILES = {"config.toml", "manifest.jsonl"}


#: Options that name columns of a table, or two text files of a folder.
LISTS = ("video_column", "caption_column")


#: Names of the two text files that are read where no others are given.
_KNOWN_LISTS = ("videos.txt", "prompts.txt")


def with_known_lists(data: DataSection) -> DataSection:
    """Return options that name `videos.txt` and `prompts.txt` if the folder holds both and they name no columns.

    Captions beside the clips come first: the lists are left alone if a listed clip has one.
    """
    if data.data_root is None or data.dataset_file is not None or data.hf_dataset is not None:
        return data
    has_defaults = all(getattr(data, name) == DataSection.model_fields[name].default for name in LISTS)
    if not has_defaults or not all((data.data_root / name).is_file() for name in _KNOWN_LISTS):
        return data
    listed = (data.data_root / line for line in read_lines(data.data_root / _KNOWN_LISTS[0]) if line)
    if any(path.with_suffix(".txt").is_file() for path in listed):
        return data
    return data.model_copy(update=dict(zip(LISTS, _KNOWN_LISTS, strict=True)))


def lacks_lists(data: DataSection) -> bool:
    """Return whether a dataset is a folder without the two text files."""
    if data.data_root is None or data.dataset_file is not None or data.hf_dataset is not None:
        return False
    return not any((data.data_root / getattr(data, name)).is_file() for name in LISTS)


def read_folder(root: Root, data: DataSection, findings: Findings) -> list[Row]:
    """Return rows of the two text files `video_column` and `caption_column` if they are there, else of all media files.

    Raises:
        DataError: one of the two is missing, or both though other names were given; they differ in length, or there is
            nothing.
    """
    media_list, caption_list = root.folder / data.video_column, root.folder / data.caption_column
    if media_list.is_file() and caption_list.is_file():
        rows = _read_two_files(_find_list(root, data.video_column), _find_list(root, data.caption_column), findings)
        if data.mask_column:
            path = _find_list(root, data.mask_column)
            masks = listed_masks(path, len(read_lines(media_list)), read_lines(path))
            rows = [row._replace(mask=masks[int(row.where.rpartition(" ")[2]) - 1]) for row in rows]
        further = [root.folder / column for _, column in data.extra_columns]
        other_media = [name for path in further if path.is_file() for name in read_lines(path)]
        other_media += [row.mask for row in rows if row.mask]
        note_unlisted([*(row.media for row in rows), *other_media], root, media_list.name, findings)
        return rows
    changed_options = [name for name in LISTS if getattr(data, name) != DataSection.model_fields[name].default]
    if changed_options or media_list.is_file() or caption_list.is_file():
        files = [path for path in root.folder.iterdir() if path.is_file()]
        media = {path.stem for path in files if path.suffix.lower() in MEDIA_SUFFIXES}
        names = [path.name for path in files if path.stem not in media]  # not the captions of single clips
        missing = [path.name for path in (media_list, caption_list) if not path.is_file()]
        [present] = [name for name in (media_list.name, caption_list.name) if name not in missing] or [""]
        hints = [(name, nearest(name, names, listed=0).removeprefix("; ")) for name in missing]
        missing_names = " nor ".join(f"{name!r}{f' ({hint})' if hint else ''}" for name, hint in hints)
        remedy = (
            f"; remove --{' and --'.join(changed_options)} if each clip has a text file of the same name"
            if not present
            else ""
        )
        raise DataError(
            f"{quoted(str(root.folder))} holds {f'{present!r} but not' if present else 'neither'} {missing_names} "
            f"(set by `video_column` and `caption_column`){remedy}",
            kind="not_found",
        )
    rows = _read_sidecars(root, data, findings)
    if not rows and not findings.problems:
        others = f"; {'; '.join(findings.warnings)}" if findings.warnings else ""
        raise DataError(
            f"no clips in {quoted(str(root.folder))}: put videos or images there, each with a caption in a text file "
            "of the same name (dog.mp4 and dog.txt). Or set --dataset_file, a table of paths and captions, or the "
            f"two text files --video_column and --caption_column with one line per clip{others}",
            kind="not_found",
        )
    return rows


def _find_list(root: Root, name: str) -> Path:
    """Return the path of one of the two text files.

    A link out of the root is refused, as it could put any file into captions or messages.
    """
    try:
        return root.find(name)
    except InvalidSampleError as error:
        raise DataError(f"{name} {error}", kind="not_found" if error.status == "missing" else "invalid") from error


def _read_two_files(media_list: Path, caption_list: Path, findings: Findings) -> list[Row]:
    """Pair line n of one file with line n of the other, so that a blank caption stays with its clip."""
    media, captions = read_lines(media_list), read_lines(caption_list)
    while media and not media[-1]:
        media.pop()
    while len(captions) > len(media) and not captions[-1]:
        captions.pop()
    if len(media) != len(captions):
        raise DataError(
            f"{media_list} has {plural(len(media), 'line')} but {caption_list} has {plural(len(captions), 'line')}; "
            "line n of one belongs to line n of the other, and an empty caption is an empty line",
            kind="mismatch",
        )
    rows = []
    for number, (name, caption) in enumerate(zip(media, captions, strict=True), start=1):
        where = f"{media_list.name} line {number}"
        if name:
            rows.append(Row(where, name, (caption,)))
        elif caption:
            message = f"{where} is empty, but {caption_list.name} has a caption there"
            findings.problems.append(Problem("", message, "required"))
    return rows


def note_unlisted(names: Sequence[str], root: Root, listed_in: str, findings: Findings) -> None:
    """Warn of media files that are in the folders of listed ones, or of the list, and are not listed."""
    listed = {unicodedata.normalize("NFC", os.path.normpath(root.relative(name))) for name in names}
    for folder in sorted({"", *map(os.path.dirname, listed)}):
        if os.path.isabs(folder) or folder.split(os.sep)[0] == os.pardir:
            continue
        try:
            names = [entry.name for entry in os.scandir(root.folder / folder) if not entry.name.startswith(".")]
        except (OSError, ValueError):  # absent, or with a null character; the items report it
            continue
        for name in sorted(names):
            path = os.path.join(folder, name)
            is_media = os.path.splitext(name)[1].lower() in MEDIA_SUFFIXES
            if is_media and unicodedata.normalize("NFC", path) not in listed:
                findings.note(f"in the directory, but not listed in {listed_in}, so not used", printable_name(path))


def _read_sidecars(root: Root, data: DataSection, findings: Findings) -> list[Row]:
    """Return the rows of all media files below the root, by path, with captions from text files of the same names."""
    others: list[str] = []
    columns = [*(column for _, column in data.extra_columns), masks_inside(data, root)]
    other_media_prefixes = tuple(os.path.normpath(column) + os.sep for column in columns if column is not None)
    media = [name for name in _media_files(root, others, findings) if not name.startswith(other_media_prefixes)]
    names = sorted((name for name in media if not is_beside(name)), key=lambda name: name.split(os.sep))
    masks = _match_masks(names, [name for name in media if is_beside(name)], others, root, data, findings)
    sharing: dict[str, list[str]] = {}
    rows = []
    for name in names:
        sidecar = os.path.splitext(name)[0] + ".txt"
        sharing.setdefault(sidecar, []).append(name)
        row = Row("", name, mask=masks.get(name, ""))
        try:
            captions = split_captions(_read_caption(root, sidecar), each_line=data.caption_lines)
            rows.append(row._replace(captions=captions))
        except FileNotFoundError:
            rows.append(row._replace(expected=printable_name(sidecar)))
        except (DataError, InvalidSampleError) as error:
            reason = f"the caption {printable_name(sidecar)} {error}"
            rows.append(row._replace(unusable=InvalidSample("caption_missing", reason)))
    for name in sorted(name for name in others if name not in sharing and not name.endswith(os.sep)):
        findings.note("in the directory that are neither media nor captions", printable_name(name))
    for sidecar, names_sharing in sharing.items():
        if len(names_sharing) > 1:
            findings.note(
                "sharing a caption file",
                f"{' and '.join(map(printable_name, names_sharing))} ({printable_name(sidecar)})",
            )
    lists = _unread_lists(root, names, others) if all(row.captions is None for row in rows) else None
    if lists is not None:
        flags = " ".join(f"--{option} {shlex.quote(name)}" for option, name in zip(LISTS, lists, strict=True))
        rows = [row._replace(expected=f"{row.expected}, or with {flags} in {lists[1]}") for row in rows]
    return rows


def _unread_lists(root: Root, media: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of two text files that could list the media and the captions, or None if there are none."""
    lines_by_name: dict[str, list[str]] = {}
    for name in sorted(name for name in others if name.endswith(".txt") and os.sep not in name):
        with contextlib.suppress(DataError, InvalidSampleError, OSError):
            lines_by_name[name] = "\n".join(read_lines(root.find(name))).rstrip("\n").split("\n")
    media_names = {"", *media}
    media_lists = [
        name
        for name, lines in lines_by_name.items()
        if {os.path.normpath(root.relative(line)) for line in lines if line} <= media_names
    ]
    for name in (name for name in media_lists if any(lines_by_name[name])):
        for other, lines in lines_by_name.items():
            if other not in media_lists and len(lines) == len(lines_by_name[name]):
                return name, other
    return None


def _match_masks(
    names: Sequence[str],
    beside: Sequence[str],
    others: Sequence[str],
    root: Root,
    data: DataSection,
    findings: Findings,
) -> dict[str, str]:
    """Return the mask of each clip that has one: from beside the clips, or from the directory of `mask_column`."""
    if data.mask_column is None:
        return match_masks(names, beside, others, findings, beside=True)
    unused = "not read because of --mask_column" if data.mask_column else "and no masks are read"
    for name in beside:
        findings.note(f"next to a clip and named as its mask, {unused}", printable_name(name))
    if not data.mask_column:
        return {}
    unreadable: list[str] = []
    masks = [*_media_files(masks_root(data, root), unreadable, findings)]
    return match_masks(names, masks, unreadable, findings, beside=False)


def _read_caption(root: Root, name: str) -> str:
    try:
        path = root.find(name)
    except InvalidSampleError as error:
        if error.status == "missing" and not os.path.lexists(root.folder / name):
            raise FileNotFoundError(name) from error
        raise
    size = path.stat().st_size
    if size > MAX_CAPTION_BYTES:
        raise DataError(f"has {size} bytes, more than the limit of {MAX_CAPTION_BYTES} for captions")
    try:
        return decode_text(read_bytes(path, limit=MAX_CAPTION_BYTES), "file")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}") from error


def _media_files(root: Root, others: list[str], findings: Findings) -> Iterator[str]:
    """Yield names of media files below the root; others, and directories with such names (plus `/`), go to `others`."""
    top = os.fspath(root.folder)
    walked = {os.path.realpath(top)}
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            message = f"cannot be listed: {error.strerror or error}"
            findings.problems.append(Problem(os.path.relpath(folder, top), message, "unreadable"))
            continue
        if folder != top and {entry.name for entry in entries} >= _RUN_FILES:
            findings.note("left out, since it is the directory of a run", printable_name(os.path.relpath(folder, top)))
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            is_media = os.path.splitext(entry.name)[1].lower() in MEDIA_SUFFIXES
            name = os.path.relpath(entry.path, top)
            if entry.is_dir(follow_symlinks=False) or _is_link_to_follow(entry, root, walked, findings):
                waiting.append(entry.path)
                if is_media or is_beside(entry.name):
                    others.append(name + os.sep)
            elif not _is_dir(entry):
                if is_media:
                    yield name
                else:
                    others.append(name)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory; a link to itself counts as a file, whose probe reports it."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_link_to_follow(entry: os.DirEntry[str], root: Root, walked: set[str], findings: Findings) -> bool:
    """Return whether an entry is a link to a directory to read: one outside, if that is allowed, and not read yet."""
    if not (entry.is_symlink() and _is_dir(entry)):
        return False
    top, real = os.fspath(root.folder), os.path.realpath(entry.path)
    if root.is_outside(entry.path):
        message = f"{os.path.relpath(entry.path, top)} is a link to {real!r}; add --allow_outside to follow it"
        findings.problems.append(Problem("", message))
        return False
    if real in walked or real.startswith(os.path.realpath(top) + os.sep):
        return False
    walked.add(real)
    return True
