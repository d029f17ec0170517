"""Which charts a page has: of one run a line for each number, of several a chart for each number, with a line for each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetrainers.utils.curves import Panel, Points, label_of, marks_of, matching, panels_of
from finetrainers.utils.svg_chart import COLORS, Chart, Series, wants_log

from .run_records import RunRecords

_TITLES = {"loss": "Loss", "rewards": "Rewards", "optimization": "Optimization", "speed": "Speed"}
_SPREAD = "group_std/"


@dataclass(frozen=True)
class ChartGroup:
    """Charts under a heading; `constant` says which numbers have no chart, since they never change."""

    title: str
    charts: list[Chart]
    constant: str


def chart_groups(runs: Sequence[RunRecords]) -> list[ChartGroup]:
    """The charts of runs, most important first."""
    names = dict.fromkeys(name for run in runs for name in run.names)
    found: dict[str, tuple[list[Chart], list[str]]] = {}
    for group, panel in panels_of(names):
        recorded = [name for name in matching(names, panel.names) if any(_points(run, name, panel)[0] for run in runs)]
        if not recorded:
            continue
        charts, constant = found.setdefault(group, ([], []))
        varying = [name for name in recorded if not _is_constant(runs, name, panel)]
        if len(runs) == 1 and panel.x == "step":
            constant += [f"{n} {_points(runs[0], n, panel)[1][0]:.4g}" for n in recorded if n not in varying]
        if not varying:
            continue
        if len(runs) == 1:
            charts.append(_of_one(runs[0], panel, varying))
        elif panel.x == "step":
            charts += [_of_several(runs, panel, name, alone=len(varying) == 1) for name in varying]
    return [
        ChartGroup(_TITLES[group], charts, ", ".join(dict.fromkeys(constant)))
        for group, (charts, constant) in found.items()
        if charts or constant
    ]


def _points(run: RunRecords, name: str, panel: Panel) -> Points:
    xs, ys = run.points(name, panel.x)
    if panel.x == "step" or not xs:
        return xs, ys
    order = sorted(range(len(xs)), key=lambda place: xs[place])
    return [xs[place] for place in order], [ys[place] for place in order]


def _is_constant(runs: Sequence[RunRecords], name: str, panel: Panel) -> bool:
    values = [y for run in runs for y in _points(run, name, panel)[1]]
    return len(values) > len(runs) and len(set(values)) == 1


def _of_one(run: RunRecords, panel: Panel, names: Sequence[str]) -> Chart:
    """A line for each number."""
    series = []
    for color, name in enumerate(names):
        points = _points(run, name, panel)
        spread = run.points(name.replace("reward/", _SPREAD, 1)) if panel.style == "band" else ([], [])
        band = spread[1] if spread[0] == points[0] else []
        several = len(names) > 1 or len(panel.names) > 1 or "/" in name
        series.append(Series(label_of(name) if several else "", points, color % COLORS, panel.style, band))
    marks = [(step, f"resumed from step {step:g}") for step in marks_of(run.events).resumed]
    return _chart(panel, panel.title, series, marks if panel.x == "step" else [])


def _of_several(runs: Sequence[RunRecords], panel: Panel, name: str, *, alone: bool) -> Chart:
    """A line for each run that has the number."""
    style = "line" if panel.style == "line" else "smoothed"
    series = [
        Series(run.name, points, color % COLORS, style)
        for color, run in enumerate(runs)
        if (points := _points(run, name, panel))[0]
    ]
    title = panel.title.replace("; band: spread in groups", "")
    return _chart(panel, title if alone else f"{title}: {label_of(name)}", series, [])


def _chart(panel: Panel, title: str, series: list[Series], marks: list[tuple[float, str]]) -> Chart:
    values = [y for one in series for y in one.points[1]]
    x = {"step": "step", "kl": "KL"}.get(panel.x, panel.x)
    return Chart(title, series, x=x, is_log=panel.may_be_log and wants_log(values), marks=marks)
