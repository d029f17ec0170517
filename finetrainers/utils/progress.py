"""Progress of long work: a live bar on a terminal, elsewhere a line whenever nothing was printed for a few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from .alive import send_heartbeat, time_each_heartbeat
from .launch import launched_rank
from .text import duration

logger = logging.getLogger(__name__)

#: Called with (done, total).
Progress = Callable[[int, int], None]
#: Called with (stage, done, total); a stage is a verb and a noun: `read headers`.
StageProgress = Callable[[str, int, int], None]

#: Seconds between lines: at least, and as a share of the time since the beginning, so that long work prints few.
_INTERVAL_S, _INTERVAL_SHARE = 4.0, 0.05
_POLL_S = 0.2
_ONLY = TaskID(0)  # of a bar, which has one task


def is_silent(since: float, started: float) -> bool:
    """Return whether the last line, printed at `since`, is so long ago that work begun at `started` prints another."""
    now = time.monotonic()
    return now - since >= max(_INTERVAL_S, _INTERVAL_SHARE * (now - started))


@contextmanager
def polling(poll: Callable[[], None]) -> Iterator[None]:
    """Call a function several times a second within the block, in another thread."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_POLL_S):
            poll()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def working(task: str) -> Iterator[None]:
    """Log, on rank 0, that work whose end cannot be foreseen goes on, for as long as it does."""
    started = since = time.monotonic()

    def poll() -> None:
        nonlocal since
        if is_silent(since, started):
            since = time.monotonic()
            logger.info("%s, %s so far", task, duration(since - started))

    if launched_rank() != 0:
        yield
        return
    with polling(poll):
        yield


class Meter:
    """A progress meter: call it with (done, total) as often as you like, within a `with` block.

    Called with (0, total) before the work begins, it also shows that the first piece is being worked on.
    """

    def __init__(
        self,
        verb: str,
        noun: str,
        *,
        enabled: bool = True,
        bar: bool = True,
        transient: bool = False,
    ) -> None:
        """Args:
        verb, noun: `encoded`, `clips`.
        enabled: print progress.
        bar: print a bar instead of lines on a terminal.
        transient: remove the bar when the work is done, and print no line for quick work.
        """
        self.verb = verb
        self.noun = noun
        self.enabled = enabled
        self.bar = bar
        self.transient = transient
        self.console = Console(stderr=True, soft_wrap=True)
        self._started = self._last_line = time.monotonic()
        self._progress: Bar | None = None
        self._counted = ExitStack()
        self._latest = 0, 0  # done and total
        self._lock = threading.Lock()

    def __enter__(self) -> Meter:
        self._started = self._last_line = time.monotonic()
        self._counted.enter_context(time_each_heartbeat(self.noun))
        if self.enabled and not self._has_bar:
            self._counted.enter_context(polling(self._poll))
        return self

    def __call__(self, done: int, total: int) -> None:
        if done:
            send_heartbeat()
        if not self.enabled or not total:
            return
        if self._has_bar:
            self._bar(total).update(_ONLY, completed=done)
            return
        with self._lock:
            self._latest = done, total
            if done == total and not self._is_quick:
                self._print()
        self._poll()

    def _poll(self) -> None:
        """Print a line if there is more to do and nothing was printed for some time."""
        with self._lock:
            done, total = self._latest
            if done < total and is_silent(self._last_line, self._started):
                self._print()

    def _print(self) -> None:
        self._last_line = time.monotonic()
        logger.info("%s", self.line(*self._latest))

    @property
    def _has_bar(self) -> bool:
        return self.bar and self.console.is_terminal

    @property
    def has_shown(self) -> bool:
        """True if progress has been printed."""
        return self._progress is not None or self._last_line > self._started

    @property
    def _is_quick(self) -> bool:
        """True if the end of the work would be its first line, which is not worth printing."""
        return self.transient and not self.has_shown

    def line(self, done: int, total: int) -> str:
        """Return `encoded 120 of 5000 clips, 3.2/s, 25 min left`."""
        seconds = max(time.monotonic() - self._started, 1e-6)
        if not done:
            return f"{self.verb} 0 of {total} {self.noun}, {duration(seconds)} so far"
        rate = done / seconds
        rate_text = f"{rate:.3g}/s" if rate >= 1 else f"{seconds / max(done, 1):.3g} s each"
        left_text = "" if done == total else f", {duration((total - done) / rate) if rate else 'unknown time'} left"
        return f"{self.verb} {done} of {total} {self.noun}, {rate_text}{left_text}"

    def __exit__(self, *_: object) -> None:
        self._counted.close()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _bar(self, total: int) -> Bar:
        if self._progress is None:
            self._progress = Bar(
                TextColumn(f"[bold]{self.verb} {self.noun}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=self.transient,
            )
            self._progress.add_task("", total=total)
            self._progress.start()
        return self._progress


class Stages:
    """A meter for each stage of some work; call it with (stage, done, total) within a `with` block.

    A stage that ends before its first line is due prints nothing.
    """

    def __init__(self, *, bars: bool = True) -> None:
        """Make the meters; with `bars`, a terminal gets bars instead of lines."""
        self.bars = bars
        self._stage = ""
        self._meter: Meter | None = None

    def __enter__(self) -> Stages:
        return self

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._meter is None or stage != self._stage:
            self.__exit__()
            verb, _, noun = stage.partition(" ")
            self._stage, self._meter = stage, Meter(verb, noun, bar=self.bars, transient=True)
        if done < total or self._meter.has_shown:
            self._meter(done, total)

    def __exit__(self, *_: object) -> None:
        """End the last stage."""
        if self._meter is not None:
            self._meter.__exit__()
