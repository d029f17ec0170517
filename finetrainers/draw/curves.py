"""Plots of a run's metrics: losses, rewards, KL divergence, time per phase. Drawing an image needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeGuard

from finetrainers.utils.failures import InputError
from finetrainers.utils.reading import read_jsonl

Record = Mapping[str, Any]
Records = Sequence[Record]
Points = tuple[list[float], list[float]]
#: Numbers of records are smaller; differences and powers of edited ones would be infinite.
LARGEST = 1e100
_REACH = 5  # maximum records to either side of a moving average
_LONG = 100  # with more records than five times this, a moving average covers 1 / _LONG of them to either side
_COLUMNS = 2
_NAME = 24  # characters of a legend
_FOOTER = 140  # characters of a line
#: Labels of horizontal axes.
_XLABELS = {"step": "optimizer step", "kl": "KL"}
#: Labels of the parts of a step.
_SECONDS = {
    "step_s": "step", "seconds/data": "waiting for data", "waiting_s": "waiting for the slowest rank",
    "checkpoint_s": "blocked by a checkpoint",
}  # fmt: skip
_TRAFFIC = {
    f"network_mib_per_s/{kind.lower()}_{direction}{suffix}": f"{kind} {direction}{', most' if suffix else ''}"
    for kind in ("Ethernet", "InfiniBand") for direction in ("sent", "received") for suffix in ("", "_max")
}  # fmt: skip
#: Part of the names of one process's numbers before its rank.
OF_A_RANK = "/rank_"
#: Prefixes of rollout scores: a run with scores is judged by them first, and by its loss last.
_REWARD, _EVAL_REWARD, _SPREAD = "reward/", "eval_reward/", "group_std/"


@dataclass(frozen=True)
class Panel:
    """A diagram.

    Attributes:
        title: above it.
        names: numbers that it shows; a name that ends in `/` or `_` stands for all with that prefix.
        style: of their points; `band` is a moving average with the mean deviation within a group around it.
        x: the number on the horizontal axis.
        may_be_log: whether its axis is logarithmic where values differ by orders of magnitude.
        unit: of the numbers.
        note: description of the drawing, for readers.
        labels: of some numbers in the legend; others have their own name, without the common prefix.
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
        """Title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def heading_of(self, name: str) -> str:
        """Return the heading of a panel with only one of the numbers; the title is that of the first."""
        if name == self.names[0]:
            return self.heading
        return replace(self, title=f"{self.title}: {self.label(name)}").heading

    def label(self, name: str) -> str:
        """Return a number's label in the legend."""
        return self.labels.get(name) or label_of(name)

    def style_of(self, name: str) -> str:
        """Return the style of a number's points; occasional evaluations are not smoothed."""
        return "line" if name.startswith("eval") else self.style


@dataclass(frozen=True)
class Marks:
    """Steps of events: the run was continued, clips were sampled, or reward hacking was detected."""

    resumed: Sequence[float] = ()
    sampled: Sequence[float] = ()
    hacked: Sequence[float] = ()


