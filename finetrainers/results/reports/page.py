"""The page of one run or several, and what writes it at the end of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from finetrainers.data.inspect.html_report import with_code
from finetrainers.draw.page import render_page
from finetrainers.draw.svg_chart import chart_data, chart_svg
from finetrainers.rundir.run_records import RunRecords, read_run
from finetrainers.sampling.grid import grid_html
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.text import plural

from . import sections
from .charts import ChartGroup, chart_groups, watched_charts
from .health import health_of
from .media import VideoLimits, Videos, drawn_samples, rollout_videos, sample_videos, watched_videos
from .memory import memory_charts, memory_of
from .watched import Watched, watched_of

logger = logging.getLogger(__name__)

#: The page that every run has at its end.
REPORT = "report.html"
#: Videos on a page, at most.
MOST_VIDEOS = 36
_NONE = VideoLimits(0)
_SIZE = "@page-size@"


def make_report(runs: Sequence[RunRecords], limits: VideoLimits) -> str:
    """The page: a file that needs no other and no network.

    Args:
        runs: one, or several that are compared.
        limits: how much video it may have.
    """
    watched = [one for run in runs for one in watched_of(run)]
    shown = _shown(runs, watched, limits)
    groups = chart_groups(runs)
    memory, scores = ChartGroup("Memory", memory_charts(runs)), watched_charts(runs, watched)
    health = _of_each(runs, health_of)
    # In the order of the template: the script finds the numbers of a chart by its place on the page.
    machines = [ChartGroup("Machines", found.charts) for _, found in health]
    charts = [c for group in [*groups, *machines, memory, *([scores] if scores else [])] for c in group.charts]
    # Prompts, file names and messages are anybody's: the template escapes them, and the script puts them in as text.
    page = render_page(
        Path(__file__).with_name("report.html"),
        filters={"code": with_code, "svg": chart_svg, "grid": grid_html},
        title=", ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        runs=runs,
        status_of=sections.status_of,
        facts_of=sections.facts_of,
        figures=sections.figures_of(runs[0]),
        compared=sections.compared(runs),
        memory=_of_each(runs, memory_of),
        memory_charts=memory.charts,
        health=health,
        data=_of_each(runs, sections.data_of),
        events=_of_each(runs, sections.events_of),
        settings=sections.settings_of(runs),
        commands=_of_each(runs, sections.commands_of),
        groups=groups,
        scores=scores,
        watched=watched,
        marked={mark.kind for chart in charts for mark in chart.marks},
        chart_data=[chart_data(chart) for chart in charts],
        shown=shown,
        videos=_videos_text([one for _, some in shown.values() for _, one in some], runs, limits),
        size=_SIZE,
    )
    # A lone half of a character, from a file name that is not UTF-8, becomes a visible escape.
    page = page.encode("utf-8", "backslashreplace").decode("utf-8")
    return page.replace(_SIZE, _size_text(len(page.encode())))


def _of_each(runs: Sequence[RunRecords], read: Callable[[RunRecords], Any]) -> list[tuple[RunRecords, Any]]:
    """What is read of each run that has it."""
    return [(run, found) for run in runs if (found := read(run))]


def _shown(
    runs: Sequence[RunRecords], watched: Sequence[Watched], limits: VideoLimits
) -> dict[str, tuple[str, list[tuple[str, Videos]]]]:
    """Titles and videos of the sections that have some, by name. Each gets a part, and the first one what the others leave."""
    named = len(runs) > 1
    makers: dict[str, tuple[str, list[tuple[str, Callable[[VideoLimits], Videos]]]]] = {
        "rollouts": ("Best and worst clips of rollouts", [(run.name if named else "", partial(rollout_videos, run)) for run in runs]),
        "drawn": ("Drawn with finetrainers sample", [(run.name if named else "", partial(drawn_samples, run)) for run in runs]),
        "watched": ("Watched checkpoints", [
            (f"{one.run.name}, {one.preset}" if named else f"preset {one.preset}", partial(watched_videos, one)) for one in watched
        ]),
    }  # fmt: skip
    # Sections without a video get no part.
    present = {name: [(of, make) for of, make in some if make(_NONE).left_out] for name, (_, some) in makers.items()}
    parts = 1 + sum(bool(some) for some in present.values())
    found = {}
    for name, some in present.items():
        share = replace(limits, count=limits.count // parts // max(1, len(some)) // 2 * 2)
        found[name] = (makers[name][0], [(of, make(share)) for of, make in some])
    left = limits.count - sum(one.shown for _, some in found.values() for _, one in some)
    return {"samples": ("Samples", [("", sample_videos(runs, replace(limits, count=left)))]), **found}


def _videos_text(videos: Sequence[Videos], runs: Sequence[RunRecords], limits: VideoLimits) -> str:
    """How many videos are on the page, and how to have the others."""
    shown, left_out = sum(one.shown for one in videos), sum(one.left_out for one in videos)
    if not shown and not left_out:
        return ""
    text = f"{plural(shown, 'video')} of {shown + left_out}" if left_out else plural(shown, "video")
    if not left_out:
        return text
    names = " ".join(str(run.root) for run in runs)
    more = f"`finetrainers report {names} --videos {shown + left_out}`"
    return f"{text}; {left_out} left out, {more} shows more"


def _size_text(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{max(1, round(size / 1e3))} kB"


def write_run_report(root: Path) -> None:
    """Write the page of a run that has just ended into its directory. What goes wrong is a warning: the run is done."""
    try:
        write_text_atomic(root / REPORT, make_report([read_run(root)], VideoLimits(MOST_VIDEOS, own_size=True)))
    except Exception as error:
        logger.warning("%s was not written: %s: %s", root / REPORT, type(error).__name__, error)
