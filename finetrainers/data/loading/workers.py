"""Worker processes that prefetch, and are restarted when they die or hang."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from finetrainers.utils.failures import ExpectedError
from finetrainers.utils.running_time import TICK_S, RunningClock

from ..buckets.clip import Clip
from .batch_sampler import MicroBatch
from .prefetch import AHEAD

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Number of times that workers may be lost at the same batch before it is an error.
RESTARTS = 3
#: Seconds after which a dead worker is noticed.
_LOOK_S = TICK_S
#: Seconds that workers may take to start. Unforked ones import torch, which takes long from a network disk.
_STARTING_S = 600.0
#: Seconds that workers may take to end when they are no longer needed: those that still decode, or hang, are killed.
_ENDING_S = 2.0
#: Values for a worker that is not reading a clip.
_NOTHING, _NOT_STARTED = -1, -2


class WorkersLost(ExpectedError, RuntimeError):
    """Repeated deaths or hangs of worker processes at the same batch."""


def note_reading(clip: Clip | None) -> None:
    """Record the clip that a worker is reading, in memory that outlives the worker."""
    if (worker := get_worker_info()) is not None:
        reading = worker.dataset.reading  # type: ignore[attr-defined]
        reading[worker.id] = _NOTHING if clip is None else clip.index


class _FetchDataset(Dataset[T]):
    """A dataset whose "index" is an entire micro-batch: the sampler decides everything, workers only fetch."""

    def __init__(self, fetch: Callable[[MicroBatch], T], num_workers: int) -> None:
        self.fetch = fetch
        self.reading = torch.full((num_workers,), _NOT_STARTED, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: MicroBatch) -> T:
        raw = self.fetch(index)
        note_reading(None)
        return raw


@dataclass(frozen=True)
class Workers(Generic[T]):
    """Worker processes that fetch micro-batches in order.

    Attributes:
        order: the micro-batches, the same at each iteration.
        fetch: brings a micro-batch into memory, and calls `note_reading` before each clip; picklable.
        clips: all clips, for their names.
        count: number of processes.
        ahead: number of micro-batches that each is ahead.
        pin_memory: see `DataLoader`.
        timeout_s: seconds to wait for a batch before the workers, once started, count as hung, or 0 for no limit.
        on_restart: called with the reason whenever they are restarted.
    """

    order: Iterable[MicroBatch]
    fetch: Callable[[MicroBatch], T]
    clips: Sequence[Clip]
    count: int
    ahead: int = AHEAD
    pin_memory: bool = False
    timeout_s: float = 0.0
    on_restart: Callable[[str], None] = lambda reason: None

    def batches(self) -> Iterator[T]:
        """Yield the batches of the order.

        Raises:
            WorkersLost: more than `RESTARTS` times in a row, naming the files that were being read.
        """
        position = losses = 0
        while True:
            dataset = _FetchDataset(self.fetch, self.count)
            batches, processes = self._start(dataset, position)
            kill = partial(_kill, processes)
            # Workers ignore Python's signal to end at exit, and Python would wait for them if an error's traceback
            # still held this loader then.
            atexit.register(kill)
            try:
                while True:
                    try:
                        batch = self._next(batches, dataset)
                    except StopIteration:
                        return
                    yield batch
                    del batch
                    position, losses = position + 1, 0
            except _Lost as error:
                reason = f"{error}; {self._reading(dataset)}"
                kill()  # otherwise hung workers would be waited for
            except Exception:
                kill()
                raise
            finally:
                # Even if the generator is closed or interrupted: a remaining worker would be waited for at exit.
                with _killed_later(processes):
                    del batches
                atexit.unregister(kill)
            losses += 1
            if losses > RESTARTS:
                raise WorkersLost(
                    f"the data loader's workers failed {losses} times at the same batch ({reason}). Repair or remove "
                    "the files, give the workers more memory or time (--dataloader_timeout), or decode in the main "
                    "process with --dataloader_num_workers 0, which shows the failing file"
                )
            logger.warning("restarting the data loader's workers (%d of at most %d): %s", losses, RESTARTS, reason)
            self.on_restart(reason)

    def _start(self, dataset: _FetchDataset[T], position: int) -> tuple[Iterator[T], list[BaseProcess]]:
        """Start workers at a batch; return their batches and processes."""
        loader: DataLoader[T] = DataLoader(
            dataset,
            batch_size=None,
            sampler=islice(self.order, position, None),  # type: ignore[arg-type]
            num_workers=self.count,
            prefetch_factor=self.ahead,
            pin_memory=self.pin_memory,
            timeout=_LOOK_S,
            worker_init_fn=_begin,
        )
        before = multiprocessing.active_children()
        child_ended = getattr(signal, "SIGCHLD", None)  # Windows has none
        handler = signal.getsignal(child_ended) if child_ended else None
        batches = iter(loader)
        if child_ended and threading.current_thread() is threading.main_thread():
            # When a worker dies, torch's handler would raise at any place of the main thread, such as within a step.
            signal.signal(child_ended, handler)
        return batches, [child for child in multiprocessing.active_children() if child not in before]

    def _next(self, batches: Iterator[T], dataset: _FetchDataset[T]) -> T:
        """Return the next batch.

        Raises:
            _Lost: a worker died, or no worker answered in time.
        """
        clock = RunningClock()
        started = since = clock.now()
        while True:
            try:
                return next(batches)
            except RuntimeError as error:
                # Only errors of the loader itself; the message of an error within a worker names the worker.
                text = str(error)
                if not text.startswith("DataLoader "):
                    raise
                if "timed out" not in text:
                    raise _Lost(text) from None
                now = clock.now()
                if (dataset.reading == _NOT_STARTED).any() and now - started < _STARTING_S:
                    since = now
                if self.timeout_s and now - since >= self.timeout_s:
                    raise _Lost(f"no batch for {now - started:.0f} s") from None
            except (ConnectionError, EOFError, FileNotFoundError) as error:
                # The worker that holds a batch's memory died before the handover. The message of an error within a
                # worker names the worker.
                if "in DataLoader worker process" in str(error):
                    raise
                raise _Lost(f"a worker died while it passed a batch on: {error!r}") from None

    def _reading(self, dataset: _FetchDataset[T]) -> str:
        """Return a message about the files that the workers were reading."""
        indices = [index for index in dataset.reading.tolist() if index >= 0]
        paths = {clip.index: str(clip.path) for clip in self.clips if clip.index in indices}
        names = [paths.get(index, f"item {index}") for index in indices]
        return "they were reading " + (", ".join(names) or "no file")


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()


@contextmanager
def _killed_later(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Let workers end within the block; kill those that have not ended after `_ENDING_S`, and wait until they are gone.

    The loader asks them to end when it is deleted, which an exception's traceback may prevent, and waits 5 s for each.
    """
    timer = threading.Timer(_ENDING_S, _kill, [processes])
    timer.daemon = True
    if sys.is_finalizing():  # Python then starts no threads, and would wait for one that is to start
        _kill(processes)
    else:
        with suppress(RuntimeError):  # from Python 3.12 on, even earlier in its exit, when `kill` has been called
            timer.start()
    try:
        yield
        for process in processes:
            process.join(2 * _ENDING_S)  # a killed process stays while its file system does not answer
    finally:
        timer.cancel()
        _kill([process for process in processes if process.is_alive()])


class _Lost(Exception):
    """A loss of workers, which must be restarted."""


def _begin(worker: int) -> None:
    """Record that a worker has started, and ignore signals that ask a process group to stop.

    The trainer still needs it for its last step; it ends when the trainer ends it, or has ended.
    """
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):  # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    note_reading(None)
