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
from finetrainers.utils.alive import register_watchdog
from finetrainers.utils.backstop import Backstop
from finetrainers.utils.exit_codes import HUNG
from finetrainers.utils.faults import min_hang_seconds
from finetrainers.utils.running_time import TICK_S, RunningClock

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
_UNEVEN_SECTIONS = ("loading", "encoding", "exporting", "uploading")
#: Minimum number of earlier durations for an adaptive limit, and maximum number that it is computed from.
_MIN_DURATIONS, _MAX_DURATIONS = 3, 101
#: Multiples of the median of earlier occurrences after which an adaptive limit warns, and ends the process.
_WARN_FACTOR, _END_FACTOR = 10, 20
#: Minimum seconds from a limit of the user until the backstop ends the process, which needs no Python to run there. It
#: is set rarely: it is left alone while it fires within twice this.
_BACKSTOP_S = 10.0
#: Where limits adapt, it fires if no Python has run for `_STALLED_FACTOR` to `_STALLED_FACTOR + 1` times
#: `min_hang_seconds`.
_STALLED_FACTOR = 5


@dataclass
class _Clock:
    """The occurrence of a section that a thread is in.

    Attributes:
        section: its name.
        work_key: key of the occurrences that it can be compared with, or None if it can be compared with none.
        per_heartbeat: whether each heartbeat begins another occurrence.
        started: when it began, later by the time that was spent waiting for other processes.
        warn_at, end_at: when it counts as slow, and as hung.
        paused: when this process began to wait for others, or None if it is not waiting.
    """

    section: str
    work_key: Hashable | None = None
    per_heartbeat: bool = False
    started: float = 0.0
    warn_at: float = math.inf
    end_at: float = math.inf
    paused: float | None = None

    @property
    def due(self) -> float:
        """The time at which the watchdog must act."""
        return min(self.warn_at, self.end_at)


