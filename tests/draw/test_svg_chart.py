"""Charts as SVG: where points lie, round ticks, logarithmic axes, and long runs that keep their spikes."""

from __future__ import annotations

import re

import pytest

from finetrainers.draw.curves import smoothed
from finetrainers.draw.svg_chart import (
    Chart,
    Level,
    Mark,
    Series,
    chart_data,
    chart_svg,
    round_places,
    short,
    wants_log,
)


def places(svg: str, kind: str) -> list[tuple[float, float]]:
    path = re.search(rf'class="{kind} c0" d="M([^"]*)"', svg)
    assert path is not None
    return [(float(x), float(y)) for x, y in (point.split() for point in path[1].split("L"))]


def test_points_lie_where_they_belong() -> None:
    chart = Chart("a <title>", [Series("", ([0.0, 5.0, 10.0], [1.0, 3.0, 2.0]))], marks=[Mark(5.0, "resumed & so on")])
    svg, data = str(chart_svg(chart)), chart_data(chart)
    (x0, y0), (x1, y1), (x2, y2) = places(svg, "line")
    assert (x0, x2) == (data["from"], data["to"])
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert (y0 - y2) == pytest.approx((y0 - y1) / 2, abs=0.2)
    assert data["top"] <= y1 < y0 <= data["bottom"]
    assert data["series"][0]["points"] == [[0.0, 1.0], [5.0, 3.0], [10.0, 2.0]]
    assert f'class="mark resume" d="M{round(x1)} ' in svg
    assert "a &lt;title&gt;" in svg
    assert "resumed &amp; so on" in svg


def test_a_logarithmic_axis() -> None:
    chart = Chart("", [Series("", ([1.0, 2.0, 3.0], [0.01, 1.0, 100.0]))], is_log=True)
    svg = str(chart_svg(chart))
    ys = [y for _, y in places(svg, "line")]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert re.findall(r'text-anchor="end">([^<]*)<', svg) == ["0.01", "0.1", "1", "10", "100"]
    assert wants_log([0.01, 1.0])
    assert not wants_log([0.0, 1.0])
    assert not wants_log([0.1, 1.0])


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(0, 100, [0, 20, 40, 60, 80, 100]), (-0.03, 0.31, [0, 0.1, 0.2, 0.3]), (7, 8, [7, 7.2, 7.4, 7.6, 7.8, 8])],
)
def test_ticks_are_round(low: float, high: float, found: list[float]) -> None:
    assert list(round_places(low, high, limit=5)) == found


def test_one_point_and_equal_values_can_be_drawn() -> None:
    assert "M" in chart_svg(Chart("", [Series("", ([3.0], [0.0]))]))
    assert "M" in chart_svg(Chart("", [Series("", ([1.0, 2.0], [5.0, 5.0]), style="band", spread=[0.0, 0.0])]))
    assert [short(value) for value in (0.0, 12_000, 2e6, 3e-5, 0.25)] == ["0", "12k", "2M", "3e-05", "0.25"]


def test_long_runs_keep_their_spikes() -> None:
    ys = [1.0 + 0.001 * (k % 7) for k in range(50_000)]
    ys[12_345], ys[40_000] = 9.0, -3.0
    xs = [float(k) for k in range(50_000)]
    [series] = chart_data(Chart("", [Series("", (xs, ys))]))["series"]
    assert len(series["points"]) < 700
    assert {(12_345.0, 9.0), (40_000.0, -3.0), (0.0, ys[0]), (49_999.0, ys[-1])} <= {tuple(p) for p in series["points"]}
    assert [x for x, _ in series["points"]] == sorted(x for x, _ in series["points"])
    mean = smoothed(ys)
    assert mean[25_000] == pytest.approx(sum(ys[24_500:25_501]) / 1001)


def test_events_are_told_apart_and_those_at_one_place_are_counted() -> None:
    marks = [Mark(5000.0 + k, f"spike {k}", "spike") for k in range(3)] + [
        Mark(2000.0, "out of memory", "failure", 2),
        Mark(99_999.0, "later"),
    ]
    svg = str(chart_svg(Chart("", [Series("", ([0.0, 10_000.0], [0.0, 1.0]))], marks=marks)))
    assert svg.count('class="mark') == 2
    assert "<title>spike 0 (and 2 more)</title>" in svg
    assert 'class="mark failure c2"' in svg


def test_levels_are_in_the_picture() -> None:
    chart = Chart("", [Series("", ([0.0, 1.0], [1.0, 2.0]))], levels=[Level(8.0, "8 GiB planned", 1)])
    svg = str(chart_svg(chart))
    found = re.search(r'class="level c1" d="M[\d.]+ ([\d.]+)H', svg)
    assert found is not None
    assert chart_data(chart)["top"] <= float(found[1]) < min(y for _, y in places(svg, "line"))


def test_the_band_of_a_long_run_keeps_its_spikes() -> None:
    xs, ys = [float(k) for k in range(50_000)], [1.0] * 50_000
    spread = [0.1] * 50_000
    spread[31_415] = 5.0
    upper, lower = Series("", (xs, ys), style="band", spread=spread).band
    assert (31_415.0, 6.0) in upper
    assert (31_415.0, -4.0) in lower
    assert len(upper) < 700
