"""Plots of a run's metrics: losses, rewards, KL divergence, time per phase. A picture needs matplotlib when it is drawn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeGuard

from finetrainers.utils.files import read_jsonl

Record = Mapping[str, Any]
Records = Sequence[Record]
Points = tuple[list[float], list[float]]
_REACH = 5  # records to either side that a moving average covers, at most
_LONG = 100  # of more records than five times this, the share of a moving average to either side is 1 / so many
_COLUMNS = 2
_NAME = 24  # characters of a legend
_FOOTER = 140  # characters of a line
#: What numbers are drawn over.
_XLABELS = {"step": "optimizer step", "kl": "KL"}
#: What the parts of a step are called.
_SECONDS = {
    "step_s": "step", "seconds/data": "waiting for data", "waiting_s": "waiting for the slowest rank",
    "checkpoint_s": "blocked by a checkpoint",
}  # fmt: skip
_TRAFFIC = {
    f"network_mib_per_s/{kind.lower()}_{what}{most}": f"{kind} {what}{', most' if most else ''}"
    for kind in ("Ethernet", "InfiniBand") for what in ("sent", "received") for most in ("", "_max")
}  # fmt: skip
#: What ends the names of numbers that one process has, before its rank.
OF_A_RANK = "/rank_"
#: The scores of rollouts: a run that has them is judged by these, and by its loss last.
_REWARD, _EVAL_REWARD, _SPREAD = "reward/", "eval_reward/", "group_std/"


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        title: above it.
        names: numbers that it shows; one that ends in `/` or `_` stands for all that begin so.
        style: how their points are drawn; `band` is a moving average with the mean deviation within a group around it.
        x: the number that they are drawn over.
        may_be_log: whether its axis is logarithmic where values differ by orders of magnitude.
        unit: of the numbers.
        note: how they are drawn, for people.
        labels: of some numbers in the legend; others have their own name, without what all have in common.
    """

    title: str
    names: tuple[str, ...]
    style: Literal["line", "smoothed", "band", "dots"] = "line"
    x: str = "step"
    may_be_log: bool = False
    unit: str = ""
    note: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def heading_of(self, name: str) -> str:
        """The heading of a panel that has one of the numbers alone; the first one is what the title says."""
        if name == self.names[0]:
            return self.heading
        return replace(self, title=f"{self.title}: {self.label(name)}").heading

    def label(self, name: str) -> str:
        """A number's name in the legend."""
        return self.labels.get(name) or label_of(name)

    def style_of(self, name: str) -> str:
        """How the points of a number are drawn: what is evaluated now and then is no cloud to be smoothed."""
        return "line" if name.startswith("eval") else self.style


@dataclass(frozen=True)
class Marks:
    """Steps at which something happened: the run was continued, clips were sampled, or reward hacking was seen."""

    resumed: Sequence[float] = ()
    sampled: Sequence[float] = ()
    hacked: Sequence[float] = ()


