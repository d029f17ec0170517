"""Memory of a run against its plan: a bar for each phase, curves over the steps, and the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    bars = [
        Bar(
            label(phase),
            measured.get(phase, {}).get(kind),
            measured.get(phase, {}).get("reserved") if kind == "allocated" else None,
            planned.get(phase, {}).get(kind),
        )
        for phase in PHASES
        if kind in measured.get(phase, {}) or kind in planned.get(phase, {})
    ]
    return Memory(_KINDS[kind], bars, _table(measured, planned))


def _table(
    measured: Mapping[str, Mapping[str, float]], planned: Mapping[str, Mapping[str, float]]
) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of planned and measured peaks by phase, in GiB."""
    columns = [(source, kind) for kind in _KINDS if any(kind in p for p in measured.values())
               for source in ("planned", "measured")
               if source == "measured" or any(kind in p for p in planned.values())]  # fmt: skip
    sources = {"planned": planned, "measured": measured}
    rows = [
        [
            label(phase),
            *(
                f"{v:.2f}" if (v := sources[source].get(phase, {}).get(kind)) is not None else ""
                for source, kind in columns
            ),
        ]
        for phase in measured
    ]
    return ["phase", *(f"{_KINDS[kind]}, {source}" for source, kind in columns)], rows


def memory_charts(runs: Sequence[RunRecords]) -> list[Chart]:
    """Return charts of the peaks over the steps, with their plans.

    One run has a line for each phase; several runs have a line each for their training step.
    """
    charts = [_single_run_chart(runs[0], kind) if len(runs) == 1 else _multi_run_chart(runs, kind) for kind in _KINDS]
    return [chart for chart in charts if chart.series]


def _heading(kind: str, quantity: str) -> str:
    return f"{_KINDS[kind][0].upper()}{_KINDS[kind][1:]}, {quantity} (GiB)"


def _single_run_chart(run: RunRecords, memory_type: str) -> Chart:
    series: list[Series] = []
    levels: list[Level] = []
    for phase in PHASES:
        points = _peaks(run, phase, memory_type)
        if len(points[0]) > (0 if phase == TRAINING_STEP else 2):  # a phase that happens once has a bar
            color = len(series) % COLORS
            series.append(Series(label(phase), points, color))
            levels += _levels(run, phase, memory_type, color, label(phase))
    return Chart(_heading(memory_type, "peak of each phase"), series, marks=list(marks_of(run)), levels=levels)


def _multi_run_chart(runs: Sequence[RunRecords], kind: str) -> Chart:
    series: list[Series] = []
    levels: list[Level] = []
    marks: list[Mark] = []
    for index, run in enumerate(runs):
        points, color = _peaks(run, TRAINING_STEP, kind), index % COLORS
        if points[0]:
            series.append(Series(run.name, points, color))
            levels += _levels(run, TRAINING_STEP, kind, color, run.name)
            marks += marks_of(run, color)
    return Chart(_heading(kind, "peak of a training step"), series, marks=marks, levels=levels)


def _peaks(run: RunRecords, phase: str, kind: str) -> Points:
    """Return the maximum of each step, which may have several records."""
    maxima: dict[float, float] = {}
    for step, gib in zip(*run.points(f"memory/{phase}/{kind}_gib"), strict=True):
        maxima[step] = max(gib, maxima.get(step, gib))
    return list(maxima), list(maxima.values())


def _levels(run: RunRecords, phase: str, kind: str, color: int, name: str) -> Iterator[Level]:
    planned = run.planned_memory().get(phase, {}).get(kind)
    if planned is not None:
        yield Level(planned, f"{name}: {planned:.2f} GiB planned", color)
