"""A folder of media that came in other containers, named by their content.

Everything after it sees plain files. What a container gave is kept in a journal, one line for each sample, so that it
is unpacked once, and an interrupted unpacking resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from filelock import FileLock
from pydantic import TypeAdapter

from finetrainers.utils.append_log import whole_lines
from finetrainers.utils.text import file_size

from ..status import Unusable
from .rows import DataError, Findings, Row

_CHUNK = 1 << 20
_ROW = TypeAdapter(Row)
#: What a disk is to have left, at least, and as a share of large ones: full disks break whatever else writes there.
_RESERVE, _MOST_RESERVE, _RESERVED_SHARE = 256 << 20, 4 << 30, 0.02

#: The last line of a journal that has all of its container.
_COMPLETE = b'{"complete": true}'


class MediaFolder:
    """Unpacked media; several processes and runs may share one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def rows(
        self,
        key: str,
        samples: Callable[[int], Iterator[Row]],
        *,
        limit: int | None,
        found: Findings,
    ) -> list[Row]:
        """Rows of a container, which is only opened for samples that the journal does not have.

        Args:
            key: names the container and its state, and how it is read.
            samples: gives its samples after the first so many.
            limit: samples to take; None: all.
            found: collects warnings of samples that are refused.
        """
        journal = self.directory / "journals" / f"{hashlib.sha256(key.encode()).hexdigest()}.jsonl"
        journal.parent.mkdir(parents=True, exist_ok=True)
        # Every process of a run plans its data: one unpacks, the others wait for it and read its journal.
        with FileLock(f"{journal}.lock"):
            known, complete = self._read(journal)
            if not complete and (limit is None or len(known) < limit):
                with open(journal, "a", encoding="utf-8") as file:
                    for sample in samples(len(known)):
                        file.write(_line(sample))
                        file.flush()
                        known.append(sample)
                        if len(known) == limit:
                            break
                    else:
                        file.write(f"{_COMPLETE.decode()}\n")
        rows = []
        for sample in known[:limit]:
            if sample.refused is not None:
                kind = sample.refused.partition(" (")[0]  # what stands in brackets may differ with every sample
                found.note(f"left out, since {kind}", sample.where)
                rows.append(Row("", sample.where, unusable=Unusable("skipped", sample.refused)))
            else:
                rows.append(sample._replace(stored=sample.stored and self.directory / sample.stored))
        return rows

    def store(self, source: IO[bytes], *, suffix: str, size: int = 0) -> tuple[Path, int]:
        """Copy a stream into the folder; the path of the file in it, which follows from its content, and its size.

        Args:
            source: read once, in pieces.
            suffix: of the name.
            size: in bytes, as far as it is known, for asking whether there is room.

        Raises:
            DataError: there is no room.
        """
        self._need(size)
        digest = hashlib.sha256()
        temporary = self.directory / f".{socket.gethostname()}.{os.getpid()}.tmp"
        written = 0
        try:
            with open(temporary, "wb") as file:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    written += file.write(chunk)
                    if written > size:  # it was not known
                        self._need(0)
            hexdigest = digest.hexdigest()
            name = Path(hexdigest[:2], f"{hexdigest}{suffix.lower()}")
            target = self.directory / name
            target.parent.mkdir(exist_ok=True)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return name, written

    def _need(self, size: int) -> None:
        disk = shutil.disk_usage(self.directory)
        reserve = max(_RESERVE, min(int(disk.total * _RESERVED_SHARE), _MOST_RESERVE))
        if disk.free < size + reserve:
            raise DataError(
                f"no room to unpack media into {self.directory}: {file_size(disk.free)} are free, the next file needs "
                f"{file_size(size)}, and {file_size(reserve)} stay free for others; make room, or give another --precompute_dir"
            )

    def _read(self, journal: Path) -> tuple[list[Row], bool]:
        """The samples of the journal, up to a missing file or damaged line, and whether they are complete."""
        known: list[Row] = []
        complete, size = False, 0
        try:
            lines, _ = whole_lines(journal)
        except FileNotFoundError:
            return [], False
        for line in lines:
            if complete := line == _COMPLETE:
                break
            try:
                sample = _ROW.validate_json(line)
            except ValueError:
                break
            if sample.stored is not None and not _is_whole(self.directory / sample.stored, sample.size):
                break
            known.append(sample)
            size += len(line) + 1
        if not complete:
            os.truncate(journal, size)
        return known, complete


def _line(sample: Row) -> str:
    """A line of the journal."""
    given = {name: value for name, value in sample._asdict().items() if value != Row._field_defaults.get(name)}
    return json.dumps(given, default=str) + "\n"


def _is_whole(path: Path, size: int | None) -> bool:
    try:
        state = path.stat()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False
    return stat.S_ISREG(state.st_mode) and size in (None, state.st_size)
