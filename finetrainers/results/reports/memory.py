"""Memory of a run against its plan: a bar for each phase, curves over the steps, and the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from finetrainers.draw.curves import Points
from finetrainers.draw.svg_chart import COLORS, Chart, Level, Mark, Series
from finetrainers.rundir.run_records import RunRecords
from finetrainers.utils.phases import PHASES, TRAINING_STEP, label

from .charts import marks_of

#: What is measured, as `metrics.jsonl` and the plan call it, and as people do.
_KINDS = {"allocated": "GPU memory, allocated", "reserved": "GPU memory, reserved", "host": "host memory"}


@dataclass(frozen=True)
class Bar:
    """The peak of a phase in GiB.

    Attributes:
        phase: as people call it.
        peak: what was measured; None: nothing was.
        reserved: what torch's allocator held for it; None on a CPU.
        planned: what the estimate said; None: nothing.
    """

    phase: str
    peak: float | None
    reserved: float | None = None
    planned: float | None = None

    @property
    def text(self) -> str:
        """The numbers."""
        peak = "not measured" if self.peak is None else f"{self.peak:.2f}"
        reserved = "" if self.reserved is None else f", reserved {self.reserved:.2f}"
        return peak + reserved + ("" if self.planned is None else f", plan {self.planned:.2f}")


@dataclass(frozen=True)
class Memory:
    """The memory of a run: what the bars are of, bars, and a table of all numbers."""

    title: str
    bars: Sequence[Bar]
    table: tuple[list[str], list[list[str]]]

    @property
    def most(self) -> float:
        """The right end of the bars."""
        values = [v for bar in self.bars for v in (bar.peak, bar.reserved, bar.planned) if v is not None]
        return max(values) or 1.0


def memory_of(run: RunRecords) -> Memory | None:
    """The peaks of each phase; None where nothing was measured."""
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
    """Headings and rows of planned and measured peaks by phase, in GiB."""
    columns = [(which, kind) for kind in _KINDS if any(kind in p for p in measured.values())
               for which in ("planned", "measured")
               if which == "measured" or any(kind in p for p in planned.values())]  # fmt: skip
    sources = {"planned": planned, "measured": measured}
    rows = [
        [label(phase), *(f"{v:.2f}" if (v := sources[which].get(phase, {}).get(kind)) is not None else "" for which, kind in columns)]
        for phase in measured
    ]  # fmt: skip
    return ["phase", *(f"{_KINDS[kind]}, {which}" for which, kind in columns)], rows


def memory_charts(runs: Sequence[RunRecords]) -> list[Chart]:
    """Peaks over the steps with their plans: of one run a line for each phase, of several the training step of each."""
    charts = [_of_one(runs[0], kind) if len(runs) == 1 else _of_several(runs, kind) for kind in _KINDS]
    return [chart for chart in charts if chart.series]


def _heading(kind: str, of: str) -> str:
    return f"{_KINDS[kind][0].upper()}{_KINDS[kind][1:]}, {of} (GiB)"


def _of_one(run: RunRecords, kind: str) -> Chart:
    series: list[Series] = []
    levels: list[Level] = []
    for phase in PHASES:
        points = _peaks(run, phase, kind)
        if len(points[0]) > (0 if phase == TRAINING_STEP else 2):  # what happens once has a bar
            color = len(series) % COLORS
            series.append(Series(label(phase), points, color))
            levels += _levels(run, phase, kind, color, label(phase))
    return Chart(_heading(kind, "peak of each phase"), series, marks=list(marks_of(run)), levels=levels)


def _of_several(runs: Sequence[RunRecords], kind: str) -> Chart:
    series: list[Series] = []
    levels: list[Level] = []
    marks: list[Mark] = []
    for number, run in enumerate(runs):
        points, color = _peaks(run, TRAINING_STEP, kind), number % COLORS
        if points[0]:
            series.append(Series(run.name, points, color))
            levels += _levels(run, TRAINING_STEP, kind, color, run.name)
            marks += marks_of(run, color)
    return Chart(_heading(kind, "peak of a training step"), series, marks=marks, levels=levels)


def _peaks(run: RunRecords, phase: str, kind: str) -> Points:
    """The greatest of each step, which may have several records."""
    found: dict[float, float] = {}
    for step, gib in zip(*run.points(f"memory/{phase}/{kind}_gib"), strict=True):
        found[step] = max(gib, found.get(step, gib))
    return list(found), list(found.values())


def _levels(run: RunRecords, phase: str, kind: str, color: int, name: str) -> Iterator[Level]:
    planned = run.planned_memory().get(phase, {}).get(kind)
    if planned is not None:
        yield Level(planned, f"{name}: {planned:.2f} GiB planned", color)
