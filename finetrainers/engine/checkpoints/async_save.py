"""Asynchronous checkpointing: one save at a time in a background thread, started and ended by all ranks together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetrainers.parallel.strategy import Strategy

    from ..watchdog import Watchdog

logger = logging.getLogger(__name__)


class BackgroundSave:
    """A save that rank 0 writes while all ranks train on.

    The thread talks to no other rank. `start`, `poll` and `wait` do, and every rank must call them at the same points.
    """

    def __init__(self, *, parallel: Strategy, watchdog: Watchdog) -> None:
        """Args:
        parallel: the ranks.
        watchdog: its limit of the section `checkpoint` also bounds the thread.
        """
        self._parallel = parallel
        self._watchdog = watchdog
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._future: Future[None] | None = None  # on the rank that writes
        self._what: str | None = None  # on every rank, while one is in flight

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun and, as far as all ranks know, not ended."""
        return self._what is not None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the training: whichever way it ends, a save that is in flight is finished, and its error shown."""
        try:
            yield
        finally:
            self._executor.shutdown(wait=True)
            # Something else has ended this rank, so the others cannot be told any more.
            error = None if self._future is None else self._future.exception()
            if error is not None:
                logger.error("%s failed", self._what, exc_info=error)

    def prepare(self, job: Callable[[], None]) -> None:
        """Let the thread do something before the first save; its error is left to the save, which does it again."""
        self._executor.submit(job)

    def start(self, job: Callable[[], None] | None, *, what: str) -> None:
        """Begin a save; none may be in flight.

        Args:
            job: writes everything; None on ranks that write nothing.
            what: names it in errors.
        """
        assert not self.in_flight, f"{self._what} has not ended"
        self._what = what
        self._future = None if job is None else self._executor.submit(self._run, job)

    def _run(self, job: Callable[[], None]) -> None:
        with self._watchdog.in_thread("checkpoint"):
            job()

    def poll(self) -> None:
        """Once the save in flight has ended, forget it; call it after every step. Costs nothing without one.

        Raises:
            Exception: it failed. On every rank.
        """
        if self._what is None:
            return
        writing = self._future is not None and not self._future.done()
        if self._parallel.max_on_host([int(writing)]) == [0]:
            self.wait()

    def wait(self) -> bool:
        """Wait for the save in flight; whether there was one.

        Raises:
            Exception: it failed. On every rank.
        """
        if self._what is None:
            return False
        error = None if self._future is None else self._future.exception()
        assert error is None or isinstance(error, Exception)
        what, self._what, self._future = self._what, None, None
        self._parallel.raise_if_any_failed(error, what)
        return True
