"""The identity of a run: an id drawn once, at the first start, and kept in its directory and in its checkpoints.

It distinguishes the run in a directory from a run that has replaced it, and a copy from a separate run. It is
not part of the configuration: people copy `config.toml` to start another run. Imports no torch.
"""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.utils.files import write_json_atomic
from finetrainers.utils.reading import read_json_object

from .find import checkpoints_dir, step_of
from .manifest import read_manifest

IDENTITY = "run.json"
#: Key of a checkpoint's manifest.
RUN = "run"
_ID = re.compile(r"[0-9a-f]{32}")
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Identity:
    """The identity of a run directory.

    Attributes:
        run: the id of the run.
        is_copy: whether `finetrainers sync` made the directory as a copy.
    """

    run: str
    is_copy: bool = False

    def write(self, path: Path) -> None:
        """Write the file of a run directory, or one that names the run whose results a directory holds."""
        created = time.strftime("%Y-%m-%d %H:%M:%S")
        write_json_atomic(path, {"run": self.run, "copy": self.is_copy, "written": created})


def read_identity(root: Path) -> Identity | None:
    """Return the identity of a run directory, or None if it has none.

    A directory whose file is missing or damaged has that of its newest checkpoint.
    """
    identity = read_identity_file(root / IDENTITY)
    return identity or next((Identity(run) for run in map(run_of, _list_newest_first(root)) if run is not None), None)


def take_identity(root: Path, *, is_new: bool = False) -> str:
    """Return the id of the run that starts in a directory; it is drawn and written if the directory has none.

    A copy that is trained becomes a separate run, so that nothing is synchronized into it any longer. So does a run
    that replaces another one (`is_new`), so that it is not synchronized over the other's copy.
    """
    identity = read_identity(root)
    if identity is None or identity.is_copy or is_new:
        identity = Identity(uuid.uuid4().hex)
    if read_identity_file(root / IDENTITY) != identity:
        identity.write(root / IDENTITY)
    return identity.run


def are_different(first: Identity | None, second: Identity | None) -> bool:
    """Return whether two identities are known and belong to different runs."""
    return first is not None and second is not None and first.run != second.run


def run_of(checkpoint: Path) -> str | None:
    """Return the id of the run that saved a checkpoint, or None if its manifest has none or cannot be read."""
    try:
        return _valid_id(read_manifest(checkpoint).get(RUN))
    except (OSError, ValueError):
        return None


def _list_newest_first(root: Path) -> list[Path]:
    checkpoints = [(step, path) for path in checkpoints_dir(root).glob("*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(checkpoints, reverse=True)]


def read_identity_file(path: Path) -> Identity | None:
    """Return the identity that `Identity.write` wrote, or None if there is none."""
    try:
        record = read_json_object(path, limit=_MAX_BYTES)
    except ValueError:
        return None
    run = _valid_id(record.get("run"))
    return None if run is None else Identity(run, record.get("copy") is True)


def _valid_id(value: Any) -> str | None:
    return value if isinstance(value, str) and _ID.fullmatch(value) else None
