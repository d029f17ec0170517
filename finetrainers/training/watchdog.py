"""Time limits for the sections of a run: a hang ends the process, with the stacks of all threads on disk."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from finetrainers.config.sections import RunSection
from finetrainers.utils.alive import heard_by
from finetrainers.utils.exit_codes import HUNG
from finetrainers.utils.faults import ten_minutes

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
    "closing": "checkpoint_timeout",
}
#: Sections in which processes have very different amounts to do: the time in which one waits for others does not count.
_UNEVEN = ("loading", "encoding", "exporting", "uploading")
#: Earlier occurrences that an adaptive limit needs at least, and those that it remembers at most.
_LEARNED, _REMEMBERED = 3, 101
#: Multiples of the median of earlier occurrences after which an adaptive limit warns, and ends the process.
_WARNS, _ENDS = 10, 20
#: Seconds that the interpreter's own timer, which needs no Python to run, strikes after a limit of the user at the
#: earliest. It can only exit with 1. Arming it starts a thread, so it is left alone while it strikes within twice this.
_BACKSTOP_S = 10.0
#: Where limits adapt, the timer strikes if no Python has run for `_DEAD` to `_DEAD + 1` times ten minutes.
_DEAD = 5


@dataclass
class _Clock:
    """The occurrence of a section that a thread is in.

    Attributes:
        section: its name.
        kind: key of the occurrences that it can be compared with, or None if it can be compared with none.
        by_beats: whether each heartbeat begins another occurrence.
        started: when it began, later by the time that was spent waiting for other processes.
        warns, ends: when it counts as slow, and as hung.
        paused: when this process began to wait for others, or None if it is not waiting.
    """

    section: str
    kind: Hashable | None = None
    by_beats: bool = False
    started: float = 0.0
    warns: float = math.inf
    ends: float = math.inf
    paused: float | None = None

    @property
    def due(self) -> float:
        """The time at which the watchdog must act."""
        return min(self.warns, self.ends)


class _Durations:
    """Seconds that occurrences of one kind have taken."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self.longest = self.median = 0.0

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.longest, self.median = max(self.longest, seconds), statistics.median(self.seconds)

    def limits(self) -> tuple[float, float]:
        """Return the seconds after which an occurrence is slow, and hung; a duration that was survived once is neither.

        A run is ended after ten minutes at the earliest, and always reports the section at half of its time.
        """
        if len(self.seconds) < _LEARNED:
            return math.inf, math.inf
        ends = max(ten_minutes(), _ENDS * self.median, 2 * self.longest)
        return ends * _WARNS / _ENDS, ends


