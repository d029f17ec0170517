"""The progress line: the step and their number, the time left, and the headline numbers, as far as the width allows.

On a terminal it is a live line, never more than one row, and in a notebook a live output. Elsewhere each record is a
separate plain line.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from finetrainers.draw.notebook import Bundle, LiveOutput, progress_bundle
from finetrainers.utils.progress import is_silent, polling
from finetrainers.utils.text import duration

from .base import Callback, Record

if TYPE_CHECKING:
    from ..state import TrainState

_GAP = "  "
_RECENT = 20  # records that the average covers
_NAME = 26  # characters of a number's name, at most
_BAR = (10, 40)  # columns of the bar, at least and at most
#: An evaluation loss at one noise level.
_LEVEL = re.compile(r"(\w+)_(\d+\.\d+)")
#: What the run does between steps, by the watchdog's section.
_DOING = {"checkpoint": "saving", "sampling": "sampling"}

#: Priority and text of each field, in the order of display: a narrow line leaves out the highest numbers.
Fields = Sequence[tuple[int, str]]


class ProgressLine(Callback):
    """Line of step, time left, headline numbers, seconds a step, gradient norm, learning rate, memory, elapsed time."""

    # These are set at the start of the run.
    _state: TrainState
    clock: Clock
    _started: float  # when the section of the watchdog began, as far as a line without a live one needs it
    _last_line: float
    _section = ""

    def __init__(
        self, *, headline: Sequence[str] = ("loss",), console: Console | None = None, notebook: bool = False
    ) -> None:
        """Args:
        headline: see `Method.headline`.
        console: console to print to; default: standard output.
        notebook: whether the live line is an output of a notebook.
        """
        self.headline = tuple(headline)
        self.console = console or Console(soft_wrap=True, highlight=False)
        self.notebook = notebook
        self._live: Live | LiveOutput | None = None
        self._latest: Record = {}  # of the headline
        self._record: Record = {}  # the last one of training
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._has_ended = False
        self._background = ExitStack()

    def on_start(self, state: TrainState) -> None:
        self._state = state
        self._has_ended = False
        self.clock = Clock()
        if self.notebook:
            self._live = LiveOutput(self._bundle)
            self._live.start()
        elif self.console.is_terminal:
            # Lines of the log go above it, unless they go elsewhere.
            to_terminal = sys.stderr.isatty()
            self._live = Live(self, console=self.console, refresh_per_second=4, redirect_stderr=to_terminal)
            self._live.start()
            self.console.show_cursor(True)  # a process that is ended at once would leave it hidden
        else:
            self._started = self._last_line = time.monotonic()
            self._background.enter_context(polling(self._poll))

    def _poll(self) -> None:
        """Print what takes long before the first step has ended and between steps; a live line has it anyway."""
        section = self._state.watchdog.section or ""
        if section != self._section:
            self._section, self._started = section, time.monotonic()
        doing = self._state.doing or _DOING.get(section) or ("" if self._record else "first step")
        if doing and is_silent(max(self._last_line, self._started), self._started):
            self._print([f"step {self._step()}", doing, f"{duration(time.monotonic() - self._started)} so far"])

    def on_log(self, state: TrainState, record: Record) -> None:
        if all(name.startswith(("step", "memory", "phase_s")) for name in record):
            return
        headline = {name: value for name, value in record.items() if _matches(name, self.headline)}
        if "step_s" not in record:  # an evaluation
            self._latest.update(headline)
            self._print([f"step {self._step()}", *_evaluation(record)])
            return
        self._latest = {name: value for name, value in self._latest.items() if name not in self._record} | headline
        self._record = record
        first = next(self._headlines(), None)
        if first in headline:
            self._recent.append(headline[first])
        self.clock.tick(steps=int(record.get("steps", 1)), step_s=record["step_s"])
        if self._live is None:
            step, *others = (text for _, text in self._fields())
            self._print([f"step {step}", *others])

    def on_stop(self, state: TrainState) -> None:
        self._background.close()
        if self._live is not None:
            self._has_ended = True
            self._live.stop()
            self._live = None

    def _print(self, fields: Iterable[str]) -> None:
        """Print a line above a terminal's live one, wrapped where it is too long; elsewhere, print one line."""
        self._last_line = time.monotonic()
        if self._live is None or self.notebook:
            # As rich would, but it takes a good part of a millisecond, at every step of a small model.
            self.console.file.write(f"{_GAP.join(fields)}\n")
            self.console.file.flush()
            return
        for line in _wrapped(fields, self.console.width):
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _step(self) -> str:
        total = str(self._state.total_steps)
        return f"{self._state.step:>{len(total)}}/{total}"

    def _bundle(self) -> Bundle:
        """Return the line as the output of a notebook."""
        step, *others = (text for _, text in self._fields())
        text = _GAP.join([f"step {step}", *others])
        return progress_bundle(self._state.step, self._state.total_steps, text)

    # ---- the line ----------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fields = self._fields()
        width = options.max_width
        visible = fit(fields, width)
        columns = width - len(_GAP.join([*visible, ""])) if len(visible) == len(fields) else 0
        if columns < _BAR[0]:
            yield Text(_GAP.join(visible), no_wrap=True, overflow="crop")
            return
        yield Text(visible[0], end=_GAP)
        yield ProgressBar(self._state.total_steps, self._state.step, width=min(columns, _BAR[1]))
        yield Text(_GAP.join(["", *visible[1:]]), no_wrap=True, overflow="crop")

    def _fields(self) -> Fields:
        step, total, record = self._state.step, self._state.total_steps, self._record
        is_last = step == total or self._has_ended
        left = self.clock.left_s(total - step)
        time_left = f"took {clock_time(self.clock.elapsed_s())}" if is_last else f"left {clock_time(left)}"
        fields = [(0, self._step()), (1, time_left)]
        doing = self._state.doing or _DOING.get(self._state.watchdog.section or "")
        if self._live is not None and doing and (self._state.doing or not is_last):
            fields.append((2, doing))
        if record and "loss" not in record:
            # A step without micro-batches, or one whose update was left out.
            fields.append((2, "not finite, skipped" if "nonfinite_steps" in record else "nothing to learn"))
        for index, name in enumerate(self._headlines()):
            fields.append((3 if index == 0 else 5, f"{self._label(name)} {number(self._latest[name])}"))
            if index == 0 and len(self._recent) > 1:
                fields.append((6, f"avg {number(sum(self._recent) / len(self._recent))}"))
        if record:
            fields.append((4, f"{record['step_s']:.3g} s/step"))
            if "grad_norm" in record:
                fields.append((7, f"grad {record['grad_norm']:.3g}"))
            if "lr" in record:
                fields.append((8, f"lr {record['lr']:.2e}"))
            if (memory := self._state.memory.highest_peak()) is not None:
                fields.append((9, f"mem {memory:.1f} GiB"))
        return fields if is_last else [*fields, (10, f"elapsed {clock_time(self.clock.elapsed_s())}")]

    def _headlines(self) -> Iterator[str]:
        """Yield the headline names that have values, most important first; evaluations have separate plain lines."""
        record = self._record if self._live is None else self._latest
        names = [name for pattern in self.headline for name in record if _matches(name, (pattern,))]
        yield from dict.fromkeys(names)  # a number may be named by itself and with others

    def _label(self, name: str) -> str:
        """Return the label of a number: its kind alone, if it is the only one of that kind."""
        prefix, _, suffix = name.partition("/")
        if suffix and sum(other.startswith(f"{prefix}/") for other in self._latest) == 1:
            return prefix
        return name if len(name) <= _NAME else f"{name[: _NAME - 2]}.."


