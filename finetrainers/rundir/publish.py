"""Publication of checkpoints: reserve a name, write the manifest, rename, prune older ones. Imports no torch.

A process may die between any two lines here: `scan_checkpoints` then still finds every published checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import fsync_dir, fsync_tree

from .best import best_checkpoint
from .find import REPLACED, scan_checkpoints
from .manifest import write_manifest

_GIB = 2**30


def staging_path(final: Path) -> Path:
    """Return the directory in which a checkpoint is written until it is complete."""
    return final.with_name(f".{final.name}.tmp")


def reserve(final: Path, *, needed: int) -> Path:
    """Make the directory in which the checkpoint `final` is written, after removing half-written ones.

    Args:
        final: path of the checkpoint to be.
        needed: bytes that it will take, approximately.

    Raises:
        OSError: the disk has less room than that; nothing was written.
    """
    root = final.parent
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint needs about {needed / _GIB:.3g} GiB and {root} has {free / _GIB:.3g} GiB free; nothing "
            "was written, earlier checkpoints are intact. Free up space (--checkpointing_limit bounds the number of "
            "checkpoints) and continue with --resume_from_checkpoint latest",
        )
    temporary = staging_path(final)
    temporary.mkdir()
    return temporary


def publish(
    temporary: Path, final: Path, *, facts: Mapping[str, Any], written: Mapping[Path, tuple[int, str]] | None = None
) -> None:
    """Flush the files, seal them with a manifest, and rename the directory; an older checkpoint of that name goes last.

    Args:
        temporary: complete but for the manifest.
        final: path of the checkpoint to be.
        facts, written: see `write_manifest`.
    """
    fsync_tree(temporary)
    fault_point("save.seal")
    write_manifest(temporary, facts=facts, written=written)
    fault_point("save.publish")
    replaced = final.with_name(f".{final.name}{REPLACED}")
    if final.exists():  # the step was reached again; until the new one exists, the old one is found by this name
        final.rename(replaced)
        fault_point("save.replace")
    temporary.rename(final)
    fsync_dir(final.parent)
    fsync_dir(final.parent.parent)
    if replaced.exists():
        _remove(replaced)


def prune(output_dir: Path, *, step: int, limit: int | None) -> list[Path]:
    """Remove all but the newest `limit` checkpoints up to `step`, and return the removed paths.

    Only complete ones count and only complete ones are removed: damaged ones stay for inspection. The one marked as the
    best also stays.
    """
    fault_point("save.prune")
    if limit is None:
        return []
    complete = [
        checkpoint
        for checkpoint in scan_checkpoints(output_dir)
        if checkpoint.damage is None and checkpoint.step <= step
    ]
    best = best_checkpoint(output_dir)
    removed = [checkpoint.path for checkpoint in complete[:-limit] if checkpoint.path != best]
    for path in removed:
        _remove(path)
    return removed


def published_size(output_dir: Path) -> int:
    """Return the bytes of the newest complete checkpoint; 0 if there is none."""
    newest_first = reversed(scan_checkpoints(output_dir))
    return next((checkpoint.size for checkpoint in newest_first if checkpoint.damage is None), 0)


@contextlib.contextmanager
def discarded_on_error(final: Path) -> Iterator[None]:
    """Remove the files written for a checkpoint if the block raises; the next attempt needs the space."""
    try:
        yield
    except Exception:
        shutil.rmtree(staging_path(final), ignore_errors=True)
        raise


def _remove(path: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that a half-removed one does not pass for a damaged one."""
    doomed = path.with_name(f".{path.name.lstrip('.')}.removed.tmp")
    path.rename(doomed)
    fault_point("save.remove")
    shutil.rmtree(doomed)


def _sweep(root: Path) -> None:
    """Undo the work of a killed process: remove temporary directories, restore a checkpoint that was being replaced."""
    for path in sorted(root.glob(".step-*.tmp")):
        shutil.rmtree(path)
    for path in sorted(root.glob(f".step-*{REPLACED}")):
        final = root / path.name.removeprefix(".").removesuffix(REPLACED)
        if final.exists():
            _remove(path)
        else:
            path.rename(final)