def plot_run(directory: Path) -> Path:
    """Draw `metrics.jsonl` of a run directory into `curves.png` there; the picture's path.

    Raises:
        ValueError: there are no records.
    """
    metrics, events = directory / "metrics.jsonl", directory / "events.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{directory} is no run directory: it holds no metrics.jsonl")
    figure = draw(read_metrics(metrics), marks_of(read_jsonl(events)[0] if events.is_file() else []))
    if figure is None:
        raise ValueError(f"{metrics} has no records to draw yet")
    picture = directory / "curves.png"
    figure.savefig(picture, dpi=110)
    return picture


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl` in order. Of steps that a resumed run has redone, only the later ones count."""
    found: list[dict[str, Any]] = []
    for record in read_jsonl(path)[0]:
        if not is_number(record.get("step")):
            continue
        if found and record["step"] < found[-1]["step"]:
            found = [earlier for earlier in found if earlier["step"] < record["step"]]
        found.append(record)
    return found


def draw(records: Records, marks: Marks | None = None) -> Any:
    """A matplotlib figure with a panel for each kind of metric that varies, most important first; None without any."""
    from matplotlib.figure import Figure

    records = [record for record in records if is_number(record.get("step"))]
    names = dict.fromkeys(name for record in records for name in record)
    constant = {name: value for name in names if (value := _constant(records, name)) is not None}
    varying = [name for name in names if name not in constant]
    panels = [
        (panel, found)
        for _, panel in panels_of(names)
        if panel.x in names and (found := matching(varying, panel.names))
    ]
    if not panels:
        return None
    marks = marks or Marks()
    rows, columns = -(-len(panels) // _COLUMNS), min(_COLUMNS, len(panels))
    footer = _footer(constant, marks)
    figure = Figure(figsize=(6.2 * columns, 3 * rows + 0.2 * (footer.count("\n") + 1)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (panel, found) in zip(grid, panels, strict=False):
        for name in found:
            _plot(axes, records, panel, name)
        axes.set(xlabel=_XLABELS[panel.x])
        axes.xaxis.get_major_locator().set_params(integer=True)  # steps, and those of a sampler, are whole
        axes.set_title(
            f"{panel.heading} ({panel.note})" if panel.note else panel.heading, fontsize="medium", loc="left"
        )
        finish(axes, several=len(matching(names, panel.names)) > 1)
        if panel.x == "step":
            _mark(axes, marks, last=max(record["step"] for record in records))
    for axes in grid[len(panels) :]:
        axes.remove()
    if footer:
        figure.supxlabel(footer, fontsize="small", x=0.01, ha="left", color="0.35")
    return figure


def finish(axes: Any, *, several: bool) -> None:
    """Grid, no frame, and for several lines a legend outside, where it hides none."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if several:
        axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05), borderaxespad=0.3)


def averaged(axes: Any, points: Points, label: str) -> None:
    """A moving average, centered so that it does not lag behind, and the points themselves, pale."""
    places, values = points
    (line,) = axes.plot(places, smoothed(values), label=label)
    axes.plot(places, values, alpha=0.25, color=line.get_color(), linewidth=1)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbors: a sixth of all to either side, at least one, at most five or 1 %."""
    count = len(values)
    reach = max(min(_REACH, max(1, count // 6)), count // _LONG)
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - reach), min(count, i + reach + 1)) for i in range(count)]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


def points(records: Records, name: str, x: str = "step") -> Points:
    """Points (x, y) of a metric over the step or another metric, of the records that have both."""
    found = [(record[x], record[name]) for record in records if all(is_number(record.get(n)) for n in (x, name))]
    return [a for a, _ in found], [b for _, b in found]


def panels_of(names: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Panel]]:
    """All panels, each with the group that it belongs to, most important first; of rewards those that there are."""
    rewards = list(_reward_panels(list(names)))
    losses = [
        (
            "loss",
            Panel(
                "Preference accuracy on pairs",
                ("eval_accuracy", "accuracy"),
                unit="share",
                labels={"eval_accuracy": "held-out", "accuracy": "training"},
            ),
        ),
        (
            "loss",
            Panel(
                "Error reduction against the reference model",
                ("gain_",),
                labels={"gain_chosen": "chosen", "gain_rejected": "rejected"},
            ),
        ),
        ("loss", Panel("Held-out loss", ("eval_loss",))),
        ("loss", Panel("Held-out loss by noise level", ("eval_loss_",))),
        (
            "loss",
            Panel(
                "Prior preservation: difference from the base model", ("prior_loss",), style="smoothed", note="smoothed"
            ),
        ),
    ]
    loss = ("loss", Panel("Training loss", ("loss",), style="smoothed", note="smoothed"))
    rest = [
        ("optimization", Panel("Gradient norm", ("grad_norm", "grad_norm_max"), may_be_log=True, labels={"grad_norm": "mean", "grad_norm_max": "maximum"})),
        ("optimization", Panel("Learning rate", ("lr",))),
        ("speed", Panel("Time per step", ("step_s", "seconds/", "waiting_s", "checkpoint_s"), unit="s", labels=_SECONDS)),
        ("speed", Panel("Throughput", ("tokens_per_s",), unit="tokens/s")),
        ("speed", Panel("Model FLOPs utilization (MFU)", ("mfu",), unit="share of peak")),
        ("hardware", Panel("GPU power", ("gpu_power_w", f"gpu_power_w{OF_A_RANK}"), unit="W", labels={"gpu_power_w": "mean"})),
        ("hardware", Panel("GPU temperature", ("gpu_temperature_c", f"gpu_temperature_c{OF_A_RANK}"), unit="C", labels={"gpu_temperature_c": "hottest"})),
        ("hardware", Panel("GPU utilization", ("gpu_utilization_percent", f"gpu_utilization_percent{OF_A_RANK}"), unit="%", labels={"gpu_utilization_percent": "mean"})),
        ("hardware", Panel("Network traffic of a machine", ("network_mib_per_s/",), unit="MiB/s", labels=_TRAFFIC)),
    ]  # fmt: skip
    if matching(names, (_REWARD,)):
        return [*rewards, *rest, loss]
    return [*losses[:-1], loss, *losses[-1:], *rewards, *rest]


def _reward_panels(names: Sequence[str]) -> Iterator[tuple[str, Panel]]:
    """A panel for each reward, of rollouts and of held-out prompts, and what tells of reward finetuning."""
    heads = dict.fromkeys(n.partition("/")[2] for n in matching(names, (_REWARD, _EVAL_REWARD)))
    for head in heads:
        both = _REWARD + head, _EVAL_REWARD + head
        found = [name for name in both if name in names]
        labels = dict(zip(both, ("rollouts", "held-out prompts"), strict=True))
        of = f" of {labels[found[0]]}" if len(found) == 1 else ""
        how = "smoothed; band: std within groups" if _REWARD + head in found else ""
        yield "rewards", Panel(f"Reward{of}: {label_of(_REWARD + head)}", both, style="band", note=how, labels=labels)
    yield "rewards", Panel("KL divergence from the reference model", ("kl",), style="smoothed", note="smoothed")
    yield "rewards", Panel("Reward over KL divergence", (_REWARD,), style="dots", x="kl")
    yield "rewards", Panel("Groups with equal rewards", ("constant_groups",), unit="share")
    yield "rewards", Panel("Clipped ratios", ("clipped_",), unit="share", labels={"clipped_high": "above", "clipped_low": "below"})  # fmt: skip
    yield "rewards", Panel("Gradient norm by noise level", ("gradient/",))


def matching(names: Sequence[str] | Mapping[str, Any], wanted: Sequence[str]) -> list[str]:
    """Names that match one of the patterns, in order of appearance."""
    return [n for n in names if any(n.startswith(w) if w.endswith(("/", "_")) else n == w for w in wanted)]


def _constant(records: Records, name: str) -> float | None:
    """Metrics with one and the same value in several records, by name."""
    _, values = points(records, name)
    return values[0] if len(values) > 1 and len(set(values)) == 1 else None


def _footer(constant: Mapping[str, float], marks: Marks) -> str:
    """The footer: metrics that are left out, and what marks mean."""
    known = [wanted for _, panel in panels_of(constant) + panels_of([]) for wanted in panel.names]
    left_out = [f"{name} {constant[name]:.4g}" for name in matching(constant, known)]
    texts = [f"constant: {', '.join(left_out)}"] if left_out else []
    if marks.resumed:
        texts.append("dashed: resumed")
    if marks.sampled:
        texts.append("triangles: samples")
    if marks.hacked:
        texts.append("red: reward hacking")
    return "\n".join(textwrap.wrap(";  ".join(texts), _FOOTER))


def marks_of(events: Records) -> Marks:
    """Steps that a run's events tell of."""

    def steps(kinds: tuple[str, ...]) -> list[float]:
        found = [event.get("step") for event in events if event.get("event") in kinds]
        return sorted({float(step) for step in found if is_number(step) and step})

    return Marks(resumed=steps(("start", "rollback")), sampled=steps(("samples",)), hacked=steps(("reward_hacking",)))


def _mark(axes: Any, marks: Marks, *, last: float) -> None:
    for step in marks.resumed:
        if step <= last:
            axes.axvline(step, color="0.5", linestyle="--", linewidth=1, zorder=0)
    for step in marks.hacked:
        if step <= last:
            axes.axvline(step, color="tab:red", linewidth=1.5, zorder=0)
    sampled = [step for step in marks.sampled if step <= last]
    if sampled:
        at_the_bottom = axes.get_xaxis_transform()
        axes.plot(sampled, [0.0] * len(sampled), "^", color="0.5", markersize=4, clip_on=False, transform=at_the_bottom)


def label_of(name: str) -> str:
    """A metric's name in a legend: without its prefix, which the title states, and shortened to the legend's width."""
    own = name.removeprefix("eval_loss_").partition("/")[2] or name.removeprefix("eval_loss_")
    own = own.replace("weighted_sum", "weighted sum")
    return own if len(own) <= _NAME else f"{own[: _NAME - 2]}.."


def spread_of(name: str) -> str:
    """The number that has the standard deviation of a reward within groups."""
    return name.replace(_REWARD, _SPREAD, 1)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a record's value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _plot(axes: Any, records: Records, panel: Panel, name: str) -> None:
    """Draw one number of a panel."""
    found, label, style = points(records, name, panel.x), panel.label(name), panel.style_of(name)
    if style == "line":
        axes.plot(*found, "o-" if name.startswith("eval") or len(found[0]) == 1 else "-", label=label, markersize=4)
    elif style == "dots":
        axes.plot(*found, ".", label=label)
    else:
        averaged(axes, found, label)
    spread = spread_of(name)
    both = [record for record in records if is_number(record.get(name)) and is_number(record.get(spread))]
    if style == "band" and both:
        rows = [(r["step"], r[name] - r[spread], r[name] + r[spread]) for r in both]
        axes.fill_between(*zip(*rows, strict=True), alpha=0.15, color=axes.lines[-1].get_color())
