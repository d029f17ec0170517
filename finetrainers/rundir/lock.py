"""One run per output directory: a second one is refused, and its error names the holder.

The kernel holds two locks (flock) for as long as the process lives, however it dies: on the file `.lock`, and on the
directory itself, so that removing the file lets no other run in. Where directories cannot be locked (NFS, Windows), the
file's lock is the only one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from filelock import FileLock, Timeout

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.utils.failures import Kind
from finetrainers.utils.files import write_json_atomic
from finetrainers.utils.reading import read_json_object

if TYPE_CHECKING:
    from finetrainers.parallel.strategy import Strategy

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: The file stays after the run; its presence alone means nothing.
_LOCK = ".lock"
#: The lock's holder, for the message.
HOLDER = ".lock-holder.json"


@contextlib.contextmanager
def exclusive(
    output_dir: Path,
    parallel: Strategy,
    *,
    where: str = "--output_dir",
    holder: str = "run",
    otherwise: str = "use another directory",
) -> Iterator[None]:
    """Keep all other runs out of the directory within the block; every rank must enter.

    Args:
        output_dir: the directory to lock.
        parallel: the processes.
        where: the option that an error names.
        holder: kind of program that may hold the lock.
        otherwise: remedy if that program is to keep running.

    Raises:
        ConfigError: another run uses it, or it cannot be written to; on every rank.
    """
    with contextlib.ExitStack() as locks:
        problem: tuple[str, Kind] | None = None
        if parallel.is_main:
            try:
                output_dir.mkdir(parents=True, exist_ok=True)
                locks.enter_context(FileLock(output_dir / _LOCK).acquire(timeout=0))
                locks.enter_context(_lock_directory(output_dir))
                started = time.strftime("%Y-%m-%d %H:%M:%S")
                record = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
                write_json_atomic(output_dir / HOLDER, record)
                locks.callback((output_dir / HOLDER).unlink, missing_ok=True)
            except (Timeout, BlockingIOError):
                conflict = f"{output_dir} is in use by another {holder}{_describe_holder(output_dir)}"
                problem = f"{conflict}; wait for it, stop it, or {otherwise}", "occupied"
            except OSError as error:
                file = "" if error.filename in (None, str(output_dir)) else f" ({error.filename})"
                problem = f"cannot write to {output_dir}: {error.strerror or error}{file}", "unavailable"
        problem = parallel.broadcast_object(problem)
        if problem is not None:
            raise ConfigError([Problem(where, *problem)])
        yield


@contextlib.contextmanager
def keep_unused(directory: Path) -> Iterator[None]:
    """Keep all runs out of the directory within the block; unlike `exclusive`, this writes nothing into it.

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
            locks.enter_context(_lock_directory(directory))
        yield


def in_use(output_dir: Path) -> bool:
    """Return whether a run holds the lock, by the holder's file; nothing is locked for the answer.

    A run of another machine counts until its file is gone: a killed run leaves it.
    """
    try:
        holder = read_json_object(output_dir / HOLDER)
        return holder["host"] != socket.gethostname() or psutil.pid_exists(holder["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def was_used(output_dir: Path) -> bool:
    """Return whether a run has ever locked the directory: a copy without hidden files has no lock."""
    return (output_dir / _LOCK).exists()


@contextlib.contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """Lock the directory within the block, if its file system supports that.

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
            pass  # NFS requires a file that is open for writing, other file systems have no such locks
        yield
    finally:
        os.close(descriptor)


def _describe_holder(output_dir: Path) -> str:
    """Return a description of the lock's holder in parentheses, or an empty string if it is unknown."""
    try:
        holder = read_json_object(output_dir / HOLDER)
        return f" (process {holder['pid']} on {holder['host']}, started {holder['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        # The holder is about to write the file, or about to end; or the file is damaged.
        return ""
