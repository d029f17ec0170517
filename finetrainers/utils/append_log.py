"""An append-only log: lines in a folder that processes of many machines add to concurrently, and that survive a kill.

Each process appends to a separate file, since no network file system supports two writers of one file. Readers take the
complete lines of every file: a line that a kill has truncated counts as not written. So losing a line must be harmless.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .files import open_regular

_SUFFIX = ".log"


class AppendLog:
    """A log of lines of ASCII text."""

    def __init__(self, directory: Path, *, prefix: str = "", length: int | None = None) -> None:
        """Args:
        directory: made when the first line is added.
        prefix: of the files to read and write; the folder may have others.
        length: of every line, without its end, or None for any length; other lines count as damaged.
        """
        self.directory = directory
        self.prefix = prefix
        self.length = length
        self._read: dict[str, int] = {}  # bytes that have been read, by file
        self._writer: tuple[int, str] | None = None
        self._file: IO[bytes] | None = None
        self._stays_open = False
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the record of read lines: other processes read and write separately."""
        return {"directory": self.directory, "prefix": self.prefix, "length": self.length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        AppendLog.__init__(self, **state)

    def add(self, lines: Iterable[str]) -> None:
        """Append lines.

        Raises:
            OSError: the folder cannot be written to.
        """
        data = "".join(f"{line}\n" for line in lines).encode("ascii")
        if not data:
            return
        with self._lock:
            file = self._file or self._open()
            try:
                file.write(data)  # without a buffer, so that a kill loses none
            finally:
                if self._stays_open:
                    self._file = file
                else:  # other machines can read only closed files
                    file.close()

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep the file open within the block, for many lines: opening one takes long on network file systems."""
        self._stays_open = True
        try:
            yield
        finally:
            self._stays_open = False
            if self._file is not None:
                self._file.close()
                self._file = None

    def news(self) -> Iterator[str]:
        """Yield the lines that any process has added since the last call, file by file in the order of their names."""
        for name in self.files():
            offset = self._read.get(name, 0)
            with contextlib.suppress(FileNotFoundError):  # replaced in the meantime
                lines, self._read[name] = whole_lines(self.directory / name, offset)
                for line in lines:
                    if line.isascii() and self.length in (None, len(line)):
                        yield line.decode("ascii")

    def files(self) -> list[str]:
        """Return the names of the files, oldest first."""
        try:
            names = [entry.name for entry in os.scandir(self.directory)]
        except OSError:
            return []
        return sorted(name for name in names if name.startswith(self.prefix) and not name.startswith("."))

    def replace(self, lines: Iterable[str], files: Iterable[str] | None = None) -> None:
        """Replace `files`, by default all that have been read, by one file with these lines. It counts as the oldest.

        Lines that are added to them in the meantime are lost.
        """
        old = list(self._read if files is None else files)
        text = "".join(f"{line}\n" for line in lines)
        name = f"{self.prefix}{0:019d}-{secrets.token_hex(4)}{_SUFFIX}"
        if text:
            temporary = self.directory / f".{name}.tmp"
            temporary.write_text(text, encoding="ascii")
            temporary.replace(self.directory / name)
            self._read[name] = len(text)
        if self._writer is not None and self._writer[1] in old:
            self._writer = None
        for old_name in old:
            self._read.pop(old_name, None)
            (self.directory / old_name).unlink(missing_ok=True)

    def _open(self) -> IO[bytes]:
        # A forked process is another writer.
        if self._writer is None or self._writer[0] != os.getpid():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._writer = (os.getpid(), f"{self.prefix}{time.time_ns():019d}-{secrets.token_hex(4)}{_SUFFIX}")
        return open(self.directory / self._writer[1], "ab", buffering=0)


def whole_lines(path: Path, start: int = 0) -> tuple[list[bytes], int]:
    """Return the complete lines of a file from a byte on, and the byte after the last of them."""
    with open_regular(path) as file:
        file.seek(start)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return data[:end].split(b"\n")[:-1], start + end
