"""Atomic file writes (a crash leaves the old content or the new one), JSON lines, and checks before opening."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from .alive import send_heartbeat
from .text import quoted

_CHUNK = 1 << 20
_DAY_S = 86400.0
#: Numbers of paths, since threads of a process may write files of one name.
_numbers = count()
#: Names of earlier versions have no group and no last number, some end in `unfinished`, and those of encoded prompts
#: have no process.
_UNFINISHED = re.compile(
    r"\.(?P<name>.+)\.((?P<group>[0-9a-f]{6})-)?(?P<pid>[0-9]{1,9})(-[0-9]+)?\.(?P<kind>tmp|replaced|unfinished)(\.\w+)?"
    r"|\..+\.pt\.unfinished"
)
_readable = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode


def unfinished_path(path: Path, kind: str = "tmp") -> Path:
    """Return a new path under which this process writes what will be `path`, or, as `replaced`, keeps what it was."""
    return path.with_name(f".{path.name}.{_process_group()}-{os.getpid()}-{next(_numbers)}.{kind}")


def sweep_unfinished(folder: Path) -> None:
    """Remove what killed processes have left at paths of `unfinished_path` in a folder, and restore what was replaced.

    Processes of other machines cannot be asked for: what they left must be older than a day, and so must names of
    earlier versions.
    """
    for path in sorted(folder.glob(".*.*")) if folder.is_dir() else []:
        match = _UNFINISHED.fullmatch(path.name)
        with contextlib.suppress(OSError):  # another process sweeps too, or the folder is read-only
            if match is None or _is_written(path.lstat().st_mtime, match["group"], int(match["pid"] or 0)):
                continue
            if match["kind"] == "replaced" and not (final := folder / match["name"]).exists():
                path.rename(final)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_written(modified: float, group: str | None, pid: int) -> bool:
    if group != _process_group():
        return time.time() - modified < _DAY_S
    import psutil  # commands that write nothing start without it

    try:  # another process may have got the number since; clocks of file servers differ
        return psutil.Process(pid).create_time() < modified + 60
    except psutil.Error:
        return False


@lru_cache(maxsize=1)
def _process_group() -> str:
    """Return six hexadecimal digits of the machine, or container, in which numbers of processes are unique."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:6]


def write_text_atomic(path: Path, text: str | Iterable[str], *, errors: str = "strict") -> None:
    """Write `text`, or its parts, under a temporary name, flush it to disk, and rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = unfinished_path(path)
    try:
        with open(temporary, "w", encoding="utf-8", errors=errors) as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # a full disk
        temporary.unlink(missing_ok=True)
        raise


def write_json_atomic(path: Path, value: Any) -> None:
    """Write indented JSON by `write_text_atomic`."""
    write_text_atomic(path, json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


def write_json_lines_atomic(path: Path, values: Iterable[Any]) -> None:
    """Write JSON lines with readable text by `write_text_atomic`.

    File names that are not UTF-8 are written as escapes.
    """
    write_text_atomic(path, (f"{_readable(value)}\n" for value in values), errors="backslashreplace")


def append_jsonl(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line by one write; a truncated line before it stays a separate line.

    The file is opened each time: it may have been moved away, and other machines can read only closed files. Making
    Python's own file object would take several times as long as writing the line.

    Raises:
        OSError: it cannot be written completely.
    """
    line = json.dumps(record).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        if os.lseek(descriptor, 0, os.SEEK_END):
            os.lseek(descriptor, -1, os.SEEK_END)
            if os.read(descriptor, 1) != b"\n":
                line = b"\n" + line
        if os.write(descriptor, line) != len(line):  # the next write would raise the reason
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Flush every file and folder below `root` to disk."""
    for path in sorted(root.rglob("*")):
        if path.is_dir():
            fsync_dir(path)
        else:
            fsync_file(path)
    fsync_dir(root)


def fsync_file(path: Path) -> None:
    """Flush a file to disk."""
    with open(path, "r+b" if os.name == "nt" else "rb") as file:  # Windows flushes only files open for writing
        os.fsync(file.fileno())


def fsync_dir(path: Path) -> None:
    """Flush a directory's entries (names of files in it) to disk.

    Windows does not open directories, and flushes their entries itself.
    """
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. A pipe would wait for a writer, and a device may never end.

    Raises:
        OSError: it is something else, or cannot be opened.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # it has no effect on regular files
        if (problem := not_a_file(os.fstat(descriptor).st_mode)) is not None:
            os.close(descriptor)
            raise OSError(errno.EINVAL, problem, name)
        return descriptor

    return open(path, "rb", opener=opener)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file's content, in hexadecimal.

    Raises:
        OSError: it cannot be read; the error names it.
    """
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                send_heartbeat()
    except OSError as error:  # an error of a disk while it is read has no file name
        raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.hexdigest()


def missing_path_problem(path: Path, *, folder: bool = False) -> str:
    """Return why there is no file (or folder) at a path: its type, or where the path ends, and the nearest name.

    It is a clause for a message that begins with the option and the path.
    """
    if not folder and path.exists():
        return not_a_file(path.stat().st_mode) or "cannot be read"
    if folder and path.exists():
        return f"is a file, not a directory; use the directory that contains it, {quoted(str(path.parent))}"
    if os.sep == "/" and re.match(r"[A-Za-z]:[\\/]", text := str(path)):
        wsl_path = f"/mnt/{text[0].lower()}/" + text[3:].replace("\\", "/")
        return f"is a Windows path, and this is another system; in WSL it is {quoted(wsl_path)}"
    absolute = path.absolute()
    base = next(parent for parent in absolute.parents if parent.is_dir())
    name = absolute.relative_to(base).parts[0]
    try:
        names = [entry.name for entry in os.scandir(base) if entry.is_dir() or (not folder and base == absolute.parent)]
    except OSError:
        names = []
    close = get_close_matches(name, names, n=1)
    suggestion = (
        f"; did you mean {quoted(str(path.parents[len(absolute.relative_to(base).parts) - 1] / close[0]))}?"
        if close
        else ""
    )
    place = f"the working directory {quoted(str(Path.cwd()))}" if base == Path.cwd() else quoted(str(base))
    return f"does not exist: there is no {quoted(name)} in {place}{suggestion}"


def names_existing(path: Path | str, *, folder: bool = False) -> bool:
    """Return whether a path from a record or a header names a file (or folder); false where no file can be."""
    return os.path.isdir(path) if folder else os.path.isfile(path)  # noqa: PTH112, PTH113 - pathlib's raise OSError


def folder_problem(folder: Path) -> str | None:
    """Return why a folder cannot be made or written to, or None if it can, as far as known.

    A directory is made in it and removed, since permissions do not show what else refuses: /proc, a quota, a server.
    """
    paths = (folder, *folder.absolute().parents)
    existing = next((path for path in paths if path.is_symlink() or path.exists()), Path(os.sep))
    if not existing.exists():
        return f"{existing} is a link to a missing directory; remove it"
    if not existing.is_dir():
        return f"{existing} is a file; use a directory"
    try:
        Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=existing)).rmdir()
    except FileNotFoundError:
        return f"nothing can be created in {existing}; use another directory"
    except OSError as error:
        return f"cannot write to {existing}: {error.strerror or error}"
    return None


_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def not_a_file(mode: int) -> str | None:
    """Return why a file of this mode (`st_mode`) must not be opened, or None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return f"is not a regular file but {_KINDS.get(stat.S_IFMT(mode), 'something else')}"
