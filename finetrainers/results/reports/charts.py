"""Charts of a page.

One run has a line for each number; several runs have a chart for each number, with a line for each run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finetrainers.draw.curves import OF_A_RANK, Panel, Points, is_number, matching, panels_of, spread_of
from finetrainers.draw.svg_chart import COLORS, Chart, Mark, Series, wants_log
from finetrainers.rundir.run_records import Event, RunRecords, describe_reward_hacking

from .watched import Watched


@dataclass(frozen=True)
class ChartGroup:
    """Charts under a heading; `constant` lists the numbers that never change and so have no chart."""

    title: str
    charts: list[Chart]
    constant: str = ""


def chart_groups(runs: Sequence[RunRecords]) -> list[ChartGroup]:
    """Return the charts of runs, most important first."""
    names = dict.fromkeys(name for run in runs for name in run.names)
    groups: dict[str, tuple[list[Chart], list[str]]] = {}
    for group, panel in panels_of(names):
        recorded = [name for name in matching(names, panel.names) if any(_points(run, name, panel)[0] for run in runs)]
        if not recorded:
            continue
        charts, constant = groups.setdefault(group, ([], []))
        varying = [name for name in recorded if not _is_constant(runs, name, panel)]
        if len(runs) == 1 and panel.x == "step":
            constant += [
                f"{_constant_label(panel, n, recorded)} {_points(runs[0], n, panel)[1][0]:.4g}"
                for n in recorded
                if n not in varying and not (varying and panel.style == "band")
            ]
        if not varying:
            continue
        if len(runs) == 1:
            # A reward of held-out prompts that stays the same is seen next to that of rollouts.
            charts.append(_single_run_chart(runs[0], panel, recorded if panel.style == "band" else varying))
        elif panel.x == "step":
            # Rank 3 of one run is not rank 3 of another.
            shared = [name for name in varying if OF_A_RANK not in name]
            charts += [_multi_run_chart(runs, panel, name, is_only=len(recorded) == 1) for name in shared]
    return [
        ChartGroup(group.capitalize(), charts, ", ".join(dict.fromkeys(constant)))
        for group, (charts, constant) in groups.items()
        if charts or constant
    ]


def _constant_label(panel: Panel, name: str, recorded: Sequence[str]) -> str:
    """Return the label of a number that has no chart."""
    title = panel.heading if len(recorded) == 1 and name in panel.names else panel.heading_of(name)
    return title[0].lower() + title[1:] if title[1:2].islower() else title


def watched_charts(runs: Sequence[RunRecords], watched: Sequence[Watched]) -> ChartGroup | None:
    """Return charts of the mean scores of watched checkpoints: one for each reward, a line for each preset."""
    charts = []
    for label in dict.fromkeys(label for preset in watched for label in preset.labels):
        series = []
        for color, preset in enumerate(watched):
            points = preset.means(label)
            if points[0]:
                name = " ".join([*([preset.run.name] if len(runs) > 1 else []), preset.preset])
                series.append(Series(name if len(watched) > 1 else "", points, color % COLORS))
        if series:
            charts.append(Chart(f"Reward of checkpoints: {label}", series))
    return ChartGroup("Watched checkpoints", charts) if charts else None


def _points(run: RunRecords, name: str, panel: Panel) -> Points:
    xs, ys = run.points(name, panel.x)
    if panel.x == "step" or not xs:
        return xs, ys
    order = sorted(range(len(xs)), key=xs.__getitem__)
    return [xs[index] for index in order], [ys[index] for index in order]


def _is_constant(runs: Sequence[RunRecords], name: str, panel: Panel) -> bool:
    values = [y for run in runs for y in _points(run, name, panel)[1]]
    return len(values) > len(runs) and len(set(values)) == 1


def _single_run_chart(run: RunRecords, panel: Panel, names: Sequence[str]) -> Chart:
    """Return a chart with a line for each number."""
    series = []
    several = len(names) > 1 or (names[0] not in panel.names)
    for color, name in enumerate(names):
        points, style = _points(run, name, panel), panel.style_of(name)
        spread = run.points(spread_of(name)) if style == "band" else ([], [])
        band = spread[1] if spread[0] == points[0] else []
        series.append(Series(panel.label(name) if several else "", points, color % COLORS, style, band))
    return _chart(panel, panel.heading, series, list(marks_of(run)) if panel.x == "step" else [])


def _multi_run_chart(runs: Sequence[RunRecords], panel: Panel, name: str, *, is_only: bool) -> Chart:
    """Return a chart with a line for each run that has the number."""
    style = "line" if panel.style_of(name) == "line" else "smoothed"
    series: list[Series] = []
    marks: list[Mark] = []
    for color, run in enumerate(runs):
        if (points := _points(run, name, panel))[0]:
            series.append(Series(run.name, points, color % COLORS, style))
            marks += marks_of(run, color % COLORS)
    return _chart(panel, panel.heading if is_only else panel.heading_of(name), series, marks)


def _chart(panel: Panel, title: str, series: list[Series], marks: list[Mark]) -> Chart:
    values = [y for line in series for y in line.points[1]]
    x = {"step": "step", "kl": "KL"}.get(panel.x, panel.x)
    is_log = panel.may_be_log and wants_log(values)
    has_band = any(line.spread for line in series)
    note = [panel.note if has_band else panel.note.partition(";")[0], *(["logarithmic"] if is_log else [])]
    return Chart(title, series, x=x, is_log=is_log, marks=marks, note=", ".join(filter(None, note)))


# ---- events ----------------------------------------------------------------------------------------------------------


def marks_of(run: RunRecords, color: int | None = None) -> Iterator[Mark]:
    """Yield the events of a run by step: resumes and rollbacks, spikes, and failures that training has survived.

    Args:
        run: the run with its events.
        color: of its line, where there are several runs.
    """
    prefix = "" if color is None else f"{run.name}: "
    for event in run.events:
        kind, step = event.get("event"), event_step(event, run)
        if step is None:
            continue
        if kind == "start" and step:
            yield Mark(step, f"{prefix}resumed from step {step:g}", color=color)
        elif kind == "rollback":
            yield Mark(step, f"{prefix}rolled back to step {step:g}", color=color)
        elif kind == "spike":
            yield Mark(step, f"{prefix}spike at step {step:g}: {event.get('values')}", "spike", color)
        elif kind == "reward_hacking":
            yield Mark(
                step, f"{prefix}reward hacking at step {step:g}: {describe_reward_hacking(event)}", "failure", color
            )
        elif kind == "nonfinite":
            yield Mark(step, f"{prefix}not finite at step {step:g}: {event.get('values')}", "failure", color)
        elif kind == "out_of_memory":
            now = event.get("now")
            yield Mark(
                step, f"{prefix}out of memory at step {step:g}, retried with {now} samples at once", "failure", color
            )


def event_step(event: Event, run: RunRecords) -> float | None:
    """Return the step of an event, or else that of the last record before it, or None without either."""
    step: Any = event.get("step")
    if is_number(step):
        return float(step)
    moment = event.get("time")
    if not is_number(moment) or not run.times:
        return None
    index = bisect_right(run.times, moment)
    return float(run.metrics[max(0, index - 1)]["step"])
