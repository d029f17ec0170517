"""A directory of media unpacked from containers, named by their content.

All later stages see plain files. The samples of a container are recorded in a journal, one line each, so that it is
unpacked once, and an interrupted unpacking resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock
from pydantic import TypeAdapter

from finetrainers.utils.append_log import whole_lines
from finetrainers.utils.files import file_sha256, sweep_unfinished, unfinished_path, write_text_atomic
from finetrainers.utils.reading import read_text
from finetrainers.utils.text import file_size

from ..status import InvalidSample
from .rows import DataError, Findings, OversizedError, Row

_CHUNK = 1 << 20
_ROW = TypeAdapter(Row)
#: Free space that is left on the disk: the minimum and maximum in bytes, and the share of the disk. Full disks break
#: other programs that write there.
_MIN_RESERVE, _MAX_RESERVE, _RESERVED_SHARE = 256 << 20, 4 << 30, 0.02

#: Ending of the name of a file's own digest.
SEAL = ".sha256"
#: The last line of a complete journal.
_COMPLETE = b'{"complete": true}'


class MediaFolder:
    """Unpacked media; several processes and runs may share one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: Files that the current container has added.
        self._added: list[Path] = []

    def rows(
        self,
        key: str,
        samples: Callable[[int], Iterator[Row]],
        *,
        limit: int | None,
        findings: Findings,
    ) -> list[Row]:
        """Return rows of a container, which is only opened for samples that the journal does not have.

        Args:
            key: names the container and its state, and how it is read.
            samples: returns its samples after the first `skip`.
            limit: the number of samples to take, or None for all.
            findings: collects warnings about samples that are refused.

        Raises:
            OversizedError: by `samples`; what was unpacked is removed.
        """
        journal = self.directory / "journals" / f"{hashlib.sha256(key.encode()).hexdigest()}.jsonl"
        journal.parent.mkdir(parents=True, exist_ok=True)
        # Every process of a run plans its data: one unpacks, the others wait for it and read its journal.
        with FileLock(f"{journal}.lock"):
            sweep_unfinished(self.directory)
            journaled, complete = self._read(journal)
            self._added.clear()
            if not complete and (limit is None or len(journaled) < limit):
                with open(journal, "a", encoding="utf-8") as file, self._removing_added(journal):
                    for sample in samples(len(journaled)):
                        file.write(_format_line(sample))
                        file.flush()
                        journaled.append(sample)
                        if len(journaled) == limit:
                            break
                    else:
                        file.write(f"{_COMPLETE.decode()}\n")
        rows = []
        for sample in journaled[:limit]:
            if sample.refused is not None:
                reason = sample.refused.partition(" (")[0]  # details in brackets may differ with every sample
                findings.note(f"left out, since {reason}", sample.where)
                rows.append(Row("", sample.where, unusable=InvalidSample("skipped", sample.refused)))
            else:
                rows.append(sample._replace(stored=sample.stored and self.directory / sample.stored))
        return rows

    @contextmanager
    def _removing_added(self, journal: Path) -> Iterator[None]:
        """Remove the files of a container, and its samples in the journal, if it is refused within the block."""
        try:
            yield
        except OversizedError:
            os.truncate(journal, 0)
            for path in self._added:
                path.unlink(missing_ok=True)
            raise

    def store(self, source: IO[bytes], *, suffix: str, size: int = 0) -> tuple[Path, int]:
        """Copy a stream into the directory; return the file's path in it, which is based on its content, and its size.

        Args:
            source: read once, in pieces.
            suffix: of the name.
            size: in bytes, if known, to check the free disk space.

        Raises:
            DataError: there is not enough free disk space.
        """
        self._check_free_space(size)
        digest = hashlib.sha256()
        temporary = unfinished_path(self.directory / "media")
        written = 0
        try:
            with open(temporary, "wb") as file:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    written += file.write(chunk)
                    if written > size:  # the size was not known
                        self._check_free_space(0)
            hexdigest = digest.hexdigest()
            name = Path(hexdigest[:2], f"{hexdigest}{suffix.lower()}")
            target = self.directory / name
            target.parent.mkdir(exist_ok=True)
            self._added += [] if target.exists() else [target]
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return name, written

    def store_as(self, digest: str, write: Callable[[Path], None], *, suffix: str, size: int) -> Path:
        """Return the path in the directory of a file that is named by this digest.

        It is written if it does not exist, or is not as it was written: a file beside it contains its own digest.

        Args:
            digest: of what the file holds.
            write: writes it to a path.
            suffix: of the name.
            size: in bytes, at most, to check the free disk space.

        Raises:
            DataError: there is not enough free disk space.
        """
        name = Path(digest[:2], f"{digest}{suffix}")
        target = self.directory / name
        seal = target.with_name(f"{target.name}{SEAL}")
        if not _is_sealed(target, seal):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._check_free_space(size)
            temporary = unfinished_path(self.directory / "media")
            try:
                write(temporary)
                sha256 = file_sha256(temporary)
                temporary.replace(target)
                write_text_atomic(seal, sha256)
            finally:
                temporary.unlink(missing_ok=True)
        return name

    def _check_free_space(self, size: int) -> None:
        disk = shutil.disk_usage(self.directory)
        reserve = max(_MIN_RESERVE, min(int(disk.total * _RESERVED_SHARE), _MAX_RESERVE))
        if disk.free < size + reserve:
            raise DataError(
                f"not enough disk space to unpack media into {self.directory}: {file_size(disk.free)} is free, the "
                f"next file needs {file_size(size)}, and {file_size(reserve)} stays reserved; free up space, or set "
                "another --precompute_dir",
                kind="too_large",
            )

    def _read(self, journal: Path) -> tuple[list[Row], bool]:
        """Return the samples of the journal, up to a missing file or damaged line, and whether they are complete."""
        rows: list[Row] = []
        complete, size = False, 0
        try:
            lines, _ = whole_lines(journal)
        except FileNotFoundError:
            return [], False
        for line in lines:
            if complete := line == _COMPLETE:
                break
            try:
                row = _ROW.validate_json(line)
            except ValueError:
                break
            if row.stored is not None and not _is_complete(self.directory / row.stored, row.size):
                break
            rows.append(row)
            size += len(line) + 1
        if not complete:
            os.truncate(journal, size)
        return rows, complete


def _format_line(sample: Row) -> str:
    """Return a line of the journal."""
    changed_fields = {name: value for name, value in sample._asdict().items() if value != Row._field_defaults.get(name)}
    return json.dumps(changed_fields, default=str) + "\n"


def _is_sealed(path: Path, seal: Path) -> bool:
    """Return whether a file has the digest that the other one contains."""
    try:
        return has_digest(path, read_text(seal))
    except OSError:
        return False


def has_digest(path: Path, digest: str) -> bool:
    """Return whether there is a file whose SHA-256 begins with a digest."""
    try:
        return bool(digest) and path.is_file() and file_sha256(path).startswith(digest)
    except OSError:
        return False


def _is_complete(path: Path, size: int | None) -> bool:
    try:
        state = path.stat()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False
    return stat.S_ISREG(state.st_mode) and size in (None, state.st_size)