class Clock:
    """Clock of a run: elapsed time, and time left by recent steps and the average time between steps."""

    def __init__(self) -> None:
        self._started = self._first = self._ticked = time.monotonic()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._steps = 0
        self._busy = 0.0

    def tick(self, *, steps: int, step_s: float) -> None:
        """Count `steps` since the last tick, each of `step_s` seconds."""
        self._ticked = time.monotonic()
        if not self._steps:
            self._first = self._ticked - steps * step_s
        self._steps += steps
        self._busy += steps * step_s
        self._recent.append((steps, step_s))

    def elapsed_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._started

    def left_s(self, steps: int) -> float | None:
        """Return the seconds that `steps` more steps will take, or None before the first."""
        if not self._steps:
            return None
        step_s = sum(n * seconds for n, seconds in self._recent) / sum(n for n, _ in self._recent)
        between_s = max(0.0, self._ticked - self._first - self._busy) / self._steps
        return max(0.0, steps * (step_s + between_s) - (time.monotonic() - self._ticked))


def fit(fields: Fields, width: int) -> list[str]:
    """Return the fields that fit in `width`, chosen by priority; priority 0 is always kept."""
    fitting: set[int] = set()
    columns = width + len(_GAP)
    for index in sorted(range(len(fields)), key=lambda index: fields[index][0]):
        priority, text = fields[index]
        columns -= len(text) + len(_GAP)
        if columns < 0 and priority:
            break
        fitting.add(index)
    return [text for index, (_, text) in enumerate(fields) if index in fitting]


def number(value: float) -> str:
    """Format a number in at most nine characters, of steady width where it hovers: `0.0421`, `12.34`, `1.20e-05`."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.4g}" if 10 <= abs(value) < 1e5 else f"{value:.2e}"


def clock_time(seconds: float | None) -> str:
    """Format seconds as `1:02` or `3:04:05`; `-:--` if unknown."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@lru_cache(maxsize=1024)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name.startswith(pattern) if pattern.endswith("/") else name == pattern for pattern in patterns)


def _evaluation(record: Mapping[str, float]) -> list[str]:
    """Return fields of an evaluation: `eval_loss 0.4312`, `by noise level`, `0.10: 0.5794`; shared prefixes once."""
    fields: list[str] = []
    current_prefix = ""
    for name, value in record.items():
        if name == "step" or "_error/" in name:  # standard errors are in the records
            continue
        level = _LEVEL.fullmatch(name)
        prefix, _, suffix = (level[1], "", level[2]) if level else name.partition("/")
        if suffix and prefix != current_prefix:
            current_prefix = prefix
            fields.append("by noise level" if level else prefix)
        fields.append(f"{suffix}: {number(value)}" if suffix else f"{name} {number(value)}")
    return fields


def _wrapped(fields: Iterable[str], width: int) -> Iterator[str]:
    """Yield lines of at most `width` columns, broken between fields, all but the first indented."""
    line = ""
    for field_text in fields:
        if line and len(line) + len(_GAP) + len(field_text) > width:
            yield line
            line = _GAP
        line += (_GAP if line.strip() else "") + field_text
    yield line
