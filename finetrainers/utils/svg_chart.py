"""Line charts as inline SVG, for pages that need no other file: axes, legends, and the numbers that a pointer shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup, escape

from .curves import Points, smoothed

_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 24
_MOST = 600  # points of a line that are drawn
_DOTTED = 20  # points of a line, up to which each has a dot
_TICKS = 5
COLORS = 8


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        label: in the legend; empty: it has none.
        points: x and y of its points, finite, x ascending.
        color: number of its color, from 0.
        style: `smoothed` is a moving average over pale points, `band` too, with a spread around it.
        spread: half the height of the band at each point.
    """

    label: str
    points: Points
    color: int = 0
    style: str = "line"
    spread: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """A diagram of one or several lines.

    Attributes:
        title: above it.
        series: its lines.
        x: what the horizontal axis has.
        is_log: whether the vertical axis is logarithmic; all values must be positive.
        marks: places on the horizontal axis, and what happened there.
    """

    title: str
    series: Sequence[Series]
    x: str = "step"
    is_log: bool = False
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)


def wants_log(values: Sequence[float]) -> bool:
    """Whether values of a metric that may have a logarithmic axis need one."""
    return bool(values) and min(values) > 0 and max(values) > 30 * min(values)


class _Axes:
    """Where values lie in the picture."""

    def __init__(self, chart: Chart) -> None:
        xs = [x for series in chart.series for x in series.points[0]]
        ys = [y for series in chart.series for y in _extent(series)]
        self.is_log = chart.is_log
        self.low_x, self.high_x = min(xs), max(xs)
        if self.low_x == self.high_x:
            self.low_x, self.high_x = self.low_x - 1, self.high_x + 1
        low, high = self._scaled(min(ys)), self._scaled(max(ys))
        pad = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        # What cannot be negative has an axis that ends at 0, if it comes near it.
        self.low_y = 0.0 if not self.is_log and 0 <= low < 2 * pad else low - pad
        self.high_y = high + pad

    def _scaled(self, y: float) -> float:
        return math.log10(y) if self.is_log else y

    def x(self, x: float) -> float:
        """The horizontal place of a value."""
        return round(_LEFT + (x - self.low_x) / (self.high_x - self.low_x) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, y: float) -> float:
        """The vertical place of a value."""
        share = (self._scaled(y) - self.low_y) / (self.high_y - self.low_y)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def x_ticks(self) -> list[float]:
        """Round places on the horizontal axis."""
        return list(round_places(self.low_x, self.high_x, most=_TICKS + 1))

    def y_ticks(self) -> list[float]:
        """Round values on the vertical axis."""
        if not self.is_log:
            return list(round_places(self.low_y, self.high_y, most=_TICKS))
        decades = range(math.floor(self.low_y), math.ceil(self.high_y) + 1)
        factors = (1,) if self.high_y - self.low_y > 2 else (1, 3)
        found = [factor * 10.0**power for power in decades for factor in factors]
        found = [value for value in found if self.low_y <= math.log10(value) <= self.high_y]
        return found[:: max(1, -(-len(found) // (_TICKS + 1)))]


def _extent(series: Series) -> Iterator[float]:
    for number, y in enumerate(series.points[1]):
        yield y
        if series.spread:
            yield y - series.spread[number]
            yield y + series.spread[number]


def round_places(low: float, high: float, *, most: int) -> Iterator[float]:
    """At most so many multiples of 1, 2 or 5 times a power of ten, from low to high."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    for number in range(first, math.floor(high / step + 1e-9) + 1):
        yield round(number * step, 12)


def short(value: float) -> str:
    """`0.0123`, `12k`, `3e-05`: a number of an axis."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and unit == "M"):
            return f"{value / size:g}{unit}"
    return f"{value:.4g}"


def chart_svg(chart: Chart) -> Markup:
    """The picture. Its colors are those of the page (`.c0` to `.c7`), and it is as wide as there is room for."""
    axes = _Axes(chart)
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in axes.y_ticks():
        y = axes.y(value)
        parts.append(f'<path class="rule" d="M{_LEFT} {y}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{short(value)}</text>')
    for value in axes.x_ticks():
        parts.append(f'<text x="{axes.x(value)}" y="{bottom + 17}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
    for place, what in chart.marks:
        if axes.low_x <= place <= axes.high_x:
            parts.append(
                f'<path class="mark" d="M{axes.x(place)} {_TOP}V{bottom}"><title>{escape(what)}</title></path>'
            )
    for series in chart.series:
        parts += _drawn(series, axes)
    label = f"{chart.title}: " + "; ".join(
        f"{one.label or 'value'} {one.points[1][0]:.4g} to {one.points[1][-1]:.4g}" for one in chart.series
    )
    return Markup('<svg viewBox="0 0 %s %s" role="img" aria-label="%s">%s<path class="cursor"/></svg>') % (
        _WIDTH, _HEIGHT, label, Markup("".join(parts)),
    )  # fmt: skip


def _drawn(series: Series, axes: _Axes) -> Iterator[str]:
    """What is drawn for a line, from the back to the front."""
    xs, ys = series.points
    if series.style == "dots":
        yield f'<path class="dots c{series.color}" d="{"".join(f"M{axes.x(x)} {axes.y(y)}h0" for x, y in _thinned(xs, ys))}"/>'
        return
    if series.style == "band" and series.spread:
        upper = list(zip(xs, (y + s for y, s in zip(ys, series.spread, strict=True)), strict=True))
        lower = list(zip(xs, (y - s for y, s in zip(ys, series.spread, strict=True)), strict=True))
        every = max(1, len(xs) // _MOST)
        yield f'<path class="band c{series.color}" d="{_path([*upper[::every], *lower[::-every]], axes)}Z"/>'
    if len(xs) == 1:
        yield f'<path class="dots c{series.color}" d="M{axes.x(xs[0])} {axes.y(ys[0])}h0"/>'
    elif series.style == "line":
        yield f'<path class="line c{series.color}" d="{_path(_thinned(xs, ys), axes)}"/>'
        if len(xs) <= _DOTTED:
            yield f'<path class="dots c{series.color}" d="{"".join(f"M{axes.x(x)} {axes.y(y)}h0" for x, y in zip(xs, ys, strict=True))}"/>'
    else:
        yield f'<path class="pale c{series.color}" d="{_path(_thinned(xs, ys), axes)}"/>'
        yield f'<path class="line c{series.color}" d="{_path(_thinned(xs, smoothed(ys)), axes)}"/>'


def _path(points: Sequence[tuple[float, float]], axes: _Axes) -> str:
    return "M" + "L".join(f"{axes.x(x)} {axes.y(y)}" for x, y in points)


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """At most about `_MOST` of the points; of each stretch the least and the greatest stay, so that no spike is lost."""
    points = list(zip(xs, ys, strict=True))
    if len(points) <= _MOST:
        return points
    length = 2 * len(points) / _MOST
    found = [points[0]]
    for number in range(_MOST // 2):
        part = points[round(number * length) : round((number + 1) * length)]
        if part:
            found += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*found, points[-1]]


def chart_data(chart: Chart) -> dict[str, Any]:
    """What the page's script shows at the pointer: the recorded points, as far as they are drawn, and where they lie."""
    axes = _Axes(chart)
    return {
        "x": chart.x,
        "from": _LEFT, "to": _WIDTH - _RIGHT, "low": axes.low_x, "high": axes.high_x, "width": _WIDTH,
        "top": _TOP, "bottom": _HEIGHT - _BOTTOM,
        "series": [
            {"label": one.label, "color": one.color, "points": [list(p) for p in _thinned(*one.points)]}
            for one in chart.series
        ],
    }  # fmt: skip
