"""The best checkpoint of a run: the link `checkpoints/best`, which pruning respects. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from finetrainers.utils.files import fsync_dir

from .find import checkpoints_dir, step_of

#: Name of the link in the folder of the checkpoints.
BEST = "best"


def best_checkpoint(output_dir: Path) -> Path | None:
    """Return the checkpoint that is marked as the best, or None if there is no mark or it no longer exists."""
    link = checkpoints_dir(output_dir) / BEST
    try:
        name = link.readlink().name
    except OSError:  # no link, or a file system without links
        return None
    checkpoint = link.parent / name
    return checkpoint if step_of(checkpoint) is not None and checkpoint.is_dir() else None


def mark_best(checkpoint: Path) -> None:
    """Let the link `best` lead to this checkpoint, by one rename; the link is relative, so that the run can be moved.

    Raises:
        OSError: the folder cannot be written to.
    """
    temporary = checkpoint.with_name(f".{BEST}.{os.getpid()}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(checkpoint.name, target_is_directory=True)
    temporary.replace(checkpoint.with_name(BEST))
    fsync_dir(checkpoint.parent)
