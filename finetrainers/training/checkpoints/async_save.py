"""A save as all ranks do it together, and asynchronous checkpointing: one save at a time in a background thread."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from finetrainers.utils.alive import waiting

if TYPE_CHECKING:
    from finetrainers.parallel.ranks import DistributedContext

    from ..watchdog import Watchdog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveJob:
    """A save.

    Attributes:
        description: names the save in errors.
        write: function that this rank calls, alone and in any thread, or None if it writes nothing.
        publish: function that rank 0 calls once all ranks have written, with the values that `write` returned on each
            rank, or None if nothing is to be published.
        discarded: context around writing and publishing that removes the files if any rank failed.
    """

    description: str
    write: Callable[[], Any] | None
    publish: Callable[[list[Any]], None] | None = None
    discarded: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def run(self, parallel: DistributedContext) -> None:
        """Save while training waits, and publish if all ranks have written; every rank must call it.

        Raises:
            Exception: it failed. On every rank.
        """
        written, error = None, None
        try:
            written = None if self.write is None else self.write()
        except Exception as caught:
            error = caught
        with self.discarded():  # when no rank writes any more
            parallel.raise_if_any_failed(error, self.description)
            if self.publish is None:
                return
            parts = parallel.gather_objects([written])
            with parallel.raise_on_all_ranks(self.description):
                if parallel.is_main:
                    self.publish(parts)


class BackgroundSave:
    """A save that a thread writes, on rank 0 or on each, while all ranks train on.

    The thread talks to no other rank. `start`, `poll` and `wait` do, and every rank must call them at the same points.
    """

    def __init__(self, *, parallel: DistributedContext, watchdog: Watchdog) -> None:
        """Args:
        parallel: the ranks.
        watchdog: its limit of the section `checkpoint` also bounds the thread.
        """
        self._parallel = parallel
        self._watchdog = watchdog
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._future: Future[Any] | None = None  # on a rank that writes
        self._job: SaveJob | None = None  # on every rank, while one is in flight

    @property
    def in_flight(self) -> bool:
        """True if a save has begun and, as far as all ranks know, not ended."""
        return self._job is not None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Finish a save in flight at the end of the block, which is the training, and log its error."""
        try:
            yield
        finally:
            self._executor.shutdown(wait=True)
            # Another error has ended this rank, so the other ranks can no longer be notified.
            error = None if self._future is None else self._future.exception()
            if error is not None and self._job is not None:
                logger.error("%s failed", self._job.description, exc_info=error)

    def prepare(self, job: Callable[[], None]) -> None:
        """Run a job in the thread before the first save; its error is left to the save, which repeats the job."""
        self._executor.submit(job)

    def start(self, job: SaveJob) -> None:
        """Begin a save; none may be in flight."""
        assert self._job is None, f"{self._job.description} has not finished"
        self._job = job
        limited = self._watchdog.in_thread("checkpoint")
        self._future = None if job.write is None else self._executor.submit(limited(job.write))

    @property
    def is_writing(self) -> bool:
        """True while the thread of this rank is writing a save."""
        return self._future is not None and not self._future.done()

    def poll(self, writing: int) -> None:
        """Conclude the save in flight once it has ended on all ranks; call it after every step.

        Args:
            writing: whether any rank is writing, as all have agreed (`is_writing`).

        Raises:
            Exception: it failed. On every rank.
        """
        if self._job is not None and not writing:
            self.wait()

    def wait(self) -> bool:
        """Wait for the save in flight, and conclude it; return whether there was one.

        Raises:
            Exception: it failed. On every rank.
        """
        if self._job is None:
            return False
        if self._future is not None:
            with waiting():  # for the thread, which has its own clock
                self._future.exception()
        job = replace(self._job, write=None if self._future is None else self._future.result)
        self._job = self._future = None
        job.run(self._parallel)
        return True
