"""Training of settings of reward finetuning in turns, each at several rates and with several seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from grpo_arm import Arm, Cost, build
from grpo_settings import ALL, JUDGE, TASKS, Contender

#: Evaluations of a run up to its limit, and the one after which the rate is chosen: five updates of the baseline.
EVALUATIONS, TUNING = 12, 5


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        task: what is learned.
        settings: how.
        rate: learning rate.
        seed: of prompts, noise and LoRA.
    """

    task: str
    settings: str
    rate: float
    seed: int

    @property
    def contender(self) -> Contender:
        """The settings themselves."""
        return TASKS[self.task].settings[self.settings]


@dataclass(frozen=True)
class Point:
    """One evaluation of a run.

    Attributes:
        step: updates until then.
        cost: of these.
        score: held-out.
        ended: why training ended there: `score`, `limit`, `rate` (another is better), `stopped` by hand; or empty.
    """

    step: int
    cost: Cost
    score: float
    ended: str = ""


#: The evaluations of every run, in their order.
Curves = Mapping[Run, Sequence[Point]]


def write_point(path: Path, run: Run, point: Point) -> None:
    """Append an evaluation to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**asdict(run), **asdict(point)}) + "\n")


def read_curves(path: Path) -> dict[Run, list[Point]]:
    """Return the evaluations in a file, of runs that have ended; of two after one step, the last."""
    curves: dict[Run, list[Point]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        run = Run(*(row.pop(name) for name in ("task", "settings", "rate", "seed")))
        points = curves.setdefault(run, [])
        if points and points[-1].step == row["step"]:
            points.pop()
        points.append(Point(**{**row, "cost": Cost(**row["cost"])}))
    return {run: points for run, points in curves.items() if points[-1].ended}


def cost_until(points: Sequence[Point], score: float) -> Cost | None:
    """Return what a run has cost until the score, interpolated between two evaluations, or None if not reached."""
    for before, after in pairwise(points):
        if before.score < score <= after.score:
            return before.cost.towards(after.cost, (score - before.score) / (after.score - before.score))
    return None


def best_rate(curves: Curves, rates: Iterable[float], score: float) -> float:
    """Return the rate that reaches the score with most seeds; of equals the cheapest, or the one with the best mean."""

    def quality(rate: float) -> tuple[int, float]:
        of_rate = [points for run, points in curves.items() if run.rate == rate]
        costs = [cost.passes for points in of_rate if (cost := cost_until(points, score)) is not None]
        if len(costs) == len(of_rate):
            return len(costs), -median(costs)
        return len(costs), float(np.mean([points[-1].score for points in of_rate]))

    return max(rates, key=quality)


@dataclass
class Comparison:
    """Runs in training.

    Attributes:
        directory: for the runs.
        curves: the evaluations so far, those of an earlier comparison included.
    """

    directory: Path
    curves: dict[Run, list[Point]]
    _arms: dict[Run, Arm] = field(default_factory=dict)
    _judges: dict[str, Arm] = field(default_factory=dict)

    def train(self, runs: Sequence[Run]) -> Iterator[tuple[Run, Point]]:
        """Train runs in turns until each has reached the score, been through its limit, or has a worse rate.

        The next update is that of the run that is the farthest from its limit, so that all see the machine alike.
        """
        for run in runs:
            if run not in self.curves:
                self._begin(run)
        while self._arms:
            run = min(self._arms, key=self._progress)
            arm = self._arms[run]
            due = len(self.curves[run]) * run.contender.limit / EVALUATIONS
            arm.update()
            if arm.cost.passes >= due:
                yield run, self._evaluate(run)
                yield from self._choose(run)

    def _begin(self, run: Run) -> None:
        """Build a run, with the score at its start."""
        task, name = TASKS[run.task], f"{run.task} {run.settings} {run.rate:g} {run.seed}"
        common = {**ALL, **task.changes, "evaluated": task.evaluated}
        if task.prompts is not None:
            common["prompts"] = str(task.prompts(self.directory))
        judge = self._judges.get(run.task)
        if judge is None:
            judge = self._judges[run.task] = build(self.directory, f"judge {run.task}", {**common, **JUDGE})
        changes = {**common, **run.contender.changes, "lr": run.rate, "seed": run.seed}
        self._arms[run] = build(self.directory, name.replace(" ", "_"), changes)
        first = next((points[0] for other, points in self.curves.items() if other.task == run.task), None)
        self.curves[run] = [first or Point(0, Cost(), self._score(run))]

    def _progress(self, run: Run) -> float:
        return self._arms[run].cost.passes / run.contender.limit

    def _score(self, run: Run) -> float:
        record = self._arms[run].evaluate(self._judges[run.task])
        return float(np.mean([record[f"eval_reward/{name}"] for name in TASKS[run.task].metrics]))

    def _evaluate(self, run: Run) -> Point:
        """Evaluate a run, and end it if it has reached the score or the limit."""
        arm, score = self._arms[run], self._score(run)
        ended = "score" if score >= TASKS[run.task].score else "limit" if self._progress(run) >= 1 else ""
        point = Point(arm.step, Cost(**asdict(arm.cost)), score, ended)
        self.curves[run].append(point)
        if ended:
            del self._arms[run]
        return point

    def _choose(self, run: Run) -> Iterator[tuple[Run, Point]]:
        """End the runs of the same settings with another rate than the best, if all have come far enough."""
        curves = {
            other: points
            for other, points in self.curves.items()
            if (other.task, other.settings) == (run.task, run.settings)
        }
        if any(len(points) <= TUNING and not points[-1].ended for points in curves.values()):
            return
        best = best_rate(curves, {other.rate for other in curves}, TASKS[run.task].score)
        for other in curves:
            if other.rate != best and other in self._arms:
                del self._arms[other]
                last = self.curves[other][-1]
                self.curves[other][-1] = Point(last.step, last.cost, last.score, "rate")
                yield other, self.curves[other][-1]
