"""From a half-written directory to a checkpoint: reserve a name, seal what was written, rename it, prune older ones.

A process may die between any two lines here: `scan_checkpoints` then still finds every checkpoint that was published.
Imports no torch.
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


def temporary_of(final: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return final.with_name(f".{final.name}.tmp")


def reserve(final: Path, *, needed: int) -> Path:
    """Make the directory in which the checkpoint `final` is written; what earlier processes left half-done goes first.

    Args:
        final: path of the checkpoint to be.
        needed: bytes that it will take, about.

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
            f"a checkpoint needs about {needed / _GIB:.3g} GiB and {root} has {free / _GIB:.3g} GiB free; nothing was "
            "written, earlier checkpoints are intact. Make room (--checkpointing_limit bounds how many are kept) and "
            "continue with --resume_from_checkpoint latest",
        )
    temporary = temporary_of(final)
    temporary.mkdir()
    return temporary


def publish(
    temporary: Path, final: Path, *, facts: Mapping[str, Any], written: Mapping[Path, tuple[int, str]] | None = None
) -> None:
    """Flush what was written, seal it with a manifest, and give it its name; one of that name goes afterwards.

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
    if final.exists():  # the step was reached again; until the new one is there, the old one is found by this name
        final.rename(replaced)
        fault_point("save.replace")
    temporary.rename(final)
    fsync_dir(final.parent)
    fsync_dir(final.parent.parent)
    if replaced.exists():
        _remove(replaced)


def prune(output_dir: Path, *, step: int, limit: int | None) -> list[Path]:
    """Remove all but the newest `limit` checkpoints up to `step`; what was removed.

    Only whole ones count and only whole ones are removed: damaged ones stay until somebody looks at them. The one that is
    marked as the best stays, too.
    """
    fault_point("save.prune")
    if limit is None:
        return []
    whole = [found for found in scan_checkpoints(output_dir) if found.damage is None and found.step <= step]
    best = best_checkpoint(output_dir)
    gone = [found.path for found in whole[:-limit] if found.path != best]
    for path in gone:
        _remove(path)
    return gone


def published_size(output_dir: Path) -> int:
    """Bytes of the newest whole checkpoint; 0 if there is none."""
    whole = [found for found in scan_checkpoints(output_dir) if found.damage is None]
    return whole[-1].size if whole else 0


@contextlib.contextmanager
def discarded_on_error(final: Path) -> Iterator[None]:
    """An error within the block removes what was written for the checkpoint; the next try needs the room."""
    try:
        yield
    except Exception:
        shutil.rmtree(temporary_of(final), ignore_errors=True)
        raise


def _remove(path: Path) -> None:
    """Remove a checkpoint; one that is half removed must not pass for a damaged one, so it loses its name first."""
    doomed = path.with_name(f".{path.name.lstrip('.')}.removed.tmp")
    path.rename(doomed)
    fault_point("save.remove")
    shutil.rmtree(doomed)


def _sweep(root: Path) -> None:
    """Undo what a killed process left: temporary directories go, a checkpoint that was being replaced comes back."""
    for path in sorted(root.glob(".step-*.tmp")):
        shutil.rmtree(path)
    for path in sorted(root.glob(f".step-*{REPLACED}")):
        final = root / path.name.removeprefix(".").removesuffix(REPLACED)
        if final.exists():
            _remove(path)
        else:
            path.rename(final)
