"""A store of tensors named by what they were computed from, so that nothing stale can ever be read.

A key is a hash of everything that determines the value. Entries are safetensors files with a checksum, since
safetensors itself does not notice a flipped bit; they are written under another name and renamed, so that several ranks
or runs may share one folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

logger = logging.getLogger(__name__)

_CHECKSUM = "crc32"
_CHUNK = 1 << 20


class CacheError(RuntimeError):
    """A cached entry that training needs is missing or damaged."""


class TensorCache:
    """Named groups of tensors in a folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @staticmethod
    def key(**parts: object) -> str:
        """Hex digest of the given parts, which must be JSON values (tuples count as lists)."""
        return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    def path(self, key: str) -> Path:
        """Where the entry lies; folders fan out, since one folder of a million files is slow everywhere."""
        return self.directory / key[:2] / f"{key}.safetensors"

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store an entry, replacing what was there."""
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        # The checksum covers the tensors' bytes, so it is known only once they are laid out.
        payload = _payload(safetensors.torch.save(contiguous))
        data = safetensors.torch.save(contiguous, metadata={_CHECKSUM: str(zlib.crc32(payload))})
        _write_bytes_atomic(self.path(key), data)

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The entry, on the CPU; None when there is none, or when it is damaged, which also removes and logs it."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            tensors = safetensors.torch.load(data)
            if str(zlib.crc32(_payload(data))) != _metadata(data).get(_CHECKSUM):
                raise ValueError("its checksum is wrong")
        except (SafetensorError, ValueError, struct.error) as error:
            logger.warning("removed the damaged cache entry %s: %s", path, error)
            path.unlink(missing_ok=True)
            return None
        return tensors

    def has(self, key: str) -> bool:
        """Whether the entry exists and is whole by its header; damaged ones are removed and logged.

        The tensors are not read: that would read the whole cache at every start. `get` checks their bytes.
        """
        path = self.path(key)
        try:
            with safetensors.safe_open(path, framework="pt"):
                return True
        except FileNotFoundError:
            return False
        except SafetensorError as error:
            logger.warning("removed the damaged cache entry %s: %s", path, error)
            path.unlink(missing_ok=True)
            return False


class FileDigests:
    """SHA-256 of files' contents, remembered on disk by path, size and modification time.

    Without the memory, every start of every run would read every video once just to name its cache entry.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[tuple[Path, int, int], str] = {}

    def of(self, path: Path) -> str:
        """Hex digest of the file's content."""
        stat = path.stat()
        version = (path, stat.st_size, stat.st_mtime_ns)
        if version not in self._known:
            self._known[version] = self._from_disk(*version)
        return self._known[version]

    def _from_disk(self, path: Path, size: int, mtime_ns: int) -> str:
        name = TensorCache.key(path=str(path.resolve()), size=size, mtime_ns=mtime_ns)
        memory = self.directory / name[:2] / name
        if memory.is_file() and len(text := memory.read_text()) == 64:
            return text
        digest = _sha256(path)
        _write_bytes_atomic(memory, digest.encode())
        return digest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _header_size(data: bytes) -> int:
    """Bytes of the safetensors header: its length as 8 bytes, then JSON."""
    return struct.unpack("<Q", data[:8])[0]


def _payload(data: bytes) -> memoryview:
    return memoryview(data)[8 + _header_size(data) :]


def _metadata(data: bytes) -> dict[str, str]:
    return json.loads(data[8 : 8 + _header_size(data)]).get("__metadata__", {})


def _write_bytes_atomic(path: Path, data: bytes) -> None:
    """Not flushed to disk as checkpoints are: an entry lost to a power cut is found damaged and computed again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
