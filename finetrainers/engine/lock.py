"""One run per output directory: a second one is refused, and told who has it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.utils.files import write_json_atomic

if TYPE_CHECKING:
    from finetrainers.parallel.engine import Parallel

#: Locked by the kernel (flock) for as long as the process lives, however it dies; stays behind, which means nothing.
_LOCK = ".lock"
#: Who has the lock, for the message.
_HOLDER = ".lock-holder.json"


@contextlib.contextmanager
def exclusive(output_dir: Path, parallel: Parallel) -> Iterator[None]:
    """Within the block, no other run may use the directory; every rank must enter.

    Raises:
        ConfigError: another run uses it, or it cannot be written to; on every rank.
    """
    lock = FileLock(output_dir / _LOCK)
    problem = None
    if parallel.is_main:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            problem = f"{output_dir} is in use by {_holder(output_dir)}; wait for it, stop it, or give another one"
        except OSError as error:
            problem = f"cannot write to {output_dir}: {error.strerror or error}"
    problem = parallel.same_on_all(problem)
    if problem is not None:
        raise ConfigError([Problem("--output_dir", problem)])
    try:
        if parallel.is_main:
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
            write_json_atomic(output_dir / _HOLDER, holder)
        yield
    finally:
        if parallel.is_main:
            (output_dir / _HOLDER).unlink(missing_ok=True)
            lock.release()


def _holder(output_dir: Path) -> str:
    """The run that has the lock, in words."""
    try:
        found = json.loads((output_dir / _HOLDER).read_text(encoding="utf-8"))
    except FileNotFoundError:  # it has the lock and is about to write its name, or about to go
        return "another run"
    return f"another run (process {found['pid']} on {found['host']}, started {found['started']})"
