"""Speed of a disk and room on it: a file is written, flushed, read and deleted. Imports no torch."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

_MIB = 1 << 20
_CHUNK = 8 * _MIB


def disk_facts(folder: Path, num_mib: int) -> dict[str, Any]:
    """Room and speed where a folder is, or will be: bytes, and bytes per second; `disk_error`, why there are none.

    Args:
        folder: need not exist, and is not made.
        num_mib: size of the file; 0: the speed is not measured.
    """
    folder = folder.expanduser().resolve()
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), folder)
    found: dict[str, Any] = {"disk_path": str(there)}
    try:
        usage = shutil.disk_usage(there)
        found |= {"disk_free": usage.free, "disk_total": usage.total}
        if num_mib and usage.free < 2 * num_mib * _MIB:
            found["disk_error"] = f"{there} is too full to measure its speed"
        elif num_mib:
            found |= _speed(there, num_mib * _MIB)
        elif not os.access(there, os.W_OK):
            found["disk_error"] = f"{there} cannot be written to"
    except OSError as error:
        found["disk_error"] = f"{there} cannot be written to: {error.strerror}"
    return found


def _speed(folder: Path, size: int) -> dict[str, float]:
    """Bytes per second of writing with a flush at the end, and of reading.

    The file has no name, so that nothing stays if this process is killed. Its bytes are random, as some file systems compress.
    """
    chunk = os.urandom(min(_CHUNK, size))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begun, left = time.monotonic(), size
        while left > 0:
            left -= file.write(chunk[:left])
        os.fsync(file.fileno())
        written = time.monotonic() - begun
        if hasattr(os, "posix_fadvise"):  # or the page cache would be read
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.monotonic()
        while file.read(_CHUNK):
            pass
        read = time.monotonic() - begun
    return {"disk_write": size / max(written, 1e-9), "disk_read": size / max(read, 1e-9)}
