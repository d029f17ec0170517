"""Finds the masks of a folder's clips. A mask is an image or a video that weighs the loss of its clip per pixel.

Beside a clip `NAME.mp4` it is `NAME.mask.png`, or any other image or video of that name. Or all masks are in a folder of
their own, under the names of the clips. A mask is never a clip.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from finetrainers.config.sections import DataSection
from finetrainers.utils.files import not_there
from finetrainers.utils.text import quoted

from .paths import Root
from .rows import DataError, Findings, shown

#: The column of a table that has masks, and what stands before the suffix of those beside clips.
MASK = "mask"
#: Folders of a table's clips that are looked into for masks.
_FOLDERS = 100
#: Suffixes of what people keep beside masks.
_TEXT = (".txt", ".json", "")


def is_beside(name: str) -> bool:
    """Whether a media file is the mask of the clip beside it."""
    return os.path.splitext(name)[0].lower().endswith(f".{MASK}")


def masks_root(data: DataSection, root: Root) -> Root:
    """The folder that the masks of a folder's clips are in.

    Raises:
        DataError: a folder is named, and is not there.
    """
    if not data.mask_column:
        return root
    path = root.folder / data.mask_column
    try:
        is_there = path.is_dir()
    except OSError as error:  # a name that is too long
        raise DataError(f"mask_column {quoted(str(path))}: {error.strerror}") from error
    if not is_there:
        raise DataError(
            f"mask_column {quoted(str(path))} {not_there(path, folder=True)}; it names the folder of masks where clips have "
            "text files of their own"
        )
    return Root(path, allow_outside=data.allow_outside)


def masks_inside(data: DataSection, root: Root) -> str | None:
    """The folder of masks below that of the clips, relative to it; None: there is none, or it is elsewhere."""
    if not data.mask_column:
        return None
    below = os.path.relpath(os.path.realpath(root.folder / data.mask_column), os.path.realpath(root.folder))
    return None if below == os.curdir or below.split(os.sep)[0] == os.pardir else below


def match_masks(names: Sequence[str], masks: Iterable[str], found: Findings, *, beside: bool) -> dict[str, str]:
    """The mask of each clip that has one, by the clip's name.

    Args:
        names: of the clips, relative to their folder.
        masks: names of media files that are masks, relative to their folder.
        found: gets several masks of one clip as problems, and masks of no clip as warnings.
        beside: whether masks are `NAME.mask.png` and not `NAME.png`.
    """
    of_stem: dict[str, list[str]] = {}
    for mask in sorted(masks):
        stem = os.path.splitext(mask)[0]
        of_stem.setdefault(stem[: -len(f".{MASK}")] if beside else stem, []).append(mask)
    stems = {name: os.path.splitext(name)[0] for name in names}
    for several in of_stem.values():
        if len(several) > 1:
            found.problems.append(f"{' and '.join(map(shown, several))} are masks of one clip; keep one of them")
    clips = set(stems.values())
    for stem, (mask, *_) in of_stem.items():
        if stem not in clips:
            found.note("named as a mask, but there is no clip of its name", shown(mask))
    return {name: of_stem[stem][0] for name, stem in stems.items() if stem in of_stem}


def find_unreadable_masks(names: Sequence[str], others: Iterable[str], found: Findings, *, beside: bool) -> None:
    """Find files and directories that are named as the mask of a clip and cannot be read, so that it would train unmasked.

    Args:
        names: of the clips, relative to their folder.
        others: names of directories and of files without a suffix of media, relative to the folder of the masks.
        found: gets them as problems.
        beside: whether masks are `NAME.mask.png` and not `NAME.png`.
    """
    stems = {os.path.splitext(name)[0] for name in names}
    for other in sorted(others):
        stem, suffix = os.path.splitext(other)
        if suffix.lower() in _TEXT or (beside and not is_beside(other)):
            continue
        if (stem[: -len(f".{MASK}")] if beside else stem) in stems:
            found.problems.append(
                f"{shown(other)} is named as the mask of a clip, and is not an image or video that can be read; save it as "
                "PNG, or rename it"
            )


def note_unread_masks(names: Iterable[str], folder: Path, found: Findings) -> None:
    """Note masks beside the clips of a table, which names masks in a column and has none; the first folders are looked into.

    Args:
        names: paths of the clips, relative to the folder.
        folder: of the dataset.
        found: gets the note.
    """
    stems = {os.path.splitext(name)[0] for name in names}
    for below in sorted({os.path.dirname(stem) for stem in stems})[:_FOLDERS]:
        with suppress(OSError), os.scandir(os.path.join(folder, below)) as entries:
            for name in sorted(entry.name for entry in entries if is_beside(entry.name)):
                stem = os.path.splitext(name)[0][: -len(f".{MASK}")]
                if os.path.join(below, stem) in stems:
                    found.note(
                        "named as the mask of a clip beside it and not read, since the table has no column `mask`",
                        shown(name),
                    )


def listed_masks(path: Path, count: int, lines: list[str]) -> list[str]:
    """The lines of a text file with the mask of each clip; an empty line is a clip without.

    Raises:
        DataError: there are not as many as clips.
    """
    lines = lines[:count] if not any(lines[count:]) else lines
    if len(lines) != count:
        raise DataError(
            f"{path} has {len(lines)} lines, and there are {count} clips; line n is the mask of clip n, and an empty line a clip "
            "without a mask"
        )
    return lines
