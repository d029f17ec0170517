"""Health of the machines of a run, from the readings that `finetrainers doctor --every` writes next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from finetrainers.draw.svg_chart import COLORS, Chart, Series
from finetrainers.rundir.health import Rises
from finetrainers.rundir.run_records import RunRecords
from finetrainers.utils.text import plural

from .charts import event_step

_Reading = Mapping[str, Any]


@dataclass(frozen=True)
class RunHealth:
    """Health of a run's machines.

    Attributes:
        charts: step time and what the machines did at the same steps.
        rises: rows of host, counter, its increase, and the first and last step of the increase.
        silent: rows of host, number of readings without an answer, and the last reason.
        total: number of readings and machines, as text.
    """

    charts: list[Chart]
    rises: list[tuple[str, str, str, str]]
    silent: list[tuple[str, int, str]]
    total: str


def health_of(run: RunRecords) -> RunHealth | None:
    """Return the health of a run's machines, or None if nothing was read."""
    by_host: dict[str, list[_Reading]] = {}
    for record in run.health:
        by_host.setdefault(str(record["host"]), []).append(record)
    if not by_host:
        return None
    rising = Rises()
    risen = [(record, rising.of(record)) for record in run.health if "error" not in record]
    silent = {host: [r for r in readings if "error" in r] for host, readings in by_host.items()}
    return RunHealth(
        charts=_charts(run, by_host, risen),
        rises=_rise_rows(run, risen),
        silent=[(host, len(failed), str(failed[-1]["error"])) for host, failed in silent.items() if failed],
        total=f"{plural(max(map(len, by_host.values())), 'reading')} of {plural(len(by_host), 'machine')}",
    )


def _rise_rows(
    run: RunRecords, risen: Sequence[tuple[_Reading, Mapping[str, float]]]
) -> list[tuple[str, str, str, str]]:
    by_counter: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    for record, rises in risen:
        for name, increase in rises.items():
            by_counter.setdefault((str(record["host"]), name), []).append((increase, event_step(record, run)))
    rows = []
    for (host, name), changes in by_counter.items():
        steps = [f"{step:g}" for _, step in (changes[0], changes[-1]) if step is not None]
        rows.append((host, name, f"{sum(increase for increase, _ in changes):g}", " to ".join(dict.fromkeys(steps))))
    return rows


def _charts(
    run: RunRecords, by_host: Mapping[str, list[_Reading]], risen: Sequence[tuple[_Reading, Mapping[str, float]]]
) -> list[Chart]:
    """Return charts by step, or an empty list if the run has recorded no step."""
    if not run.times:
        return []
    errors = dict.fromkeys(by_host, 0.0)
    sums: dict[int, float] = {}
    for record, rises in risen:
        errors[record["host"]] += sum(rises.values())
        sums[id(record)] = errors[record["host"]]

    def count(record: _Reading) -> float | None:
        return sums.get(id(record)) if errors[record["host"]] else None

    values = {
        "Errors since the first reading": count,
        "Slowest GPU clock, MHz": _gpu_value("clock_mhz", min),
        "Hottest GPU, C": _gpu_value("temperature_c", max),
        "Power of all GPUs, W": _gpu_value("power_w", sum),
    }
    charts = [chart for title, value in values.items() if (chart := _by_host(run, by_host, title, value)).series]
    steps = run.points("step_s")
    if charts and steps[0]:
        charts.insert(0, Chart("Seconds per step", [Series("", steps, 0, "smoothed")]))
    return charts


def _gpu_value(name: str, choose: Callable[[list[float]], float]) -> Callable[[_Reading], float | None]:
    def value(record: _Reading) -> float | None:
        values = [gpu[name] for gpu in record.get("gpus", ()) if name in gpu]
        return choose(values) if values else None

    return value


def _by_host(
    run: RunRecords, by_host: Mapping[str, list[_Reading]], title: str, value: Callable[[_Reading], float | None]
) -> Chart:
    """Return a chart with a line for each machine, or for those that differ most from the median if there are many."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for host, readings in by_host.items():
        for record in readings:
            step, number = event_step(record, run), value(record)
            if step is not None and number is not None:
                xs, ys = lines.setdefault(host, ([], []))
                xs.append(step)
                ys.append(number)
    note = ""
    if len(lines) > COLORS:
        usual = median(fmean(ys) for _, ys in lines.values())
        ranked = sorted(lines, key=lambda host: -abs(fmean(lines[host][1]) - usual))[:COLORS]
        note = f"the {COLORS} of {len(lines)} machines that differ most"
        lines = {host: points for host, points in lines.items() if host in ranked}
    return Chart(title, [Series(host, points, color) for color, (host, points) in enumerate(lines.items())], note=note)
