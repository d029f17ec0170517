"""Measured memory and time of a run by phase: peaks of the device and of the host, for metrics and the final table."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from finetrainers.parallel.ranks import DistributedContext
from finetrainers.utils.host_memory import Room, room, take_peak, workers_bytes
from finetrainers.utils.phases import (
    CHECKPOINT,
    ENCODING_CLIPS,
    ENCODING_TEXT,
    LOADING,
    PHASES,
    REWARD,
    ROLLOUT,
    TRAINING_STEP,
    VALIDATION,
    observed_by,
)

logger = logging.getLogger(__name__)

#: The most memory at once, in GiB: `allocated` by tensors on the device, `reserved` for them by torch's allocator, and
#: `host`, resident memory of the process and of its workers. Without a GPU, host memory alone.
Peak = Mapping[str, float]

_GIB = 2**30
#: Figures of a whole run, as earlier versions of finetrainers named and published them.
BEFORE_TRAINING, BEFORE_VALIDATION = "memory_before_training", "memory_before_validation"
AFTER_VALIDATION, AFTER_TESTING = "memory_after_validation", "memory_after_testing"
FIGURES = (BEFORE_TRAINING, BEFORE_VALIDATION, AFTER_VALIDATION, AFTER_TESTING)
#: The phases of training itself.
_TRAINING = (ROLLOUT, REWARD, TRAINING_STEP, CHECKPOINT)
#: Phases whose time no other number has: those of training have `step_s`, `checkpoint_s` and the method's numbers.
_TIMED = (LOADING, ENCODING_TEXT, ENCODING_CLIPS, VALIDATION)
#: Seconds between readings of the host's memory, and multiples of the time of a reading, at least.
_PERIOD_S, _TIMES = 1.0, 200
#: The host's memory is nearly full if less than this share, and less than this many bytes, are left.
_LOW_SHARE, _LOW_BYTES = 0.05, 2 * _GIB


class MemoryRecorder:
    """Recorder of the peaks of each phase (`utils.phases`): when it ends, and whenever they are requested.

    A phase that others interrupt is measured in parts, each with its own peaks. Nothing waits for the device. A thread
    reads the memory of the workers, and what the machine has left, once a second.

    Attributes:
        device: whose memory is measured.
        peaks: of each phase, since this process began.
        figures: of the run by name, as far as they are known.
        on_low: called when the host's memory has become nearly full, from another thread.
        all_peaks: `peaks` and `figures`, the greatest of all processes; empty until `agree`.
    """

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: whose memory is measured.
        """
        self.peaks: dict[str, Peak] = {}
        self.figures: dict[str, Peak] = {}
        self.all_peaks: dict[str, Peak] = {}
        self.device = device
        self.on_low: Callable[[Room], None] | None = None
        self._phase: str | None = None
        self._since: dict[str, Peak] = {}  # peaks that no record has yet
        self._unlogged: dict[str, Peak] = {}  # figures that no record has yet
        self._workers = 0.0
        self._seconds: dict[str, float] = {}  # of phases, that no record has yet
        self._measured_at = time.perf_counter()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Record within the block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="memory", daemon=True)
        self._measure()  # peaks before this belong to no phase
        thread.start()
        try:
            with observed_by(self):
                yield
        finally:
            ended.set()
            thread.join()

    def enter(self, phase: str | None) -> None:
        """Begin a phase of the process."""
        self._close()
        self._phase = phase

    def begin_training(self) -> None:
        """Set the figure of loading and encoding, which have ended."""
        self._set(BEFORE_TRAINING, self._peak(phase for phase in PHASES if phase not in _TRAINING))

    def record(self) -> dict[str, float]:
        """Return peaks and seconds since the last record: `memory/training_step/host_gib`, `phase_s/validation`."""
        self._close()
        peaks = {f"memory/{phase}": self._since[phase] for phase in PHASES if phase in self._since} | self._unlogged
        seconds = {f"phase_s/{phase}": round(self._seconds[phase], 3) for phase in _TIMED if phase in self._seconds}
        self._since, self._unlogged, self._seconds = {}, {}, {}
        gib = {f"{name}/{kind}_gib": round(gib, 4) for name, peak in peaks.items() for kind, gib in peak.items()}
        return gib | seconds

    def record_of_validation(self, *, is_last: bool) -> dict[str, float] | None:
        """Return a record with the run's figures, or None if nothing was sampled or evaluated since the last record.

        Args:
            is_last: whether no step will follow.
        """
        sampled = self._since.get(VALIDATION)
        if sampled is None:
            return None
        training = self._peak(_TRAINING)
        if training is not None:
            self._set(BEFORE_VALIDATION, training)
            self._set(AFTER_VALIDATION, greatest(training, self.peaks[VALIDATION]))
        if is_last:
            self._set(AFTER_TESTING, sampled)
        return self.record()

    def agree(self, parallel: DistributedContext) -> None:
        """Set `all_peaks`, the maximum over processes; every process must call it."""
        self._close()
        shares = parallel.gather_objects([self.peaks | self.figures])
        by_name = {name: [share[name] for share in shares if name in share] for name in (*PHASES, *FIGURES)}
        self.all_peaks = {name: greatest(*peaks) for name, peaks in by_name.items() if peaks}

    def highest_peak(self) -> float | None:
        """Return the greatest peak in GiB, allocated on a GPU, else of the host, or None before the first."""
        peak = self._peak(PHASES)
        return None if peak is None else peak.get("allocated", peak["host"])

    def _set(self, figure: str, peak: Peak | None) -> None:
        if peak is not None:
            self.figures[figure] = self._unlogged[figure] = peak

    def _peak(self, phases: Iterable[str]) -> Peak | None:
        peaks = [self.peaks[phase] for phase in phases if phase in self.peaks]
        return greatest(*peaks) if peaks else None

    def _close(self) -> None:
        """Measure the peaks and the time since the last measurement."""
        peak, now = self._measure(), time.perf_counter()
        seconds, self._measured_at = now - self._measured_at, now
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + seconds
            for peaks in (self._since, self.peaks):
                previous = peaks.get(self._phase)
                peaks[self._phase] = peak if previous is None else greatest(previous, peak)

    def _measure(self) -> Peak:
        """Return the peaks since the last call, and reset them."""
        workers, self._workers = self._workers, 0.0
        host = {"host": take_peak() / _GIB + workers}
        if self.device.type != "cuda":
            return host
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not stats:  # nothing has used the device yet
            return host
        torch.cuda.reset_peak_memory_stats(self.device)
        peaks = {name: stats[f"{name}_bytes"]["all"]["peak"] / _GIB for name in ("allocated", "reserved")}
        return {**peaks, **host}

    def _watch(self, ended: threading.Event) -> None:
        """Measure the memory of the workers, and what the host has left."""
        took_s, was_low = 0.0, False
        while not ended.wait(max(_PERIOD_S, _TIMES * took_s)):
            started = time.perf_counter()
            self._workers = max(self._workers, workers_bytes() / _GIB)
            left = room()
            is_low = left.available < min(_LOW_SHARE * left.total, _LOW_BYTES)
            if is_low and not was_low and self.on_low is not None:
                self.on_low(left)
            was_low = is_low
            took_s = time.perf_counter() - started


def greatest(*peaks: Peak) -> Peak:
    """Return the greatest of each number."""
    names = dict.fromkeys(name for peak in peaks for name in peak)
    return {name: max(peak[name] for peak in peaks if name in peak) for name in names}
