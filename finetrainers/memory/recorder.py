"""Measured memory and time of a run by phase: peaks of the device and of the host, for metrics and the final table."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from finetrainers.parallel.ranks import DistributedContext
from finetrainers.utils.host_memory import HostMemory, read_host_memory, take_peak_rss, workers_bytes
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
    register_phase_listener,
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
_TRAINING_PHASES = (ROLLOUT, REWARD, TRAINING_STEP, CHECKPOINT)
#: Phases whose time no other number has: those of training have `step_s`, `checkpoint_s` and the method's numbers.
_TIMED_PHASES = (LOADING, ENCODING_TEXT, ENCODING_CLIPS, VALIDATION)
#: Minimum seconds between readings of the host's memory, and minimum multiple of the time of a reading.
_PERIOD_S, _PERIOD_FACTOR = 1.0, 200
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
        on_low_memory: called when the host's memory has become nearly full, from another thread.
        all_peaks: `peaks` and `figures`, the greatest of all processes; empty until `gather_peaks`.
    """

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: whose memory is measured.
        """
        self.peaks: dict[str, Peak] = {}
        self.figures: dict[str, Peak] = {}
        self.all_peaks: dict[str, Peak] = {}
        self.device = device
        self.on_low_memory: Callable[[HostMemory], None] | None = None
        self._phase: str | None = None
        self._unlogged_peaks: dict[str, Peak] = {}  # peaks that no record has yet
        self._unlogged_figures: dict[str, Peak] = {}  # figures that no record has yet
        self._workers = 0.0
        self._phase_seconds: dict[str, float] = {}  # of phases, that no record has yet
        self._measured_at = time.perf_counter()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Record within the block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="memory", daemon=True)
        self._measure()  # peaks before this belong to no phase
        thread.start()
        try:
            with register_phase_listener(self):
                yield
        finally:
            ended.set()
            thread.join()

    def enter(self, phase: str | None) -> None:
        """Begin a phase of the process."""
        self._end_interval()
        self._phase = phase

    def begin_training(self) -> None:
        """Set the figure `memory_before_training`: the peak of loading and encoding, which have ended."""
        self._set(BEFORE_TRAINING, self._max_peak(phase for phase in PHASES if phase not in _TRAINING_PHASES))

    def take_record(self) -> dict[str, float]:
        """Return peaks and seconds since the last record: `memory/training_step/host_gib`, `phase_s/validation`."""
        self._end_interval()
        peaks = {
            f"memory/{phase}": self._unlogged_peaks[phase] for phase in PHASES if phase in self._unlogged_peaks
        } | self._unlogged_figures
        seconds = {
            f"phase_s/{phase}": round(self._phase_seconds[phase], 3)
            for phase in _TIMED_PHASES
            if phase in self._phase_seconds
        }
        self._unlogged_peaks, self._unlogged_figures, self._phase_seconds = {}, {}, {}
        gib = {f"{name}/{kind}_gib": round(gib, 4) for name, peak in peaks.items() for kind, gib in peak.items()}
        return gib | seconds

    def take_validation_record(self, *, is_last: bool) -> dict[str, float] | None:
        """Return a record with the run's figures, or None if nothing was sampled or evaluated since the last record.

        Args:
            is_last: whether no step will follow.
        """
        sampled = self._unlogged_peaks.get(VALIDATION)
        if sampled is None:
            return None
        training = self._max_peak(_TRAINING_PHASES)
        if training is not None:
            self._set(BEFORE_VALIDATION, training)
            self._set(AFTER_VALIDATION, max_peaks(training, self.peaks[VALIDATION]))
        if is_last:
            self._set(AFTER_TESTING, sampled)
        return self.take_record()

    def gather_peaks(self, parallel: DistributedContext) -> None:
        """Set `all_peaks`, the maximum over processes; every process must call it."""
        self._end_interval()
        shares = parallel.gather_objects([self.peaks | self.figures])
        by_name = {name: [share[name] for share in shares if name in share] for name in (*PHASES, *FIGURES)}
        self.all_peaks = {name: max_peaks(*peaks) for name, peaks in by_name.items() if peaks}

    def highest_peak(self) -> float | None:
        """Return the greatest peak in GiB, allocated on a GPU, else of the host, or None before the first."""
        peak = self._max_peak(PHASES)
        return None if peak is None else peak.get("allocated", peak["host"])

    def _set(self, figure: str, peak: Peak | None) -> None:
        if peak is not None:
            self.figures[figure] = self._unlogged_figures[figure] = peak

    def _max_peak(self, phases: Iterable[str]) -> Peak | None:
        peaks = [self.peaks[phase] for phase in phases if phase in self.peaks]
        return max_peaks(*peaks) if peaks else None

    def _end_interval(self) -> None:
        """Add the peaks and the time since the last measurement to the current phase."""
        peak, now = self._measure(), time.perf_counter()
        seconds, self._measured_at = now - self._measured_at, now
        if self._phase is not None:
            self._phase_seconds[self._phase] = self._phase_seconds.get(self._phase, 0.0) + seconds
            for peaks in (self._unlogged_peaks, self.peaks):
                previous = peaks.get(self._phase)
                peaks[self._phase] = peak if previous is None else max_peaks(previous, peak)

    def _measure(self) -> Peak:
        """Return the peaks since the last call, and reset them."""
        workers, self._workers = self._workers, 0.0
        host = {"host": take_peak_rss() / _GIB + workers}
        stats = torch.cuda.memory_stats_as_nested_dict(self.device) if self.device.type == "cuda" else {}
        if not stats:  # no GPU, or nothing has used it yet
            return host
        torch.cuda.reset_peak_memory_stats(self.device)
        peaks = {name: stats[f"{name}_bytes"]["all"]["peak"] / _GIB for name in ("allocated", "reserved")}
        return {**peaks, **host}

    def _watch(self, ended: threading.Event) -> None:
        """Measure the memory of the workers, and what the host has left."""
        took_s, was_low = 0.0, False
        while not ended.wait(max(_PERIOD_S, _PERIOD_FACTOR * took_s)):
            started = time.perf_counter()
            self._workers = max(self._workers, workers_bytes() / _GIB)
            left = read_host_memory()
            is_low = left.available < min(_LOW_SHARE * left.total, _LOW_BYTES)
            if is_low and not was_low and self.on_low_memory is not None:
                self.on_low_memory(left)
            was_low = is_low
            took_s = time.perf_counter() - started


def max_peaks(*peaks: Peak) -> Peak:
    """Return the element-wise maximum of peaks."""
    names = dict.fromkeys(name for peak in peaks for name in peak)
    return {name: max(peak[name] for peak in peaks if name in peak) for name in names}
