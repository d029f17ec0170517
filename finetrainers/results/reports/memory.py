"""Memory of a run against its plan: a bar for each phase, curves over the steps, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetrainers.draw.curves import Points
from finetrainers.draw.svg_chart import COLORS, Chart, Level, Mark, Series
from finetrainers.rundir.run_records import RunRecords
from finetrainers.utils.phases import PHASES, TRAINING_STEP, label

from .charts import marks_of

#: Titles of memory types, by their names in `metrics.jsonl` and in the plan.
_KINDS = {"allocated": "GPU memory, allocated", "reserved": "GPU memory, reserved", "host": "host memory"}


@dataclass(frozen=True)
class Bar:
    """Peak of a phase, in GiB.

    Attributes:
        phase: its title.
        peak: measured, or None if it was not measured.
        reserved: by torch's allocator, or None on a CPU.
        planned: estimated, or None without an estimate.
    """

    phase: str
    peak: float | None
    reserved: float | None = None
    planned: float | None = None

    @property
    def text(self) -> str:
        """Numbers of the bar."""
        peak = "not measured" if self.peak is None else f"{self.peak:.2f}"
        reserved = "" if self.reserved is None else f", reserved {self.reserved:.2f}"
        return peak + reserved + ("" if self.planned is None else f", plan {self.planned:.2f}")


@dataclass(frozen=True)
class Memory:
    """Memory of a run: title, bars, and a table of all numbers."""

    title: str
    bars: Sequence[Bar]
    table: tuple[list[str], list[list[str]]]

    @property
    def maximum(self) -> float:
        """Right end of the bars."""
        values = [v for bar in self.bars for v in (bar.peak, bar.reserved, bar.planned) if v is not None]
        return max(values) or 1.0


def summarize_memory(run: RunRecords) -> Memory | None:
    """Return the peaks of each phase, or None if nothing was measured."""
    measured, planned = run.measured_memory(), run.planned_memory()
    kind = next((kind for kind in _KINDS if any(kind in peak for peak in measured.values())), None)
    if kind is None:
        return None
    bars = []
    for phase in PHASES:
        peak, plan = measured.get(phase, {}), planned.get(phase, {})
        if kind in peak or kind in plan:
            reserved = peak.get("reserved") if kind == "allocated" else None
            bars.append(Bar(label(phase), peak.get(kind), reserved, plan.get(kind)))
    return Memory(_KINDS[kind], bars, _table(measured, planned))


def _table(
    measured: Mapping[str, Mapping[str, float]], planned: Mapping[str, Mapping[str, float]]
) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of planned and measured peaks by phase, in GiB."""
    sources = {"planned": planned, "measured": measured}
    columns = [(source, kind) for kind in _KINDS if any(kind in peak for peak in measured.values())
               for source, peaks in sources.items() if any(kind in peak for peak in peaks.values())]  # fmt: skip
    rows = []
    for phase in measured:
        values = [sources[source].get(phase, {}).get(kind) for source, kind in columns]
        rows.append([label(phase), *("" if value is None else f"{value:.2f}" for value in values)])
    return ["phase", *(f"{_KINDS[kind]}, {source}" for source, kind in columns)], rows


def memory_charts(runs: Sequence[RunRecords]) -> list[Chart]:
    """Return charts of the peaks over the steps, with their plans.

    One run has a line for each phase; several runs have a line each for their training step.
    """
    return [chart for chart in (_chart(runs, kind) for kind in _KINDS) if chart.series]


def _chart(runs: Sequence[RunRecords], kind: str) -> Chart:
    several = len(runs) > 1
    lines = [(run, TRAINING_STEP, run.name) for run in runs]
    if not several:
        lines = [(runs[0], phase, label(phase)) for phase in PHASES]
    series: list[Series] = []
    levels: list[Level] = []
    marks: list[Mark] = [] if several else list(marks_of(runs[0]))
    for index, (run, phase, name) in enumerate(lines):
        points = _peaks(run, phase, kind)
        if len(points[0]) <= (0 if phase == TRAINING_STEP else 2):  # a phase that happens once has a bar
            continue
        color = (index if several else len(series)) % COLORS
        series.append(Series(name, points, color))
        if (planned := run.planned_memory().get(phase, {}).get(kind)) is not None:
            levels.append(Level(planned, f"{name}: {planned:.2f} GiB planned", color))
        if several:
            marks += marks_of(run, color)
    quantity = "peak of a training step" if several else "peak of each phase"
    return Chart(f"{_KINDS[kind][0].upper()}{_KINDS[kind][1:]}, {quantity} (GiB)", series, marks=marks, levels=levels)


def _peaks(run: RunRecords, phase: str, kind: str) -> Points:
    """Return the maximum of each step, which may have several records."""
    maxima: dict[float, float] = {}
    for step, gib in zip(*run.points(f"memory/{phase}/{kind}_gib"), strict=True):
        maxima[step] = max(gib, maxima.get(step, gib))
    return list(maxima), list(maxima.values())
