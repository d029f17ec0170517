"""Search for the masks of a folder's clips. A mask is an image or a video that weighs the loss of its clip per pixel.

Beside a clip `NAME.mp4` it is `NAME.mask.png`, or any other image or video of that name. Or all masks are in a separate
directory, under the names of the clips. A mask is never a clip.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from finetrainers.config.errors import Problem
from finetrainers.config.sections import DataSection
from finetrainers.utils.text import quoted

from .paths import Root
from .rows import DataError, Findings, path_error, printable_name

#: The column of a table that has masks, and the end of the stem of masks beside clips.
MASK = "mask"
#: Number of a table's directories of clips that are searched for masks.
_FOLDERS = 100
#: Suffixes of other files that users keep beside masks.
_TEXT = (".txt", ".json", "")


def is_beside(name: str) -> bool:
    """Return whether a media file is the mask of the clip beside it."""
    return os.path.splitext(name)[0].lower().endswith(f".{MASK}")


def masks_root(data: DataSection, root: Root) -> Root:
    """Return the directory of the masks of a folder's clips.

    Raises:
        DataError: a directory is named that does not exist.
    """
    if not data.mask_column:
        return root
    path = root.folder / data.mask_column
    try:
        is_there = path.is_dir()
    except OSError as error:  # a name that is too long
        raise DataError(f"mask_column {quoted(str(path))}: {error.strerror}") from error
    if not is_there:
        hint = "; use the directory of masks if captions are in a text file per clip"
        raise path_error("mask_column", path, folder=True, hint=hint)
    return Root(path, allow_outside=data.allow_outside)


def masks_inside(data: DataSection, root: Root) -> str | None:
    """Return the directory of masks relative to that of the clips, or None if it does not exist or is elsewhere."""
    if not data.mask_column:
        return None
    below = os.path.relpath(os.path.realpath(root.folder / data.mask_column), os.path.realpath(root.folder))
    return None if below == os.curdir or below.split(os.sep)[0] == os.pardir else below


def match_masks(
    names: Sequence[str], masks: Iterable[str], others: Iterable[str], findings: Findings, *, beside: bool
) -> dict[str, str]:
    """Return the mask of each clip that has one, by the clip's name.

    Args:
        names: of the clips, relative to their folder.
        masks: names of media files that are masks, relative to their folder.
        others: names of directories and of files without a suffix of media, relative to the folder of the masks. Those
            that are named as the mask of a clip cannot be read, so that it would train unmasked.
        findings: gets these and several masks of one clip as problems, and masks of no clip as warnings.
        beside: whether masks are `NAME.mask.png` and not `NAME.png`.
    """
    stems = {name: os.path.splitext(name)[0] for name in names}
    clips = set(stems.values())
    for other in sorted(name.rstrip(os.sep) for name in others):
        stem, suffix = os.path.splitext(other)
        if suffix.lower() in _TEXT or (beside and not is_beside(other)):
            continue
        if (stem[: -len(f".{MASK}")] if beside else stem) in clips:
            message = "is named as the mask of a clip, but is not a readable image or video"
            remedy = "save it as PNG, or rename it"
            findings.problems.append(Problem("", f"{printable_name(other)} {message}; {remedy}", "unreadable"))
    masks_by_stem: dict[str, list[str]] = {}
    for mask in sorted(masks):
        stem = os.path.splitext(mask)[0]
        masks_by_stem.setdefault(stem[: -len(f".{MASK}")] if beside else stem, []).append(mask)
    for stem, same_stem in masks_by_stem.items():
        if len(same_stem) > 1:
            message = f"{' and '.join(map(printable_name, same_stem))} are masks of the same clip; remove one of them"
            findings.problems.append(Problem("", message, "duplicate"))
        if stem not in clips:
            findings.note("named as a mask without a clip of that name", printable_name(same_stem[0]))
    return {name: masks_by_stem[stem][0] for name, stem in stems.items() if stem in masks_by_stem}


def note_unread_masks(names: Iterable[str], folder: Path, findings: Findings) -> None:
    """Note masks beside the clips of a table without a column of masks; only the first directories are searched.

    Args:
        names: paths of the clips, relative to the folder.
        folder: of the dataset.
        findings: gets the note.
    """
    stems = {os.path.splitext(name)[0] for name in names}
    for below in sorted({os.path.dirname(stem) for stem in stems})[:_FOLDERS]:
        with suppress(OSError), os.scandir(os.path.join(folder, below)) as entries:
            for name in sorted(entry.name for entry in entries if is_beside(entry.name)):
                stem = os.path.splitext(name)[0][: -len(f".{MASK}")]
                if os.path.join(below, stem) in stems:
                    findings.note(
                        "named as the mask of a clip beside it and not read, since the table has no column `mask`",
                        printable_name(name),
                    )


def listed_masks(path: Path, count: int, lines: list[str]) -> list[str]:
    """Return the lines of a text file with the mask of each clip; an empty line is a clip without a mask.

    Raises:
        DataError: there are not as many as clips.
    """
    lines = lines[:count] if not any(lines[count:]) else lines
    if len(lines) != count:
        raise DataError(
            f"{path} has {len(lines)} lines, and there are {count} clips; line n is the mask of clip n, and an empty "
            "line is a clip without a mask",
            kind="mismatch",
        )
    return lines
