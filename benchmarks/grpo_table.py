"""Tables of a comparison of settings of reward finetuning, printed and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

from grpo_arm import Cost
from grpo_compare import Curves, best_rate, cost_until
from grpo_settings import TASKS

_UNITS = {"passes": "passes", "cpu_s": "CPU s"}


@dataclass(frozen=True)
class Row:
    """One setting at its best rate.

    Attributes:
        settings: its name.
        rate: the best of the rates that have been tried.
        rates: all of them.
        seeds: of its runs.
        costs: by seed, of those that have reached the score.
        spent: by seed, of all of training.
        scores: last score by seed.
        per_update: passes of an update, of the median run.
    """

    settings: str
    rate: float
    rates: list[float]
    seeds: list[int]
    costs: Mapping[int, Cost]
    spent: Mapping[int, Cost]
    scores: Mapping[int, float]
    per_update: float

    def ratios(self, baseline: Row, unit: str) -> list[tuple[float, bool]]:
        """Return how many times less than the baseline it has cost, seed by seed; a lower bound if that did not
        reach the score."""
        return [
            (
                getattr(baseline.costs.get(seed, baseline.spent[seed]), unit) / getattr(cost, unit),
                seed in baseline.costs,
            )
            for seed, cost in self.costs.items()
            if seed in baseline.spent
        ]


def make_rows(curves: Curves, task: str) -> Iterator[Row]:
    """Yield a row for each setting of a task that has ended runs."""
    for settings in TASKS[task].settings:
        mine = {run: points for run, points in curves.items() if (run.task, run.settings) == (task, settings)}
        if not mine:
            continue
        rates = sorted({run.rate for run in mine})
        rate = best_rate(mine, rates, TASKS[task].score)
        runs = {run.seed: points for run, points in mine.items() if run.rate == rate}
        found = {seed: cost_until(points, TASKS[task].score) for seed, points in runs.items()}
        last = {seed: points[-1] for seed, points in runs.items()}
        yield Row(
            settings, rate, rates, sorted(runs),
            {seed: cost for seed, cost in found.items() if cost is not None},
            {seed: point.cost for seed, point in last.items()},
            {seed: point.score for seed, point in last.items()},
            median(point.cost.passes / max(point.step, 1) for point in last.values()),
        )  # fmt: skip


def print_table(rows: list[Row], task: str) -> None:
    """Print costs until the score, and ratios to the baseline."""
    print(f"\n{task}: until a held-out score of {TASKS[task].score:g}; median (smallest to largest) of seeds\n")
    titles = ["settings", "rate", "of", "reached", *_UNITS.values(), "ms a pass", "passes an update"]
    titles += [f"times less: {title}" for title in _UNITS.values()]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for row in rows:
        cells = [row.settings, f"{row.rate:g}", ", ".join(f"{rate:g}" for rate in row.rates)]
        cells.append(f"{len(row.costs)} of {len(row.seeds)}")
        cells += [_spread([getattr(cost, unit) for cost in row.costs.values()]) for unit in _UNITS]
        cells.append(_spread([1000 * cost.cpu_s / cost.passes for cost in row.spent.values()], 1))
        cells.append(f"{row.per_update:.0f}")
        for unit in _UNITS:
            ratios = row.ratios(rows[0], unit) if rows[0].settings == next(iter(TASKS[task].settings)) else []
            bound = "" if all(is_exact for _, is_exact in ratios) else " or more"
            cells.append(_spread([ratio for ratio, _ in ratios], 1) + bound * bool(ratios))
        print(f"| {' | '.join(cells)} |")
        for seed in row.seeds:
            if seed not in row.costs:
                print(
                    f"seed {seed} of {row.settings}: {row.scores[seed]:.3f} after {row.spent[seed].passes:.0f} passes"
                )


def as_json(curves: Curves, rows: Mapping[str, list[Row]]) -> dict[str, Any]:
    """Return what was measured: the machine, the table of each task, and every evaluation, compactly."""
    return {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "diffusers")},
        "tasks": {
            task: {"score": TASKS[task].score, "rows": [asdict(row) for row in found]} for task, found in rows.items()
        },
        "columns": ["step", "passes", "CPU s", "score"],
        "runs": [
            {**asdict(run), "ended": points[-1].ended, "evaluations": [
                [p.step, round(p.cost.passes), round(p.cost.cpu_s, 1), round(p.score, 4)] for p in points
            ]}
            for run, points in curves.items()
        ],
    }  # fmt: skip


def _spread(values: list[float], digits: int = 0) -> str:
    if not values:
        return "-"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