class _Durations:
    """Seconds that occurrences of one kind have taken."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self.longest = self.median = 0.0

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.longest, self.median = max(self.longest, seconds), statistics.median(self.seconds)

    def limits(self) -> tuple[float, float]:
        """Return the seconds after which an occurrence is slow, and hung; a duration that was survived once is neither.

        A run is ended after ten minutes at the earliest, and always reports the section at half of its time.
        """
        if len(self.seconds) < _MIN_DURATIONS:
            return math.inf, math.inf
        ends = max(min_hang_seconds(), _END_FACTOR * self.median, 2 * self.longest)
        return ends * _WARN_FACTOR / _END_FACTOR, ends


class Watchdog:
    """Watchdog that ends this process when a section outlasts its limit, and writes the stacks of all threads.

    Usage: `with watchdog.running(): ... watchdog.enter("step") ...`; entering a section leaves the one before. A
    second thread has its own clock: `with watchdog.in_thread("checkpoint"): ...`. A heartbeat (`utils.alive`) restarts
    the section's clock: work that makes progress is not ended, however long it takes. While the process is suspended,
    time stands still.

    A limit that the user did not set adapts to the section: see `_Durations.limits`. Only occurrences of one kind are
    compared. Work without a kind has no such limit: user code, work that a run does once, and uploads.

    Attributes:
        section: the section that was entered last.
        exit_code: exit code of a command's process that is ended in the section `closing`.
        on_slow: called in a thread with a section, its seconds and their median, when an adaptive limit warns.
    """

    def __init__(
        self, directory: Path, *, rank: int, limits: Mapping[str, float | None], step_wait_s: float = 0.0,
        owns_process: bool = False,
    ) -> None:  # fmt: skip
        """Args:
        directory: gets `rank-N.txt` with the stacks.
        rank: of this process.
        limits: seconds that each section may take, 0 for any time, None for a limit that adapts.
        step_wait_s: how long a step may wait on the device for other processes, which may have more to do in it.
        owns_process: whether the process exits after the run: its exit code is the run's, and this watchdog may set
            the backstop even where no limit of the user holds.
        """
        self.file = directory / f"rank-{rank}.txt"
        self.limits = dict(limits)
        self.section: str | None = None
        self.exit_code = HUNG
        self.on_slow: Callable[[str, float, float], None] = lambda section, seconds, median: None
        self._step_wait_s = step_wait_s
        self._owns_process = owns_process
        self._stalled_s = _STALLED_FACTOR * min_hang_seconds() if owns_process else math.inf
        self._changed = threading.Condition()
        self._clocks: dict[str, _Clock] = {}  # by thread
        self._durations: dict[tuple[str, Hashable], _Durations] = {}
        self._threads: dict[int, str] = {}  # clocks of threads that have one
        self._running = self._keeps_file = False
        self._descriptor = -1
        self._next_check_at = math.inf  # of the thread
        self._timer_fires_at = math.inf  # the backstop
        self._time = RunningClock()

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
        step_wait_s = float(run.nccl_timeout) if num_ranks > 1 else 0.0
        hangs = (directory or run.output_dir) / "hangs"
        return cls(hangs, rank=rank, limits=limits, step_wait_s=step_wait_s, owns_process=owns_process)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch sections within the block; do nothing if all limits are 0."""
        if all(limit == 0 for limit in self.limits.values()):
            yield
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Opened now: a disk that hangs later must not keep the stacks from it.
        self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._backstop = Backstop(self._descriptor)
        self._running = True
        self._clocks.clear()
        self._threads = {threading.get_ident(): "main"}
        self._next_check_at = self._timer_fires_at = math.inf
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            with register_watchdog(self):
                yield
        finally:
            with self._changed:
                self._running = False
                self._changed.notify()
            thread.join()
            self._backstop.close()
            os.close(self._descriptor)
            if not self._keeps_file:
                self.file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other ranks may still have theirs there
                self.file.parent.rmdir()

    def enter(self, section: str, work_key: Hashable | None = None) -> None:
        """Start the section's clock.

        Args:
            section: one of `SECTIONS`.
            work_key: key of comparable occurrences, or None if they have no adaptive limit.

        Raises:
            KeyError: the section is unknown.
        """
        self._start_clock("main", section, work_key)
        self.section = section

    def begin_work(self, work_key: Hashable | None, *, per_heartbeat: bool = False) -> None:
        """Start the clock of another kind of work of the same section, if its limit adapts; see `alive.begin_work`."""
        section = self.section
        if section is None or section == "closing" or self.limits[section] is not None or self._clock_name() != "main":
            return
        if per_heartbeat:
            self._durations.pop((section, work_key), None)
        self._start_clock("main", section, work_key, per_heartbeat=per_heartbeat)

    def on_heartbeat(self) -> None:
        """Restart the clock of the current section."""
        with self._changed:
            clock = self._clocks.get(self._clock_name() or "main")
            if clock is not None and clock.paused is None:
                if clock.per_heartbeat:
                    self._record_duration(clock)
                    clock.started = self._time.now()
                self._restart(clock)

    def pause(self, waiting: bool) -> None:
        """Stop the clock while this process waits for others, where the wait says nothing about its own work."""
        with self._changed:
            clock = self._clocks.get(self._clock_name() or "")
            if clock is None:
                return
            if clock.section not in _UNEVEN_SECTIONS and self.limits[clock.section] is not None:
                return
            if waiting:
                clock.paused, clock.warn_at, clock.end_at = self._time.now(), math.inf, math.inf
                self._schedule()
            elif clock.paused is not None:
                clock.started += self._time.now() - clock.paused
                clock.paused = None
                self._restart(clock)

    @contextlib.contextmanager
    def in_thread(self, section: str) -> Iterator[None]:
        """Hold the section's limit within the block as well, which one other thread may be in."""
        self._threads[threading.get_ident()] = "thread"
        self._start_clock("thread", section, "in a thread")
        try:
            yield
        finally:
            self._start_clock("thread", None)
            self._threads.pop(threading.get_ident(), None)

    def _clock_name(self) -> str | None:
        """Return the name of this thread's clock, or None if it has none."""
        return self._threads.get(threading.get_ident())

    def _start_clock(
        self, name: str, section: str | None, work_key: Hashable | None = None, *, per_heartbeat: bool = False
    ) -> None:
        """End the occurrence that the clock `name` measures, and start one of a section, unless it is None."""
        if section is not None:
            self.limits[section]  # an unknown section is an error even where nothing is limited
        with self._changed:
            if not self._running:
                return
            previous = self._clocks.pop(name, None)
            if previous is not None and not previous.per_heartbeat:
                self._record_duration(previous)
            if section is None:
                self._schedule()
            else:
                self._clocks[name] = clock = _Clock(section, work_key, per_heartbeat, started=self._time.now())
                self._restart(clock)

    def _record_duration(self, clock: _Clock) -> None:
        """Record the duration of an occurrence that ends now."""
        if clock.work_key is not None and self.limits[clock.section] is None:
            durations = self._durations.setdefault((clock.section, clock.work_key), _Durations())
            durations.add(self._time.now() - clock.started)

    def _restart(self, clock: _Clock) -> None:
        """Set the times at which a clock's occurrence counts as slow and as hung, from now on."""
        now, limit = self._time.now(), self.limits[clock.section]
        warns, ends = math.inf, limit or math.inf
        if limit is None and clock.section == "closing":
            ends = min_hang_seconds()
        elif limit is None and (durations := self._durations.get((clock.section, clock.work_key))) is not None:
            warns, ends = durations.limits()
            if clock.section == "step":
                warns, ends = warns + self._step_wait_s, ends + self._step_wait_s
        clock.warn_at, clock.end_at = now + warns if warns < ends else math.inf, now + ends
        self._schedule()

    def _schedule(self) -> None:
        """Wake the thread, and set the backstop, where a clock asks for it."""
        if min((clock.due for clock in self._clocks.values()), default=math.inf) < self._next_check_at:
            self._changed.notify()
        set_by_user = [clock.end_at for clock in self._clocks.values() if self.limits[clock.section] is not None]
        earliest = min(set_by_user, default=math.inf) + _BACKSTOP_S
        latest = earliest + _BACKSTOP_S
        if earliest == math.inf and self._stalled_s < math.inf:
            # Not by each clock, which would be set many times in a step.
            earliest = self._time.now() + self._stalled_s
            latest = earliest + min_hang_seconds()
        if not earliest <= self._timer_fires_at <= latest:
            self._timer_fires_at = latest
            self._backstop.set(max(_BACKSTOP_S, latest - self._time.now()))

    def _watch(self) -> None:
        with self._changed:
            while self._running:
                left, self._next_check_at = TICK_S, math.inf
                if self._stalled_s < math.inf:
                    self._schedule()
                if self._clocks:
                    clock = min(self._clocks.values(), key=lambda clock: clock.due)
                    self._next_check_at = clock.due
                    now = self._time.now()
                    if clock.end_at <= now:
                        self._give_up(clock)
                    if clock.warn_at <= now:
                        self._warn(clock, now)
                        continue
                    left = min(left, clock.due - now)
                self._changed.wait(left)

    def _warn(self, clock: _Clock, now: float) -> None:
        """Write stacks and an event; a disk that hangs must keep neither the run nor this thread waiting."""
        clock.warn_at = math.inf
        seconds, median = now - clock.started, self._durations[clock.section, clock.work_key].median
        message = (
            f"the section '{clock.section}' takes unusually long: {seconds:.0f} s, and the median of earlier ones is "
            f"{median:.1f} s; the process is ended in {clock.end_at - now:.0f} s if it shows no progress until then"
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
            message = (
                f"the run has ended, but closing it takes longer than {limit or min_hang_seconds():g} s (--{option})"
            )
        elif limit is not None:
            message = f"the section '{section}' took longer than its limit of {limit:g} s (--{option})"
        else:
            median, seconds = self._durations[section, clock.work_key].median, self._time.now() - clock.started
            message = (
                f"the section '{section}' has taken {seconds:.0f} s, and the median of earlier ones is {median:.1f} "
                f"s: it counts as hung (--{option} sets another limit, 0 none)"
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
