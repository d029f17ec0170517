"""Time limits for the sections of a run: a hang ends the process, with the stacks of all threads on disk."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from finetrainers.config.sections import RunSection
from finetrainers.utils.alive import heard_by
from finetrainers.utils.exit_codes import HUNG

logger = logging.getLogger(__name__)

#: Sections of a run, in order, and the options that limit them.
SECTIONS = {
    "loading": "loading_timeout",
    "encoding": "step_timeout",
    "step": "step_timeout",
    "checkpoint": "checkpoint_timeout",
    "sampling": "sampling_timeout",
    "exporting": "checkpoint_timeout",
    "uploading": "loading_timeout",
}
#: In these, processes have very different amounts to do: the time in which one waits for the others does not count.
_UNEVEN = ("loading", "encoding", "exporting", "uploading")
#: How much later the interpreter's own timer strikes at the earliest, which needs no Python to run. It can only exit with 1.
#: Arming it starts a thread, so that it stays as it is while it strikes at most as much later again.
_BACKSTOP_S = 10.0


class Watchdog:
    """Ends this process when a section outlasts its limit, and writes down where every thread stood.

    Usage: `with watchdog.running(): ... watchdog.enter("step") ...`; entering a section leaves the one before. A
    second thread has a clock of its own: `with watchdog.in_thread("checkpoint"): ...`. A heartbeat (`utils.alive`) restarts
    the section's clock: what makes progress is not ended, however long it takes.
    """

    def __init__(self, directory: Path, *, rank: int, limits: Mapping[str, float | None]) -> None:
        """Args:
        directory: gets `rank-N.txt` with the stacks.
        rank: of this process.
        limits: seconds that each section may take, None for any time.
        """
        self.file = directory / f"rank-{rank}.txt"
        self.limits = dict(limits)
        self.section: str | None = None  # the one that was entered last
        self._changed = threading.Condition()
        self._clocks: dict[str, tuple[float, str]] = {}  # by thread: when its section must be over, and its name
        self._running = False
        self._descriptor = -1
        self._wakes = self._strikes = math.inf  # when the thread looks again, and when the interpreter's timer strikes

    @classmethod
    def of_run(cls, run: RunSection, *, rank: int, directory: Path | None = None) -> Watchdog:
        """With the limits that the options set; stacks go to the run directory, if none is given."""
        limits = {section: getattr(run, option) for section, option in SECTIONS.items()}
        return cls((directory or run.output_dir) / "hangs", rank=rank, limits=limits)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within the block, sections are watched. Without any limit it does nothing."""
        if not any(self.limits.values()):
            yield
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Opened now: a disk that hangs later must not keep the stacks from it.
        self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._running = True
        self._clocks.clear()
        self._wakes = self._strikes = math.inf
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            with heard_by(self):
                yield
        finally:
            with self._changed:
                self._running = False
                faulthandler.cancel_dump_traceback_later()
                self._changed.notify()
            thread.join()
            os.close(self._descriptor)
            self.file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other ranks may still have theirs there
                self.file.parent.rmdir()

    def enter(self, section: str) -> None:
        """Start the section's clock.

        Raises:
            KeyError: there is no such section.
        """
        self._set("main", section)
        self.section = section

    def beat(self) -> None:
        """Start the clock of the section in hand again."""
        if self.section is not None:
            self._set("main", self.section)

    def pause(self, waiting: bool) -> None:
        """Stop the clock while this process waits for others, where that says nothing about it."""
        if self.section in _UNEVEN:
            self._set("main", None if waiting else self.section)

    @contextlib.contextmanager
    def in_thread(self, section: str) -> Iterator[None]:
        """Within the block, which one other thread may be in, the section's limit holds too."""
        self._set("thread", section)
        try:
            yield
        finally:
            self._set("thread", None)

    def _set(self, clock: str, section: str | None) -> None:
        limit = None if section is None else self.limits[section]
        with self._changed:
            if not self._running:
                return
            self._clocks.pop(clock, None)
            if section is not None and limit is not None:
                self._clocks[clock] = (time.monotonic() + limit, section)
            deadline = min(self._clocks.values())[0] if self._clocks else math.inf
            if deadline < self._wakes:
                self._changed.notify()
            if not deadline + _BACKSTOP_S <= self._strikes <= deadline + 2 * _BACKSTOP_S:
                self._arm(deadline + 2 * _BACKSTOP_S)

    def _arm(self, strikes: float) -> None:
        """Have the interpreter's timer strike then, and not at any other time."""
        faulthandler.cancel_dump_traceback_later()
        self._strikes = strikes
        if strikes < math.inf:
            left = max(_BACKSTOP_S, strikes - time.monotonic())
            faulthandler.dump_traceback_later(left, file=self._descriptor, exit=True)

    def _watch(self) -> None:
        with self._changed:
            while self._running:
                left, self._wakes = None, math.inf
                if self._clocks:
                    deadline, section = min(self._clocks.values())
                    self._wakes = deadline
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self._give_up(section)
                self._changed.wait(left)

    def _give_up(self, section: str) -> None:
        limit = self.limits[section]
        message = f"the section '{section}' took longer than its limit of {limit:g} s (--{SECTIONS[section]})"
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(self._descriptor, f"{when} {socket.gethostname()} pid {os.getpid()}: {message}\n\n".encode())
        faulthandler.dump_traceback(file=self._descriptor, all_threads=True)
        logger.error("%s; the stacks are in %s", message, self.file)
        sys.stderr.flush()
        os._exit(HUNG)
