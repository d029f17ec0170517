"""The identity of a run: an id that is drawn once, at the first start, and kept in its directory and in its checkpoints.

It tells the run in a directory from another one that has taken its place, and a copy from a run of its own. It is no part
of the configuration: people copy `config.toml` to start another run. Imports no torch.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.utils.files import open_regular, write_json_atomic

from .find import checkpoints_dir, step_of
from .manifest import read_manifest

IDENTITY = "run.json"
#: Key of a checkpoint's manifest.
RUN = "run"
_ID = re.compile(r"[0-9a-f]{32}")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Identity:
    """The identity of a run directory.

    Attributes:
        run: the id of the run.
        is_copy: whether the directory is a copy that `finetrainers sync` has made.
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
    found = read_identity_file(root / IDENTITY)
    return found or next((Identity(run) for run in map(run_of, _newest_first(root)) if run is not None), None)


def take_identity(root: Path) -> str:
    """Return the id of the run that starts in a directory, which is drawn and written if the directory has none.

    A copy that is trained is another run from then on, so that nothing is synchronized into it any more.
    """
    found = read_identity(root)
    if found is None or found.is_copy:
        found = Identity(uuid.uuid4().hex)
    if read_identity_file(root / IDENTITY) != found:
        found.write(root / IDENTITY)
    return found.run


def are_different(one: Identity | None, other: Identity | None) -> bool:
    """Return whether two identities are of different runs; of a run without one that is not known."""
    return one is not None and other is not None and one.run != other.run


def run_of(checkpoint: Path) -> str | None:
    """Return the id of the run that has saved a checkpoint, or None if its manifest has none or cannot be read."""
    try:
        return _checked(read_manifest(checkpoint).get(RUN))
    except (OSError, ValueError):
        return None


def _newest_first(root: Path) -> list[Path]:
    try:
        found = [(step, path) for path in checkpoints_dir(root).iterdir() if (step := step_of(path)) is not None]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def read_identity_file(path: Path) -> Identity | None:
    """Return what `Identity.write` has written, or None if that is not there."""
    try:
        with open_regular(path) as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    run = _checked(found.get("run")) if isinstance(found, dict) else None
    return None if run is None else Identity(run, found.get("copy") is True)


def _checked(value: Any) -> str | None:
    return value if isinstance(value, str) and _ID.fullmatch(value) else None