class Watchdog:
    """Watchdog that ends this process when a section outlasts its limit, and writes the stacks of all threads.

    Usage: `with watchdog.running(): ... watchdog.enter("step") ...`; entering a section leaves the one before. A
    second thread has its own clock: `with watchdog.in_thread("checkpoint"): ...`. A heartbeat (`utils.alive`) restarts
    the section's clock: work that makes progress is not ended, however long it takes.

    A limit that the user did not set adapts to the section: see `_Durations.limits`. Only occurrences of one kind are
    compared. Work without a kind has no such limit: user code, work that a run does once, and uploads.

    Attributes:
        section: the section that was entered last.
        exit_code: exit code of a command's process that is ended in the section `closing`.
        on_slow: called in a thread with a section, its seconds and their median, when an adaptive limit warns.
    """

    def __init__(
        self, directory: Path, *, rank: int, limits: Mapping[str, float | None], others_s: float = 0.0,
        owns_process: bool = False,
    ) -> None:  # fmt: skip
        """Args:
        directory: gets `rank-N.txt` with the stacks.
        rank: of this process.
        limits: seconds that each section may take, 0 for any time, None for a limit that adapts.
        others_s: how long a step may wait on the device for other processes, which may have more to do in it.
        owns_process: whether the process exits after the run: its exit code is the run's, and this watchdog may set
            the interpreter's timer even where no limit of the user holds.
        """
        self.file = directory / f"rank-{rank}.txt"
        self.limits = dict(limits)
        self.section: str | None = None
        self.exit_code = HUNG
        self.on_slow: Callable[[str, float, float], None] = lambda section, seconds, median: None
        self._others_s = others_s
        self._owns_process = owns_process
        self._dead_s = _DEAD * ten_minutes() if owns_process else math.inf
        self._changed = threading.Condition()
        self._clocks: dict[str, _Clock] = {}  # by thread
        self._durations: dict[tuple[str, Hashable], _Durations] = {}
        self._threads: dict[int, str] = {}  # clocks of threads that have one
        self._running = self._keeps_file = False
        self._descriptor = -1
        self._wakes = self._strikes = math.inf  # when the thread looks again, and when the interpreter's timer strikes

    @classmethod
    def of_run(
        cls,
        run: RunSection,
        *,
        rank: int,
        num_ranks: int = 1,
        directory: Path | None = None,
        owns_process: bool = False,
    ) -> Watchdog:
        """Return a watchdog with the limits of the options; stacks go to `directory`, by default that of the run."""
        limits = {section: getattr(run, option) for section, option in SECTIONS.items()}
        others_s = float(run.nccl_timeout) if num_ranks > 1 else 0.0
        hangs = (directory or run.output_dir) / "hangs"
        return cls(hangs, rank=rank, limits=limits, others_s=others_s, owns_process=owns_process)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch sections within the block; do nothing if all limits are 0."""
        if all(limit == 0 for limit in self.limits.values()):
            yield
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Opened now: a disk that hangs later must not keep the stacks from it.
        self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._running = True
        self._clocks.clear()
        self._threads = {threading.get_ident(): "main"}
        self._wakes = self._strikes = math.inf
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            with heard_by(self):
                yield
        finally:
            with self._changed:
                self._running = False
                if self._strikes < math.inf:
                    self._arm(math.inf)
                self._changed.notify()
            thread.join()
            os.close(self._descriptor)
            if not self._keeps_file:
                self.file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other ranks may still have theirs there
                self.file.parent.rmdir()

    def enter(self, section: str, kind: Hashable | None = None) -> None:
        """Start the section's clock.

        Args:
            section: one of `SECTIONS`.
            kind: key of comparable occurrences, or None if they have no adaptive limit.

        Raises:
            KeyError: the section is unknown.
        """
        self._set("main", section, kind)
        self.section = section

    def work(self, kind: Hashable | None, *, by_beats: bool = False) -> None:
        """Start the clock of another kind of work of the same section, if its limit adapts; see `alive.work`."""
        section = self.section
        if section is None or section == "closing" or self.limits[section] is not None or self._clock_name() != "main":
            return
        if by_beats:
            self._durations.pop((section, kind), None)
        self._set("main", section, kind, by_beats=by_beats)

    def beat(self) -> None:
        """Restart the clock of the current section."""
        with self._changed:
            clock = self._clocks.get(self._clock_name() or "main")
            if clock is not None and clock.paused is None:
                if clock.by_beats:
                    self._learn(clock)
                    clock.started = time.monotonic()
                self._restart(clock)

    def pause(self, waiting: bool) -> None:
        """Stop the clock while this process waits for others, where the wait says nothing about its own work."""
        with self._changed:
            clock = self._clocks.get(self._clock_name() or "")
            if clock is None:
                return
            if clock.section not in _UNEVEN and self.limits[clock.section] is not None:
                return
            if waiting:
                clock.paused, clock.warns, clock.ends = time.monotonic(), math.inf, math.inf
                self._schedule()
            elif clock.paused is not None:
                clock.started += time.monotonic() - clock.paused
                clock.paused = None
                self._restart(clock)

    @contextlib.contextmanager
    def in_thread(self, section: str) -> Iterator[None]:
        """Hold the section's limit within the block as well, which one other thread may be in."""
        self._threads[threading.get_ident()] = "thread"
        self._set("thread", section, "in a thread")
        try:
            yield
        finally:
            self._set("thread", None)
            self._threads.pop(threading.get_ident(), None)

    def _clock_name(self) -> str | None:
        """Return the name of this thread's clock, or None if it has none."""
        return self._threads.get(threading.get_ident())

    def _set(self, name: str, section: str | None, kind: Hashable | None = None, *, by_beats: bool = False) -> None:
        """End the occurrence that a clock is of, and start one of a section."""
        if section is not None:
            self.limits[section]  # an unknown section is an error even where nothing is limited
        with self._changed:
            if not self._running:
                return
            previous = self._clocks.pop(name, None)
            if previous is not None and not previous.by_beats:
                self._learn(previous)
            if section is None:
                self._schedule()
            else:
                self._clocks[name] = clock = _Clock(section, kind, by_beats, started=time.monotonic())
                self._restart(clock)

    def _learn(self, clock: _Clock) -> None:
        """Record the duration of an occurrence that ends now."""
        if clock.kind is not None and self.limits[clock.section] is None:
            durations = self._durations.setdefault((clock.section, clock.kind), _Durations())
            durations.add(time.monotonic() - clock.started)

    def _restart(self, clock: _Clock) -> None:
        """Set the times at which a clock's occurrence counts as slow and as hung, from now on."""
        now, limit = time.monotonic(), self.limits[clock.section]
        warns, ends = math.inf, limit or math.inf
        if limit is None and clock.section == "closing":
            ends = ten_minutes()
        elif limit is None and (durations := self._durations.get((clock.section, clock.kind))) is not None:
            warns, ends = durations.limits()
            if clock.section == "step":
                warns, ends = warns + self._others_s, ends + self._others_s
        clock.warns, clock.ends = now + warns if warns < ends else math.inf, now + ends
        self._schedule()

    def _schedule(self) -> None:
        """Wake the thread, and set the interpreter's timer, where a clock asks for it."""
        if min((clock.due for clock in self._clocks.values()), default=math.inf) < self._wakes:
            self._changed.notify()
        set_by_user = [clock.ends for clock in self._clocks.values() if self.limits[clock.section] is not None]
        earliest = min(set_by_user, default=math.inf) + _BACKSTOP_S
        latest = earliest + _BACKSTOP_S
        if earliest == math.inf and self._dead_s < math.inf:
            # Not by each clock, which would be set many times in a step.
            earliest, latest = time.monotonic() + self._dead_s, time.monotonic() + self._dead_s + ten_minutes()
        if not earliest <= self._strikes <= latest:
            self._arm(latest)

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
                if self._dead_s < math.inf:
                    self._schedule()
                    left = ten_minutes()
                if self._clocks:
                    clock = min(self._clocks.values(), key=lambda clock: clock.due)
                    self._wakes = clock.due
                    now = time.monotonic()
                    if clock.ends <= now:
                        self._give_up(clock)
                    if clock.warns <= now:
                        self._warn(clock, now)
                        continue
                    if clock.due < math.inf:
                        left = clock.due - now if left is None else min(left, clock.due - now)
                self._changed.wait(left)

    def _warn(self, clock: _Clock, now: float) -> None:
        """Write stacks and an event; a disk that hangs must keep neither the run nor this thread waiting."""
        clock.warns = math.inf
        seconds, median = now - clock.started, self._durations[clock.section, clock.kind].median
        message = (
            f"the section '{clock.section}' takes unusually long: {seconds:.0f} s, where the median of earlier ones is "
            f"{median:.1f} s; the process is ended in {clock.ends - now:.0f} s if it shows no progress until then"
        )
        self._keeps_file = True
        arguments = (message, clock.section, seconds, median)
        threading.Thread(target=self._report, args=arguments, name="watchdog-report", daemon=True).start()

    def _report(self, message: str, section: str, seconds: float, median: float) -> None:
        self._dump(message)
        logger.warning("%s; the stacks are in %s", message, self.file)
        self.on_slow(section, seconds, median)

    def _give_up(self, clock: _Clock) -> None:
        section, option = clock.section, SECTIONS[clock.section]
        limit, code = self.limits[section], HUNG
        if section == "closing":
            code = self.exit_code if self._owns_process else HUNG  # a host program may have more to do
            message = f"the run has ended, but closing it takes longer than {limit or ten_minutes():g} s (--{option})"
        elif limit is not None:
            message = f"the section '{section}' took longer than its limit of {limit:g} s (--{option})"
        else:
            median, seconds = self._durations[section, clock.kind].median, time.monotonic() - clock.started
            message = (
                f"the section '{section}' has taken {seconds:.0f} s, where the median of earlier ones is "
                f"{median:.1f} s: it counts as hung (--{option} sets another limit, 0 none)"
            )
        self._dump(message)
        logger.error("%s; the stacks are in %s", message, self.file)
        sys.stderr.flush()
        os._exit(code)

    def _dump(self, message: str) -> None:
        """Append a message and the stacks of all threads to the file."""
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(self._descriptor, f"{when} {socket.gethostname()} pid {os.getpid()}: {message}\n\n".encode())
        faulthandler.dump_traceback(file=self._descriptor, all_threads=True)
