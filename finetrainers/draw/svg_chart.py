"""Line charts as inline SVG, for pages that need no other file: axes, legends, and the values at the pointer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from markupsafe import Markup, escape

from .curves import Points, smoothed

_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 24
_MOST = 600  # drawn points of a line
_DOTTED = 20  # maximum points of a line with a dot at each
_TICKS = 5
COLORS = 8


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        label: in the legend, or empty without one.
        points: x and y of its points, finite, x ascending.
        color: number of its color, from 0.
        style: `smoothed` is a moving average over pale points, `band` the same with a spread around it.
        spread: half the height of the band at each point.
    """

    label: str
    points: Points
    color: int = 0
    style: str = "line"
    spread: Sequence[float] = ()

    @cached_property
    def drawn_points(self) -> list[tuple[float, float]]:
        """Points that are drawn."""
        return _thin(*self.points)

    @cached_property
    def band(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Upper and lower edge of the band."""
        xs, ys = self.points
        pairs = list(zip(ys, self.spread, strict=True)) if self.spread else []
        return _thin(xs[: len(pairs)], [y + s for y, s in pairs]), _thin(xs[: len(pairs)], [y - s for y, s in pairs])


@dataclass(frozen=True)
class Mark:
    """An event on the horizontal axis.

    Attributes:
        x: its position.
        text: description of the event.
        kind: drawn as a dashed line, a triangle for a spike, or a cross for a failure.
        color: of its line, if there are several.
    """

    x: float
    text: str
    kind: Literal["resume", "spike", "failure"] = "resume"
    color: int | None = None


@dataclass(frozen=True)
class Level:
    """A dashed horizontal line, such as a plan, in the color of its series."""

    y: float
    text: str
    color: int


@dataclass(frozen=True)
class Chart:
    """A diagram of one or several lines.

    Attributes:
        title: above it.
        series: its lines.
        x: quantity on the horizontal axis.
        is_log: whether the vertical axis is logarithmic; all values must be positive.
        marks: events.
        levels: to compare the values with.
        note: description of the drawing, for readers.
    """

    title: str
    series: Sequence[Series]
    x: str = "step"
    is_log: bool = False
    marks: Sequence[Mark] = field(default_factory=tuple)
    levels: Sequence[Level] = field(default_factory=tuple)
    note: str = ""

    @cached_property
    def axes(self) -> _Axes:
        """Axes of the chart, which place its values."""
        return _Axes(self)


def wants_log(values: Sequence[float]) -> bool:
    """Return whether values of a metric that may have a logarithmic axis need one."""
    return bool(values) and min(values) > 0 and max(values) > 30 * min(values)


class _Axes:
    """Positions of values in a chart."""

    def __init__(self, chart: Chart) -> None:
        points = [point for line in chart.series for part in (line.drawn_points, *line.band) for point in part]
        xs, ys = [x for x, _ in points], [*(y for _, y in points), *(level.y for level in chart.levels)]
        self.is_log = chart.is_log
        self.low_x, self.high_x = min(xs), max(xs)
        if self.low_x == self.high_x:
            margin = max(1, 1e-9 * abs(self.low_x))  # adding 1 does not change a large number
            self.low_x, self.high_x = self.low_x - margin, self.high_x + margin
        low, high = self._scale(min(ys)), self._scale(max(ys))
        pad = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        # The axis of nonnegative values ends at 0 if they come near it.
        self.low_y = 0.0 if not self.is_log and 0 <= low < 2 * pad else low - pad
        self.high_y = high + pad

    def _scale(self, y: float) -> float:
        return math.log10(y) if self.is_log else y

    def x(self, x: float) -> float:
        """Return the horizontal position of a value."""
        return round(_LEFT + (x - self.low_x) / (self.high_x - self.low_x) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, y: float) -> float:
        """Return the vertical position of a value."""
        share = (self._scale(y) - self.low_y) / (self.high_y - self.low_y)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def y_ticks(self) -> list[float]:
        """Return round values on the vertical axis."""
        if not self.is_log:
            return list(round_places(self.low_y, self.high_y, limit=_TICKS))
        decades = range(math.floor(self.low_y), math.ceil(self.high_y) + 1)
        factors = (1,) if self.high_y - self.low_y > 2 else (1, 3)
        ticks = [factor * 10.0**power for power in decades for factor in factors]
        ticks = [value for value in ticks if self.low_y <= math.log10(value) <= self.high_y]
        return ticks[:: max(1, -(-len(ticks) // (_TICKS + 1)))]


def round_places(low: float, high: float, *, limit: int) -> Iterator[float]:
    """Yield at most `limit` multiples of 1, 2 or 5 times a power of ten, from low to high."""
    rough = (high - low) / limit
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    for multiple in range(first, math.floor(high / step + 1e-9) + 1):
        yield round(multiple * step, 12)


def short(value: float) -> str:
    """Return a number of an axis: `0.0123`, `12k`, `3e-05`."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and unit == "M"):
            return f"{value / size:g}{unit}"
    return f"{value:.4g}"


def chart_svg(chart: Chart) -> Markup:
    """Return the chart as SVG, with colors of the page (`.c0` to `.c7`), as wide as its container."""
    axes, bottom, right = chart.axes, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in axes.y_ticks():
        y = axes.y(value)
        parts.append(f'<path class="rule" d="M{_LEFT} {y}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{short(value)}</text>')
    for value in round_places(axes.low_x, axes.high_x, limit=_TICKS + 1):
        parts.append(f'<text x="{axes.x(value)}" y="{bottom + 17}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
    for level in chart.levels:
        line = f'<path class="level c{level.color}" d="M{_LEFT} {axes.y(level.y)}H{right}">'
        parts.append(f"{line}<title>{escape(level.text)}</title></path>")
    for series in chart.series:
        parts += _draw_series(series, axes)
    parts += _draw_marks(chart)
    label = f"{chart.title}: " + "; ".join(
        f"{line.label or 'value'} {line.points[1][0]:.4g} to {line.points[1][-1]:.4g}" for line in chart.series
    )
    return Markup('<svg viewBox="0 0 %s %s" role="img" aria-label="%s">%s<path class="cursor"/></svg>') % (
        _WIDTH, _HEIGHT, label, Markup("".join(parts)),
    )  # fmt: skip


def _draw_marks(chart: Chart) -> Iterator[str]:
    """Yield the events within the chart; of several of one kind at one position, the first has their number."""
    axes, bottom = chart.axes, _HEIGHT - _BOTTOM
    texts_by_mark: dict[tuple[float, str, int | None], list[str]] = {}
    for mark in chart.marks:
        if axes.low_x <= mark.x <= axes.high_x:
            texts_by_mark.setdefault((round(axes.x(mark.x)), mark.kind, mark.color), []).append(mark.text)
    shapes = {
        "resume": "M{x} {top}V{bottom}",
        "spike": "M{x} {top}l-4 7h8Z",
        "failure": "M{x} {top}m-4 0l8 8m-8 0l8 -8",
    }
    for (x, kind, color), texts in texts_by_mark.items():
        path = shapes[kind].format(x=x, top=_TOP, bottom=bottom)
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        color_class = "" if color is None else f" c{color}"
        yield f'<path class="mark {kind}{color_class}" d="{path}"><title>{escape(texts[0] + more)}</title></path>'


def _draw_series(series: Series, axes: _Axes) -> Iterator[str]:
    """Yield the elements of a line, from the back to the front."""
    xs, ys = series.points
    moves = "".join(f"M{axes.x(x)} {axes.y(y)}h0" for x, y in series.drawn_points)
    dots = f'<path class="dots c{series.color}" d="{moves}"/>'
    if series.style == "dots" or len(xs) == 1:
        yield dots
        return
    if series.style == "band" and series.spread:
        upper, lower = series.band
        yield f'<path class="band c{series.color}" d="{_path([*upper, *lower[::-1]], axes)}Z"/>'
    if series.style == "line":
        yield f'<path class="line c{series.color}" d="{_path(series.drawn_points, axes)}"/>'
        if len(xs) <= _DOTTED:
            yield dots
    else:
        yield f'<path class="pale c{series.color}" d="{_path(series.drawn_points, axes)}"/>'
        yield f'<path class="line c{series.color}" d="{_path(_thin(xs, smoothed(ys)), axes)}"/>'


def _path(points: Sequence[tuple[float, float]], axes: _Axes) -> str:
    return "M" + "L".join(f"{axes.x(x)} {axes.y(y)}" for x, y in points)


def _thin(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return at most about `_MOST` points; minimum and maximum of each segment stay, so that no spike is lost."""
    count = len(xs)
    if count <= _MOST:
        return list(zip(xs, ys, strict=True))
    ends = [round(index * 2 * count / _MOST) for index in range(_MOST // 2 + 1)]
    indices = {0, count - 1}
    for start, end in itertools.pairwise(ends):
        segment = ys[start:end]
        indices |= {start + segment.index(min(segment)), start + segment.index(max(segment))}
    return [(xs[index], ys[index]) for index in sorted(indices)]


def chart_data(chart: Chart) -> dict[str, Any]:
    """Return the data of the page's script: the drawn points with recorded values, and positions of the axes."""
    axes = chart.axes
    return {
        "x": chart.x,
        "from": _LEFT, "to": _WIDTH - _RIGHT, "low": axes.low_x, "high": axes.high_x, "width": _WIDTH,
        "top": _TOP, "bottom": _HEIGHT - _BOTTOM,
        "series": [
            {"label": line.label, "color": line.color, "points": [[x, float(f"{y:.5g}")] for x, y in line.drawn_points]}
            for line in chart.series
        ],
    }  # fmt: skip
