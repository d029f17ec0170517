"""One run per output directory: a second one is refused, and told who has it.

Two locks of the kernel (flock), held for as long as the process lives, however it dies: on the file `.lock`, and on the directory
itself, so that removing the file lets nobody in. Where directories cannot be locked (NFS, Windows), the file's lock is the
only one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from filelock import FileLock, Timeout

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.utils.files import write_json_atomic

if TYPE_CHECKING:
    from finetrainers.parallel.strategy import Strategy

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Stays behind, which means nothing.
_LOCK = ".lock"
#: Who has the lock, for the message.
HOLDER = ".lock-holder.json"


@contextlib.contextmanager
def exclusive(
    output_dir: Path,
    parallel: Strategy,
    *,
    where: str = "--output_dir",
    holder: str = "run",
    otherwise: str = "give another one",
) -> Iterator[None]:
    """Within the block, no other run may use the directory; every rank must enter.

    Args:
        output_dir: what is locked.
        parallel: the processes.
        where: the option that an error is about.
        holder: what else may use it.
        otherwise: what to do if that does and is to stay.

    Raises:
        ConfigError: another run uses it, or it cannot be written to; on every rank.
    """
    with contextlib.ExitStack() as locks:
        problem = None
        if parallel.is_main:
            try:
                output_dir.mkdir(parents=True, exist_ok=True)
                locks.enter_context(FileLock(output_dir / _LOCK).acquire(timeout=0))
                locks.enter_context(_directory_locked(output_dir))
                locks.enter_context(_named(output_dir))
            except (Timeout, BlockingIOError):
                problem = f"{output_dir} is in use by another {holder}{_holder(output_dir)}; wait for it, stop it, or {otherwise}"
            except OSError as error:
                file = "" if error.filename in (None, str(output_dir)) else f" ({error.filename})"
                problem = f"cannot write to {output_dir}: {error.strerror or error}{file}"
        problem = parallel.same_on_all(problem)
        if problem is not None:
            raise ConfigError([Problem(where, problem)])
        yield


@contextlib.contextmanager
def unused(directory: Path) -> Iterator[None]:
    """Within the block, no run uses the directory; nothing is written into it, unlike by `exclusive`.

    Raises:
        BlockingIOError: a run, or another process, uses it.
    """
    with contextlib.ExitStack() as locks:
        if (directory / _LOCK).is_file():
            try:
                locks.enter_context(FileLock(directory / _LOCK).acquire(timeout=0))
            except Timeout as error:
                raise BlockingIOError(f"{directory} is locked") from error
        if directory.is_dir():
            locks.enter_context(_directory_locked(directory))
        yield


def in_use(output_dir: Path) -> bool:
    """Whether a run has the lock, by what it has written down; nothing is locked for the answer.

    A run of another machine counts until its file is gone: a run that is killed leaves it.
    """
    try:
        found = json.loads((output_dir / HOLDER).read_bytes())
        return found["host"] != socket.gethostname() or psutil.pid_exists(found["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def was_used(output_dir: Path) -> bool:
    """Whether a run has ever locked the directory: one that was copied without hidden files has no lock."""
    return (output_dir / _LOCK).exists()


@contextlib.contextmanager
def _directory_locked(directory: Path) -> Iterator[None]:
    """Within the block, the directory is locked, where its file system can do that.

    Raises:
        BlockingIOError: another process has locked it.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # NFS wants a file that is open for writing, other file systems have no such locks
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(output_dir: Path) -> Iterator[None]:
    """Within the block, who has the lock is written down."""
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
    write_json_atomic(output_dir / HOLDER, holder)
    try:
        yield
    finally:
        (output_dir / HOLDER).unlink(missing_ok=True)


def _holder(output_dir: Path) -> str:
    """Who has the lock, in parentheses."""
    try:
        found = json.loads((output_dir / HOLDER).read_bytes())
        return f" (process {found['pid']} on {found['host']}, started {found['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        # It has the lock and is about to write its name, or about to go; or the file is damaged.
        return ""
