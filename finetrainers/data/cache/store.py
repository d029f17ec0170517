"""A content-addressed store of tensors: stale entries cannot be read.

A key is a hash of everything that determines the value. Entries are safetensors files with a checksum, since
safetensors itself does not notice a flipped bit; they are written under another name and renamed, so that several ranks
or runs may share one folder.

The keys are also listed in an index. A start reads this append-only log instead of asking the file system for each of a
hundred thousand files. The index only ever saves work: an entry that is not listed (its writer was killed before the
line was written) is searched for on disk, a wrong line is detected when the entry is read, and the entry is then marked
as doubtful, which sends the next start to the disk. A start reads the first entries, up to a limit of bytes: training
reads them soon, and a damaged one can still be computed again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import struct
import time
import uuid
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from finetrainers.utils.append_log import AppendLog
from finetrainers.utils.failures import ExpectedError, FileError
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import open_regular
from finetrainers.utils.headers import open_tensors
from finetrainers.utils.reading import parse_json_object

try:
    import fcntl
except ImportError:  # Windows: as on file systems without locks
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
_CHECKSUM = "crc32"
_HEX = 64
_COMPLETE, _DOUBTED = "+", "-"
#: Bytes of entries that a start reads and verifies: a second of a local disk, and all entries of a few hundred clips.
VERIFIED_BYTES = 1 << 30
_LOCK = ".lock"
#: A file's modification time is that of its last use, to a day: recording each use would cost a write for each read.
_USE_INTERVAL_S = 86400.0
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
#: Errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


class CacheError(ExpectedError, RuntimeError):
    """A missing or damaged cache entry that training needs."""


class CacheInUse(ExpectedError, RuntimeError):
    """An attempt to remove entries while a run may need them."""


class TensorCache:
    """Named groups of tensors in a folder."""

    def __init__(self, directory: Path, *, verified_bytes: int = VERIFIED_BYTES) -> None:
        """Args:
        directory: the folder.
        verified_bytes: the size of the entries that `missing` reads.
        """
        self.directory = directory
        self._bytes_to_verify = verified_bytes
        self._verified: set[bytes] = set()  # keys
        self._index = AppendLog(directory / "index", length=1 + _HEX)
        self._complete: set[bytes] = set()  # keys
        self._doubted: set[bytes] = set()  # keys
        self._directories: set[Path] = set()  # that exist
        self._lock: weakref.finalize | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the keys, which a process that only reads entries does not need."""
        return {"directory": self.directory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TensorCache.__init__(self, state["directory"])

    @staticmethod
    def key(**parts: object) -> str:
        """Return the hex digest of `parts`, which must be JSON values (tuples count as lists)."""
        return sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    def path(self, key: str) -> Path:
        """Return the path of the entry; folders fan out, since one folder of a million files is slow everywhere."""
        return self.directory / key[:2] / f"{key}{SUFFIX}"

    def put(self, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> int:
        """Store an entry, replacing an earlier one, and return its size in bytes.

        Args:
            key: its name.
            tensors: its content.
            about: a description for users, stored in its header.
        """
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        # The checksum covers the tensors' bytes, so it is known only once they are laid out.
        payload = _payload(safetensors.torch.save(contiguous))
        metadata = {**(about or {}), _CHECKSUM: str(zlib.crc32(payload))}
        data = safetensors.torch.save(contiguous, metadata=metadata)
        with self._writing(f"the cache entry {self.path(key)} is missing and cannot be written"):
            self._write(self.path(key), data)
        self._complete.add(bytes.fromhex(key))
        self._note([_COMPLETE + key])
        return len(data)

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Return the entry, on the CPU, or None if it is missing or damaged; a damaged one is removed and logged."""
        try:
            return read_entry(self.path(key))
        except FileNotFoundError:
            self._doubt(key)
        except ValueError as error:
            self._remove_damaged(key, error)
        return None

    def peek(self, key: str, name: str) -> Tensor | None:
        """Return one tensor of an entry, or None as `get` does.

        The others are not read, so the checksum is not verified.
        """
        try:
            with open_tensors(self.path(key)) as file:
                return file.get_tensor(name).clone()  # otherwise the file would stay mapped
        except FileNotFoundError:
            self._doubt(key)
        except (SafetensorError, FileError) as error:
            self._remove_damaged(key, error)
        return None

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys without a complete entry, each once. Damaged entries are removed and logged.

        The first entries are read, up to the limit of bytes; reading the whole cache at every start would take long,
        and `get` checks the others. The headers of entries that are not in the index are read; missing ones cost one
        listing of each directory.
        """
        self._refresh()
        unknown: dict[str, list[str]] = defaultdict(list)
        order = list(dict.fromkeys(keys))
        for key in order:
            if bytes.fromhex(key) not in self._complete:
                unknown[key[:2]].append(key)
        complete: list[str] = []
        for folder, folder_keys in unknown.items():
            with contextlib.suppress(FileNotFoundError):
                names = {entry.name for entry in os.scandir(self.directory / folder)}
                complete += [key for key in folder_keys if self.path(key).name in names and self._opens(key)]
        self._complete.update(map(bytes.fromhex, complete))
        # A line cannot take back a doubt, since there is no order between writers.
        self._note(_COMPLETE + key for key in complete if bytes.fromhex(key) not in self._doubted)
        for key in order:
            self._verify(key)
        return [key for key in order if bytes.fromhex(key) not in self._complete]

    def hold(self) -> None:
        """Hold a shared lock as long as this object lives; wait while entries are being removed."""
        if self._lock is not None or fcntl is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno in _READ_ONLY:  # entries cannot be removed either
                return
            raise
        self._lock = weakref.finalize(self, os.close, descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting until entries of %s are removed", self.directory)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def release(self) -> None:
        """Release the shared lock."""
        if self._lock is not None:
            self._lock()
            self._lock = None

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Hold an exclusive lock within the block; yield False on file systems without locks.

        Raises:
            CacheInUse: a run uses the cache.
            CacheError: nothing can be removed.
        """
        if fcntl is None:
            yield False
            return
        with self._writing("entries of the cache cannot be removed"), open(self.directory / _LOCK, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CacheInUse(f"a run uses {self.directory}; wait for it, or stop it") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                yield False
                return
            yield True

    def indexed(self) -> set[str]:
        """Return the keys of the entries that should exist."""
        self._refresh()
        return {raw.hex() for raw in self._complete}

    def rewrite_index(self, keys: Iterable[str]) -> None:
        """Rewrite the index as one file with these keys; only within `exclusive`."""
        self._refresh()
        listed = sorted(keys)
        self._index.replace(_COMPLETE + key for key in listed)
        self._complete, self._doubted = set(map(bytes.fromhex, listed)), set()

    def _note(self, lines: Iterable[str]) -> None:
        """Add lines to the index, unless the cache cannot be written to."""
        try:
            self._index.add(lines)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise

    def _refresh(self) -> None:
        for line in self._index.news():
            try:
                (self._complete if line[0] == _COMPLETE else self._doubted).add(bytes.fromhex(line[1:]))
            except ValueError:  # two lines cut and joined by a disk that was full
                continue
        self._complete -= self._doubted

    def _doubt(self, key: str) -> None:
        raw = bytes.fromhex(key)
        self._complete.discard(raw)
        if raw not in self._doubted:
            self._doubted.add(raw)
            self._note([_DOUBTED + key])

    def _verify(self, key: str) -> None:
        """Read an entry, once and within the limit of bytes, and remove it if it is damaged or not finite."""
        raw = bytes.fromhex(key)
        if self._bytes_to_verify <= 0 or raw in self._verified or raw not in self._complete:
            return
        self._verified.add(raw)
        tensors = (self.get(key) or {}).values()
        self._bytes_to_verify -= sum(tensor.nbytes for tensor in tensors)
        if not all(map(is_finite, tensors)):
            self._remove_damaged(key, ValueError("it holds NaN or infinity"))

    def _opens(self, key: str) -> bool:
        """Return whether the entry's header is complete and the file has the length in it."""
        try:
            with open_tensors(self.path(key)):
                return True
        except FileNotFoundError:
            return False
        except (SafetensorError, FileError) as error:
            self._remove_damaged(key, error)
            return False

    def _remove_damaged(self, key: str, error: Exception) -> None:
        self._doubt(key)
        with self._writing(f"the cache entry {self.path(key)} is damaged ({error}) and cannot be removed"):
            self.path(key).unlink(missing_ok=True)
        logger.warning("removed the damaged cache entry %s: %s", self.path(key), error)

    @contextlib.contextmanager
    def _writing(self, problem: str) -> Iterator[None]:
        """Name a problem and its remedy where the block meets a file or directory that cannot be written to.

        Raises:
            CacheError: with the remedy.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            raise CacheError(
                f"{problem}: {error.strerror}. Make {self.directory} and its directories writable, and remove what is "
                f"damaged with: finetrainers cache verify {self.directory.parent} --repair; or use another "
                "--precompute_dir"
            ) from error

    def _write(self, path: Path, data: bytes) -> None:
        """Write an entry under another name and rename it.

        It is not flushed to disk as checkpoints are: an entry lost to a power cut is detected and computed again.
        """
        if path.parent not in self._directories:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._directories.add(path.parent)
        temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
        try:
            temporary.write_bytes(data)
            fault_point("precompute")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def read_entry(path: Path, *, note_use: bool = True) -> dict[str, Tensor]:
    """Return the tensors of an entry, on the CPU; with `note_use`, the file records that it was read.

    Raises:
        ValueError: the entry is damaged, with the reason.
        FileNotFoundError: the entry does not exist.
    """
    with open_regular(path) as file:
        data = file.read()
        last_use = os.fstat(file.fileno()).st_mtime
    try:
        tensors = safetensors.torch.load(data)
        expected = _metadata(data).get(_CHECKSUM)
    except (SafetensorError, ValueError, struct.error) as error:
        raise ValueError(str(error)) from error
    if str(zlib.crc32(_payload(data))) != expected:
        raise ValueError("its checksum is wrong")
    if note_use and time.time() - last_use > _USE_INTERVAL_S:
        with contextlib.suppress(OSError):  # the cache may belong to another user and be read-only
            os.utime(path)
    return tensors


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity; integers never do.

    A non-finite element makes the sum non-finite. Only then are the elements checked, as the sum may have overflowed.
    This takes a third of the time, and every entry of every batch is checked.
    """
    if not tensor.is_floating_point() or bool(tensor.sum(dtype=torch.float32).isfinite()):
        return True
    return bool(tensor.isfinite().all())


def read_about(path: Path) -> dict[str, str]:
    """Return the description in an entry's header; the tensors are not read.

    Raises:
        ValueError: the header is damaged.
    """
    with open_regular(path) as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError("it has no header")
        size = _header_size(start)
        if size > os.fstat(file.fileno()).st_size:
            raise ValueError("its header is truncated")
        return _metadata(start + file.read(size))


def _header_size(data: bytes) -> int:
    """Return the bytes of the safetensors header: its length as 8 bytes, then JSON."""
    return struct.unpack("<Q", data[:8])[0]


def _payload(data: bytes) -> memoryview:
    return memoryview(data)[8 + _header_size(data) :]


def _metadata(data: bytes) -> dict[str, str]:
    metadata = parse_json_object(data[8 : 8 + _header_size(data)], "its header").get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}
