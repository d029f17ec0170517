"""Speed and free space of a disk: a file is written, flushed, read and deleted. Imports no torch."""

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
    """Return free bytes and bytes per second of a folder's disk, or `disk_error`, the reason why there are none.

    Args:
        folder: need not exist, and is not made.
        num_mib: size of the file; 0 skips measuring the speed.
    """
    folder = folder.expanduser().resolve()
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), folder)
    facts: dict[str, Any] = {"disk_path": str(existing)}
    try:
        usage = shutil.disk_usage(existing)
        facts |= {"disk_free": usage.free, "disk_total": usage.total}
        if num_mib and usage.free < 2 * num_mib * _MIB:
            facts["disk_error"] = f"{existing} is too full to measure its speed"
        elif num_mib:
            facts |= _speed(existing, num_mib * _MIB)
        elif not os.access(existing, os.W_OK):
            facts["disk_error"] = f"{existing} is not writable"
    except OSError as error:
        facts["disk_error"] = f"{existing} is not writable: {error.strerror}"
    return facts


def _speed(folder: Path, size: int) -> dict[str, float]:
    """Measure bytes per second of writing with a flush at the end, and of reading.

    The file has no name, so that nothing stays if this process is killed. Its bytes are random, as some file systems
    compress.
    """
    chunk = os.urandom(min(_CHUNK, size))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started, remaining = time.monotonic(), size
        while remaining > 0:
            remaining -= file.write(chunk[:remaining])
        os.fsync(file.fileno())
        write_s = time.monotonic() - started
        if hasattr(os, "posix_fadvise"):  # else the page cache would be read
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.monotonic()
        while file.read(_CHUNK):
            pass
        read_s = time.monotonic() - started
    return {"disk_write": size / max(write_s, 1e-9), "disk_read": size / max(read_s, 1e-9)}