def plot_run(directory: Path) -> Path:
    """Draw `metrics.jsonl` of a run directory into `curves.png` there, and return its path.

    Raises:
        ValueError: there are no records.
    """
    metrics, events = directory / "metrics.jsonl", directory / "events.jsonl"
    if not metrics.is_file():
        raise InputError(f"{directory} is not a run directory: it holds no metrics.jsonl", "not_found")
    figure = draw(read_metrics(metrics), marks_of(read_jsonl(events)[0] if events.is_file() else []))
    if figure is None:
        raise ValueError(f"{metrics} has no records to draw yet")
    image_path = directory / "curves.png"
    figure.savefig(image_path, dpi=110)
    return image_path


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl` in order; of steps that a resumed run repeated, only the later ones."""
    records: list[dict[str, Any]] = []
    for record in read_jsonl(path)[0]:
        if not is_number(record.get("step")):
            continue
        if records and record["step"] < records[-1]["step"]:
            records = [earlier for earlier in records if earlier["step"] < record["step"]]
        records.append(record)
    return records


def draw(records: Records, marks: Marks | None = None) -> Any:
    """Return a matplotlib figure with a panel for each varying kind of metric, or None without any.

    The most important panel is first.
    """
    from matplotlib.figure import Figure

    records = [record for record in records if is_number(record.get("step"))]
    names = dict.fromkeys(name for record in records for name in record)
    constant = {name: value for name in names if (value := _constant(records, name)) is not None}
    varying = [name for name in names if name not in constant]
    panels = [
        (panel, panel_names)
        for _, panel in panels_of(names)
        if panel.x in names and (panel_names := matching(varying, panel.names))
    ]
    if not panels:
        return None
    marks = marks or Marks()
    rows, columns = -(-len(panels) // _COLUMNS), min(_COLUMNS, len(panels))
    footer = _footer(constant, marks)
    figure = Figure(figsize=(6.2 * columns, 3 * rows + 0.2 * (footer.count("\n") + 1)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (panel, panel_names) in zip(grid, panels, strict=False):
        for name in panel_names:
            _plot(axes, records, panel, name)
        axes.set(xlabel=_XLABELS[panel.x])
        axes.xaxis.get_major_locator().set_params(integer=True)  # steps, and those of a sampler, are integers
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
    """Add a grid, remove the frame, and for several lines add a legend outside, where it hides none."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if several:
        axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05), borderaxespad=0.3)


def averaged(axes: Any, points: Points, label: str) -> None:
    """Draw a moving average, centered so that it does not lag, over the pale points."""
    steps, values = points
    (line,) = axes.plot(steps, smoothed(values), label=label)
    axes.plot(steps, values, alpha=0.25, color=line.get_color(), linewidth=1)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbors.

    The neighbors are a sixth of all values to either side, at least one, at most five or 1 %.
    """
    count = len(values)
    reach = max(min(_REACH, max(1, count // 6)), count // _LONG)
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - reach), min(count, i + reach + 1)) for i in range(count)]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


def points(records: Records, name: str, x: str = "step") -> Points:
    """Return points (x, y) of a metric over the step or another metric, of the records that have both."""
    pairs = [(record[x], record[name]) for record in records if all(is_number(record.get(n)) for n in (x, name))]
    return [a for a, _ in pairs], [b for _, b in pairs]


#: Panels of losses but the training loss, and panels of other metrics, each with its group.
_LOSSES = [
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
        Panel("Prior preservation: difference from the base model", ("prior_loss",), style="smoothed", note="smoothed"),
    ),
]
_TRAINING_LOSS = ("loss", Panel("Training loss", ("loss",), style="smoothed", note="smoothed"))
_OTHERS = [
    (
        "optimization",
        Panel(
            "Gradient norm",
            ("grad_norm", "grad_norm_max"),
            may_be_log=True,
            labels={"grad_norm": "mean", "grad_norm_max": "maximum"},
        ),
    ),
    ("optimization", Panel("Learning rate", ("lr", "lr/"))),
    (
        "speed",
        Panel("Time per step", ("step_s", "seconds/", "waiting_s", "checkpoint_s"), unit="s", labels=_SECONDS),
    ),
    ("speed", Panel("Throughput", ("tokens_per_s",), unit="tokens/s")),
    (
        "speed",
        Panel("Model FLOPs utilization (MFU)", ("mfu",), unit="share of peak; attention backward = 2.5 x forward"),
    ),
    (
        "hardware",
        Panel("GPU power", ("gpu_power_w", f"gpu_power_w{OF_A_RANK}"), unit="W", labels={"gpu_power_w": "mean"}),
    ),
    (
        "hardware",
        Panel(
            "GPU temperature",
            ("gpu_temperature_c", f"gpu_temperature_c{OF_A_RANK}"),
            unit="C",
            labels={"gpu_temperature_c": "hottest"},
        ),
    ),
    (
        "hardware",
        Panel(
            "GPU utilization",
            ("gpu_utilization_percent", f"gpu_utilization_percent{OF_A_RANK}"),
            unit="%",
            labels={"gpu_utilization_percent": "mean"},
        ),
    ),
    ("hardware", Panel("Network traffic of a machine", ("network_mib_per_s/",), unit="MiB/s", labels=_TRAFFIC)),
]


def panels_of(names: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Panel]]:
    """Return all panels, each with its group, most important first; of rewards those that exist."""
    rewards = list(_reward_panels(list(names)))
    if matching(names, (_REWARD,)):
        return [*rewards, *_OTHERS, _TRAINING_LOSS]
    return [*_LOSSES[:-1], _TRAINING_LOSS, *_LOSSES[-1:], *rewards, *_OTHERS]


def _reward_panels(names: Sequence[str]) -> Iterator[tuple[str, Panel]]:
    """Yield a panel for each reward, of rollouts and of held-out prompts, and other panels of reward finetuning."""
    heads = dict.fromkeys(n.partition("/")[2] for n in matching(names, (_REWARD, _EVAL_REWARD)))
    for head in heads:
        both = _REWARD + head, _EVAL_REWARD + head
        recorded = [name for name in both if name in names]
        labels = dict(zip(both, ("rollouts", "held-out prompts"), strict=True))
        source = f" of {labels[recorded[0]]}" if len(recorded) == 1 else ""
        note = "smoothed; band: std within groups" if _REWARD + head in recorded else ""
        yield (
            "rewards",
            Panel(f"Reward{source}: {label_of(_REWARD + head)}", both, style="band", note=note, labels=labels),
        )
    yield "rewards", Panel("KL divergence from the reference model", ("kl",), style="smoothed", note="smoothed")
    for name in matching(names, ("witness/",)):
        title = f"Witness of reward hacking: {label_of(name)}"
        yield "rewards", Panel(title, (name,), style="smoothed", note="smoothed")
    yield "rewards", Panel("Reward over KL divergence", (_REWARD,), style="dots", x="kl")
    yield "rewards", Panel("Groups with equal rewards", ("constant_groups",), unit="share")
    yield (
        "rewards",
        Panel("Clipped ratios", ("clipped_",), unit="share", labels={"clipped_high": "above", "clipped_low": "below"}),
    )
    yield "rewards", Panel("Gradient norm by noise level", ("gradient/",))


def matching(names: Sequence[str] | Mapping[str, Any], patterns: Sequence[str]) -> list[str]:
    """Return names that match one of the patterns, in order of appearance."""
    return [
        name
        for name in names
        if any(name.startswith(pattern) if pattern.endswith(("/", "_")) else name == pattern for pattern in patterns)
    ]


def _constant(records: Records, name: str) -> float | None:
    """Return the value of a metric that is equal in several records, or None if it varies."""
    _, values = points(records, name)
    return values[0] if len(values) > 1 and len(set(values)) == 1 else None


def _footer(constant: Mapping[str, float], marks: Marks) -> str:
    """Return the footer: constant metrics, and the legend of marks."""
    patterns = [pattern for _, panel in panels_of(constant) + panels_of([]) for pattern in panel.names]
    left_out = [f"{name} {constant[name]:.4g}" for name in matching(constant, patterns)]
    texts = [f"constant: {', '.join(left_out)}"] if left_out else []
    if marks.resumed:
        texts.append("dashed: resumed")
    if marks.sampled:
        texts.append("triangles: samples")
    if marks.hacked:
        texts.append("red: reward hacking")
    return "\n".join(textwrap.wrap(";  ".join(texts), _FOOTER))


def marks_of(events: Records) -> Marks:
    """Return the steps of a run's events."""

    def steps(kinds: tuple[str, ...]) -> list[float]:
        recorded = [event.get("step") for event in events if event.get("event") in kinds]
        return sorted({float(step) for step in recorded if is_number(step) and step})

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
    """Return a metric's label in a legend, shortened to its width: without the prefix that the title states."""
    label = name.removeprefix("eval_loss_").partition("/")[2] or name.removeprefix("eval_loss_")
    label = label.replace("weighted_sum", "weighted sum")
    return label if len(label) <= _NAME else f"{label[: _NAME - 2]}.."


def spread_of(name: str) -> str:
    """Return the name of the standard deviation of a reward within groups."""
    return name.replace(_REWARD, _SPREAD, 1)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a record's value is a number that can be drawn: finite, and far from the largest float."""
    return isinstance(value, int | float) and -LARGEST < value < LARGEST


def _plot(axes: Any, records: Records, panel: Panel, name: str) -> None:
    """Draw one number of a panel."""
    plot_points, label, style = points(records, name, panel.x), panel.label(name), panel.style_of(name)
    if style == "line":
        axes.plot(
            *plot_points,
            "o-" if name.startswith("eval") or len(plot_points[0]) == 1 else "-",
            label=label,
            markersize=4,
        )
    elif style == "dots":
        axes.plot(*plot_points, ".", label=label)
    else:
        averaged(axes, plot_points, label)
    spread = spread_of(name)
    rows = [
        (record["step"], record[name] - record[spread], record[name] + record[spread])
        for record in records
        if is_number(record.get(name)) and is_number(record.get(spread))
    ]
    if style == "band" and rows:
        axes.fill_between(*zip(*rows, strict=True), alpha=0.15, color=axes.lines[-1].get_color())
