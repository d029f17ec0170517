"""Draws a run's records: losses, rewards, how far the policy has gone, where the time goes. Needs matplotlib when called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import read_jsonl

Records = Sequence[Mapping[str, float]]
_WINDOW = 10  # records that a moving average covers
_COLUMNS = 2


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        title: above it.
        names: numbers that it shows; one that ends in `/` stands for all that begin so.
        xlabel: of the horizontal axis.
        draw: draws one number's values over x; default: a line.
        x: of a record; default: the step.
    """

    title: str
    names: tuple[str, ...]
    xlabel: str = "optimizer step"
    draw: Callable[[Any, Records, str, Callable[[Mapping[str, float]], float]], None] | None = None
    x: Callable[[Mapping[str, float]], float] | None = None


def plot_run(directory: Path) -> Path:
    """Draw `metrics.jsonl` of a run directory into `curves.png` there; the picture's path.

    Raises:
        ValueError: there are no records.
    """
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{directory} is no run directory: it holds no metrics.jsonl")
    figure = draw(read_jsonl(metrics)[0])
    if figure is None:
        raise ValueError(f"{metrics} has no records to draw yet")
    picture = directory / "curves.png"
    figure.savefig(picture, dpi=110)
    return picture


def draw(records: Records) -> Any:
    """A matplotlib figure with a panel for each kind of number that the records have; None if they have none."""
    from matplotlib.figure import Figure

    panels = [(panel, found) for panel in _panels(records) if (found := _present(records, panel.names))]
    if not panels:
        return None
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(6 * _COLUMNS, 3 * rows), layout="constrained")
    grid = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    for axes, (panel, names) in zip(grid, panels, strict=False):
        for name in names:
            (panel.draw or _line)(axes, records, name, panel.x or _step)
        axes.set(title=panel.title, xlabel=panel.xlabel)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in grid[len(panels) :]:
        axes.remove()
    return figure


def _panels(records: Records) -> list[Panel]:
    start = min((record["time"] for record in records), default=0.0)

    def minutes(record: Mapping[str, float]) -> float:
        return (record["time"] - start) / 60

    return [
        Panel("training loss", ("loss",), draw=_averaged),
        Panel("loss on held-out clips", ("eval_loss",)),
        Panel("reward of rollouts, and the spread within groups", ("reward/",), draw=_with_spread),
        Panel("reward of rollouts by time", ("reward/",), xlabel="minutes", draw=_averaged, x=minutes),
        Panel("reward of held-out prompts", ("eval_reward/",)),
        Panel("distance from the model before training", ("kl",)),
        Panel("reward and that distance", ("reward/",), xlabel="kl", draw=_dots, x=_kl),
        Panel("share of clipped ratios", ("clipped_high", "clipped_low")),
        Panel("where gradients come from, by noise level", ("gradient/",)),
        Panel("groups that teach nothing", ("constant_groups",)),
        Panel("gradient norm", ("grad_norm",)),
        Panel("learning rate", ("lr",)),
        Panel("seconds", ("step_s", "seconds/")),
    ]


def _present(records: Records, wanted: Sequence[str]) -> list[str]:
    """The names that records have, in order of appearance."""
    names = dict.fromkeys(name for record in records for name in record)
    return [n for n in names if any(n.startswith(w) if w.endswith("/") else n == w for w in wanted)]


def _step(record: Mapping[str, float]) -> float:
    return record["step"]


def _kl(record: Mapping[str, float]) -> float:
    return record.get("kl", float("nan"))


def _points(records: Records, name: str, x: Callable[[Mapping[str, float]], float]) -> tuple[list[float], list[float]]:
    found = [(x(record), record[name]) for record in records if name in record]
    return [a for a, _ in found], [b for _, b in found]


def _line(axes: Any, records: Records, name: str, x: Callable[[Mapping[str, float]], float]) -> None:
    axes.plot(*_points(records, name, x), "o-" if name.startswith("eval") else "-", label=name, markersize=4)


def _averaged(axes: Any, records: Records, name: str, x: Callable[[Mapping[str, float]], float]) -> None:
    """The values, pale, and their moving average."""
    places, values = _points(records, name, x)
    means = [
        sum(values[max(0, i + 1 - _WINDOW) : i + 1]) / len(values[max(0, i + 1 - _WINDOW) : i + 1])
        for i in range(len(values))
    ]
    (line,) = axes.plot(places, means, label=name)
    axes.plot(places, values, alpha=0.3, color=line.get_color())


def _with_spread(axes: Any, records: Records, name: str, x: Callable[[Mapping[str, float]], float]) -> None:
    """The moving average, and around the values the mean deviation within a group."""
    _averaged(axes, records, name, x)
    spread = name.replace("reward/", "group_std/", 1)
    rows = [(x(r), r[name] - r[spread], r[name] + r[spread]) for r in records if name in r and spread in r]
    if rows:
        axes.fill_between(*zip(*rows, strict=True), alpha=0.15, color=axes.lines[-1].get_color())


def _dots(axes: Any, records: Records, name: str, x: Callable[[Mapping[str, float]], float]) -> None:
    axes.plot(*_points([r for r in records if "kl" in r], name, x), ".", label=name)
