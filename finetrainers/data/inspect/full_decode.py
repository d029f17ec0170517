"""Decodes each file in an isolated subprocess, so that a crash, hang or decompression bomb rejects only that file.

Imports no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..reading.items import Kind
from ..reading.status import Mark, Unusable
from .decode_worker import Lost, decode_task, serve
from .probe import Probe

R = TypeVar("R")

#: Seconds that any file may take, and pixels per second that slow decoders manage beyond that.
_PATIENCE_S = 60.0
_SLOW = 20e6
_STARTING_S = 60.0


def decode_files(
    tasks: Sequence[tuple[Path, Kind, Probe]], *, jobs: int | None = None
) -> Iterator[tuple[Path, Unusable | tuple[Mark, ...]]]:
    """Decode files from end to end, in processes; in the order in which they are done.

    Args:
        tasks: path, kind, and what the header says.
        jobs: processes; None: one for each processor.

    Yields:
        The path, and why it cannot be used, or what was remarked of it (`black`, `still`).
    """
    limits = [_PATIENCE_S + p.frames * p.height * p.width / _SLOW for _, _, p in tasks]
    calls = [(str(path), kind, found.frames) for path, kind, found in tasks]
    for place, result in isolated(decode_task, calls, limits_s=limits, jobs=jobs):
        if isinstance(result, Lost):
            yield tasks[place][0], Unusable("decoder_failed", f"the decoder {result.how}")
        else:
            yield tasks[place][0], result


def isolated(
    function: Callable[..., R], calls: Sequence[tuple[Any, ...]], *, limits_s: Sequence[float], jobs: int | None = None
) -> Iterator[tuple[int, R | Lost]]:
    """Results of a function of a module, called in processes with bounded memory; in the order in which they are done.

    Args:
        function: of a module, so that another process finds it.
        calls: its arguments.
        limits_s: seconds that each call may take.
        jobs: processes; None: one for each processor.
    """
    count = min(jobs or os.cpu_count() or 1, len(calls))
    waiting = list(range(len(calls)))[::-1]
    workers: list[_Worker[R]] = []
    try:
        workers = [_Worker(function) for _ in range(count)]
        while waiting or any(worker.place is not None for worker in workers):
            for worker in workers:
                if worker.place is None and waiting:
                    place = waiting.pop()
                    worker.give(place, calls[place], limits_s[place])
            busy = [worker for worker in workers if worker.place is not None]
            ready = wait([worker.pipe for worker in busy], timeout=max(min(w.left_s for w in busy), 0.0))
            for worker in busy:
                if worker.pipe in ready or worker.left_s <= 0:
                    assert worker.place is not None
                    place = worker.place
                    yield place, worker.take(is_ready=worker.pipe in ready)
    finally:
        for worker in workers:
            worker.end()


class _Worker(Generic[R]):
    """A worker process that is restarted when a task has killed it."""

    def __init__(self, function: Callable[..., R]) -> None:
        self.function = function
        self.place: int | None = None
        self._start()

    def _start(self) -> None:
        # Not forked: this process has threads. The processes are up before their first task's time begins to run.
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(other, self.function), daemon=True)
        self.process.start()
        other.close()
        self.is_up = False

    def give(self, place: int, arguments: tuple[Any, ...], limit_s: float) -> None:
        """Begin a task."""
        if not self.is_up:
            if not self.pipe.poll(_STARTING_S) or self.pipe.recv() != "up":
                raise RuntimeError("a process that decodes did not start")
            self.is_up = True
        self.place = place
        self.limit_s = limit_s
        self.until = time.monotonic() + limit_s
        self.pipe.send(arguments)

    @property
    def left_s(self) -> float:
        """Seconds until the task counts as hanging."""
        return self.until - time.monotonic()

    def take(self, *, is_ready: bool) -> R | Lost:
        """Return the result of the task, or how the process was lost; a new one then takes its place."""
        self.place = None
        if is_ready:
            try:
                return self.pipe.recv()
            except (EOFError, OSError):
                self.process.join()
                how = _ending(self.process.exitcode)
        else:
            how = f"gave no answer for {self.limit_s:.0f} s"
        self.end()
        self._start()
        return Lost(how)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"crashed ({signal.Signals(-code).name})"
        except ValueError:
            return f"crashed (signal {-code})"
    return f"ended its process (exit code {code})"
