"""Heartbeat that shows the other processes that this one runs, and ends its wait for one that does not.

While processes wait for each other without end, for one that saves, samples or loads, a working process looks like one
that was stopped: its machine answers, and its connections stay open. So a thread of each process counts in the store of
the launch, and a waiting process checks whether the others count on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from finetrainers.utils.failures import ExpectedError

_KEY = "finetrainers/pulse"
#: Maximum seconds between two counts, and minimum number of counts within the time after which a process is silent.
_EVERY_S, _COUNTS = 10.0, 4
#: Minimum of that time, however short the timeout: threads of a busy machine may wait for long.
_MIN_TIMEOUT_S = 5.0


class RankSilent(ExpectedError, RuntimeError):
    """A process that others wait for does not run any more."""


class Pulse:
    """Counts of all processes of a run. The threads end with `close`, or with the process."""

    def __init__(self, *, rank: int, world_size: int, timeout: timedelta, sockets: Collection[int]) -> None:
        """Args:
        rank: rank of this process.
        world_size: number of processes; each creates a pulse, at the same point of the program.
        timeout: time after which a process that does not count is silent.
        sockets: inodes of the connections that this process waits on; they are shut down if a process is silent.
        """
        self._rank = rank
        self._ranks = range(world_size)
        self._timeout_s = max(timeout.total_seconds(), _MIN_TIMEOUT_S)
        self._sockets = frozenset(sockets)
        self._store = _store(timeout)
        self._closed = threading.Event()
        self._waits = threading.Event()
        self._wait = 0  # the number of the wait in hand
        self._counts: dict[int, int] = {}  # as last read
        self._ended = False  # whether the store is gone, so that counts cannot be read
        self._silent: list[int] = []
        works = (self._count, self._watch) if self._store is not None else ()
        self._threads = [threading.Thread(target=work, name="pulse", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop counting: no process waits for this one any more."""
        self._closed.set()
        for thread in self._threads:
            thread.join(2)  # it may wait for a store that does not answer

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch all other processes within the block, where this one waits for them on its connections.

        Raises:
            RankSilent: one of them does not run.
        """
        self._wait += 1
        self._waits.set()
        try:
            yield
        except RuntimeError as error:
            if not self._silent:
                raise
            raise RankSilent(self._sentence()) from error
        finally:
            self._waits.clear()

    @property
    def _every_s(self) -> float:
        return min(self._timeout_s / _COUNTS, _EVERY_S)

    def _count(self) -> None:
        """Count, and while this process waits, read the others' counts; a store that does not answer blocks it."""
        assert self._store is not None
        try:
            while not self._closed.is_set():
                self._store.add(f"{_KEY}/{self._rank}", 1)
                if self._waits.is_set():
                    for rank in self._ranks:
                        self._counts[rank] = self._store.add(f"{_KEY}/{rank}", 0)
                self._closed.wait(self._every_s)
        except RuntimeError:  # its process has ended, which the connections show by themselves
            self._ended = True

    def _watch(self) -> None:
        """Add up, while this process waits, for how long each of the others has not counted."""
        last_counts: Mapping[int, int] = {}
        wait, silent_s = 0, dict.fromkeys(self._ranks, 0.0)
        before = time.monotonic()
        while not self._closed.wait(self._every_s):
            now = time.monotonic()
            # If this process itself was stopped for a while, the others may have been, too: that is not evidence.
            passed, before = min(now - before, 2 * self._every_s), now
            counts = dict(self._counts)
            waits_on = self._waits.is_set() and self._wait == wait
            for rank in self._ranks:
                is_silent = waits_on and counts.get(rank) == last_counts.get(rank)
                silent_s[rank] = silent_s[rank] + passed if is_silent else 0.0
            last_counts, wait = counts, self._wait
            silent = [rank for rank, seconds in silent_s.items() if seconds >= self._timeout_s]
            if silent and not self._ended:
                self._silent = silent
                _shut_down(self._sockets)
                return

    def _sentence(self) -> str:
        """Return the error message: the silent processes, and the remedy."""
        others = [rank for rank in self._silent if rank != self._rank]
        silent_processes = (
            f"rank {', '.join(map(str, others))}"
            if len(self._silent) == len(others)
            else "the launch's store, on rank 0"
        )
        return (
            f"another process of the run does not answer: it hangs, or its machine is lost ({silent_processes}: "
            f"silent for {self._timeout_s:g} s, the --nccl_timeout). Checkpoints are intact: end the remaining "
            "processes, start the command on all machines again, and with --resume_from_checkpoint auto it continues "
            "from the newest one"
        )


def connections() -> set[int]:
    """Return the inodes of this process's TCP connections, where the system lists them (Linux)."""
    return {
        inode
        for inode, connection in tcp_sockets()
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # not one that listens
    }


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's TCP sockets with their inodes, where the system lists them (Linux).

    Each is a duplicate, closed after its turn; its options and its connection are those of the socket itself.
    """
    descriptors = Path("/proc/self/fd")
    for path in list(descriptors.iterdir()) if descriptors.is_dir() else ():
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone
            status = os.fstat(int(path.name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    yield status.st_ino, connection


def _shut_down(inodes: Collection[int]) -> None:
    """Shut down connections that are waited on: the wait fails, here and on all other processes."""
    for inode, connection in tcp_sockets():
        if inode in inodes:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _store(timeout: timedelta) -> Any:
    """Return a separate connection to the launch's store, since waiting blocks one, or None if there is no store."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    return dist.TCPStore(store.host, store.port, None, False, timeout, wait_for_workers=False)
