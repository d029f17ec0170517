"""Host memory: use by this process and its workers, free memory of the machine or container, and reuse. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_SELF = Path("/proc/self")
#: Mount points of control groups of the two versions, and their files: the limit, the used bytes, and among these the
#: bytes that the kernel can drop at once (cached files).
_GROUPS = (
    (Path("sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
#: The C library, or None where it is not glibc or another POSIX one.
_LIBC: Any = ctypes.CDLL(None) if os.name == "posix" else None
_UNLIMITED = 2**60  # version 1 reports about 2**63
#: Options of glibc's `mallopt`, their values under `freed_memory_is_reused`, and their values after it: the default
#: number of mapped blocks, and the highest thresholds that glibc itself sets when a program frees large blocks.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_REUSED = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1}
_NOT_REUSED = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}


@dataclass(frozen=True)
class HostMemory:
    """Host memory, in bytes.

    Attributes:
        total: of the machine, or the limit of the container if that is less.
        available: bytes before the kernel ends a process.
        limited_by: `machine` or `container`.
    """

    total: int
    available: int
    limited_by: str = "machine"


def take_peak_rss() -> int:
    """Return the peak resident memory of this process since the last call, in bytes.

    Linux can reset its peak. Where it cannot, this is the peak since the process started; on other systems, the current
    resident memory.
    """
    global _reader
    if _reader is None or _reader.pid != os.getpid():
        if _reader is not None:
            _reader.close()  # in a forked process, its files describe the parent
        _reader = _PeakReader()
    return _reader.take()


class _PeakReader:
    """Reader of this process's peak by files that stay open, since opening them at every step takes as long again.

    `getrusage` reports the same as `VmHWM` in a tenth of the time, but never less than the peak of the parent process.
    So its value counts only above the one after the first reset.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._status = self._clear = -1
        with contextlib.suppress(OSError):  # not Linux
            self._status = os.open(_SELF / "status", os.O_RDONLY)
        with contextlib.suppress(OSError):  # /proc may be read-only
            self._clear = os.open(_SELF / "clear_refs", os.O_WRONLY)
        self._floor: int | None = None

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._status, self._clear):
            if descriptor >= 0:
                os.close(descriptor)

    def take(self) -> int:
        """See `take_peak_rss`."""
        if self._status < 0:
            return psutil.Process().memory_info().rss
        max_rss = _max_rss()
        peak = self._high_water_mark() if max_rss is None or self._floor is None or max_rss <= self._floor else max_rss
        if self._clear >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._clear, b"5", 0)
        if self._floor is None:
            self._floor = _max_rss()
        return peak

    def _high_water_mark(self) -> int:
        text = os.pread(self._status, 4096, 0)
        index = text.find(b"VmHWM:")
        return psutil.Process().memory_info().rss if index < 0 else 1024 * int(text[index + 6 :].split(None, 1)[0])


_reader: _PeakReader | None = None


def _max_rss() -> int | None:
    """Return the peak resident memory of `getrusage` in bytes, or None where there is none."""
    try:
        import resource
    except ImportError:
        return None
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def workers_bytes() -> int:
    """Return the memory of the processes that this one has started, such as data loader workers, in bytes.

    A page that several processes share counts in parts: forked workers share most of their pages with this process.
    """
    return sum(_proportional_bytes(pid) for pid in _children())


def _children() -> list[int]:
    try:
        texts = [path.read_text(encoding="ascii") for path in _SELF.glob("task/*/children")]
    except OSError:  # a thread has ended in the meantime
        return []
    if not texts and not _SELF.exists():
        return [child.pid for child in psutil.Process().children()]
    return [int(pid) for text in texts for pid in text.split()]


def _proportional_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    except OSError:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(pid).memory_info().rss
    return 0  # it has ended


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the free memory of the machine or of a control group of this process, whichever has the least.

    Args:
        root: where `proc` and `sys` are.
    """
    machine = psutil.virtual_memory()
    candidates = [HostMemory(machine.total, machine.available)]
    for folder, (limit_file, used_file, cached_file) in _groups(root):
        with contextlib.suppress(OSError, ValueError):  # `max` is not a number, or a file is missing
            total = int((folder / limit_file).read_text(encoding="ascii"))
            if total >= _UNLIMITED:
                continue
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            used = int((folder / used_file).read_text(encoding="ascii")) - int(stat.get(cached_file, 0))
            candidates.append(HostMemory(total, max(0, total - used), "container"))
    return min(candidates, key=lambda candidate: candidate.available)


def _groups(root: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield folders of the control groups of this process, with the names of their files."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, *files = _GROUPS[1 if controllers else 0]
        folder = root / mount / path.lstrip("/")
        # In a container the path may be that of the host; the mounted group is then the container's.
        for group in (folder, *folder.parents):
            if group.is_relative_to(root / mount):
                yield group, files


def return_freed_memory() -> None:
    """Return freed memory to the system, so that the next peak does not include it (glibc)."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(ctypes.c_size_t(0))


@contextlib.contextmanager
def freed_memory_is_reused() -> Iterator[None]:
    """Reuse memory that this process frees within the block; afterwards free memory returns to the system.

    glibc maps every block above 32 MiB from the system and unmaps it when it is freed, so that each page causes a page
    fault again: nearly half of the time of a small VAE on one CPU thread. Results do not change. Other C libraries are
    left alone, and so is glibc if the environment configures its mapping (such as `MALLOC_MMAP_THRESHOLD_`).
    """
    names = [name for name in os.environ if name.startswith("MALLOC_")]
    settings = " ".join([*names, os.environ.get("GLIBC_TUNABLES", "")]).lower()
    is_set = "mmap_" in settings or "trim_threshold" in settings
    if is_set or not hasattr(_LIBC, "mallopt") or not hasattr(_LIBC, "malloc_trim"):
        yield
        return
    for option, value in _REUSED.items():
        _LIBC.mallopt(option, value)
    try:
        yield
    finally:
        for option, value in _NOT_REUSED.items():
            _LIBC.mallopt(option, value)
        return_freed_memory()
