"""Decoding of each file in an isolated subprocess, so that a crash, hang or decompression bomb rejects only that file.

Imports no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from finetrainers.utils.running_time import TICK_S, RunningClock

from ..reading.items import Kind
from ..reading.status import Decoded, InvalidSample
from .decode_worker import Lost, decode_task, serve
from .probe import Probe

R = TypeVar("R")

#: Seconds that any file may take, and the pixels per second of slow decoders, which extend that.
_PATIENCE_S = 60.0
_SLOW = 20e6
_STARTING_S = 60.0


def decode_files(
    tasks: Sequence[tuple[Path, Kind, Probe]], *, jobs: int | None = None
) -> Iterator[tuple[Path, Decoded]]:
    """Decode files from end to end, in processes; yield them in the order of completion.

    Args:
        tasks: path, kind, and the probe of the header.
        jobs: number of processes, or None for one per processor.

    Yields:
        The path, and the reason why it cannot be used, or its marks (`black`, `still`).
    """
    limits = [_PATIENCE_S + p.frames * p.height * p.width / _SLOW for _, _, p in tasks]
    calls = [(str(path), kind, header.frames) for path, kind, header in tasks]
    for position, result in run_isolated(decode_task, calls, limits_s=limits, jobs=jobs):
        if isinstance(result, Lost):
            result = InvalidSample("decoder_failed", f"the decoder {result.how}")
        yield tasks[position][0], result


def run_isolated(
    function: Callable[..., R], calls: Sequence[tuple[Any, ...]], *, limits_s: Sequence[float], jobs: int | None = None
) -> Iterator[tuple[int, R | Lost]]:
    """Yield the results of a function that is called in processes with bounded memory, in the order of completion.

    Args:
        function: of a module, so that another process can import it.
        calls: its arguments.
        limits_s: seconds that each call may take.
        jobs: number of processes, or None for one per processor.
    """
    count = min(jobs or os.cpu_count() or 1, len(calls))
    waiting = list(range(len(calls)))[::-1]
    workers: list[_Worker[R]] = []
    try:
        workers = [_Worker(function) for _ in range(count)]
        while waiting or any(worker.call_index is not None for worker in workers):
            for worker in workers:
                if worker.call_index is None and waiting:
                    index = waiting.pop()
                    worker.submit(index, calls[index], limits_s[index])
            busy = [worker for worker in workers if worker.call_index is not None]
            ready = wait([worker.pipe for worker in busy], timeout=max(min([TICK_S, *(w.left_s for w in busy)]), 0.0))
            for worker in busy:
                if worker.pipe in ready or worker.left_s <= 0:
                    assert worker.call_index is not None
                    index = worker.call_index
                    yield index, worker.read_result(is_ready=worker.pipe in ready)
    finally:
        for worker in workers:
            worker.end()


class _Worker(Generic[R]):
    """A worker process that is restarted when a task has killed it."""

    def __init__(self, function: Callable[..., R]) -> None:
        self.function = function
        self.call_index: int | None = None
        self._time = RunningClock()
        self._start()

    def _start(self) -> None:
        # Not forked: this process has threads. The time of the first task starts after the process has started.
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(other, self.function), daemon=True)
        self.process.start()
        other.close()
        self.is_up = False

    def submit(self, index: int, arguments: tuple[Any, ...], limit_s: float) -> None:
        """Start a task."""
        if not self.is_up:
            if not self.pipe.poll(_STARTING_S) or self.pipe.recv() != "up":
                raise RuntimeError("a process that decodes did not start")
            self.is_up = True
        self.call_index = index
        self.limit_s = limit_s
        self.until = self._time.now() + limit_s
        self.pipe.send(arguments)

    @property
    def left_s(self) -> float:
        """Seconds until the task counts as hanging."""
        return self.until - self._time.now()

    def read_result(self, *, is_ready: bool) -> R | Lost:
        """Return the result of the task, or how the process was lost, after which a new one is started."""
        self.call_index = None
        if is_ready:
            try:
                return self.pipe.recv()
            except (EOFError, OSError):
                self.process.join()
                ending = _describe_exit(self.process.exitcode)
        else:
            ending = f"gave no answer for {self.limit_s:.0f} s"
        self.end()
        self._start()
        return Lost(ending)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"crashed ({signal.Signals(-code).name})"
        except ValueError:
            return f"crashed (signal {-code})"
    return f"ended its process (exit code {code})"
