"""Report of one or several runs: an HTML page, also written at the end of a run."""

from __future__ import annotations

import logging
import time
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
from .memory import memory_charts, summarize_memory
from .watched import Watched, read_watched

logger = logging.getLogger(__name__)

#: The page that every run has at its end.
REPORT = "report.html"
#: Videos on a page, at most.
MOST_VIDEOS = 36
_NONE = VideoLimits(0)
_SIZE = "@page-size@"


def make_report(runs: Sequence[RunRecords], limits: VideoLimits, *, reload_s: float | None = None) -> str:
    """Return a page that needs no other file and no network.

    Args:
        runs: one, or several that are compared.
        limits: for the page's videos.
        reload_s: seconds after which a browser reloads the page, or None if it does not.
    """
    watched = [preset for run in runs for preset in read_watched(run)]
    video_sections = _video_sections(runs, watched, limits)
    groups = chart_groups(runs)
    memory, scores = ChartGroup("Memory", memory_charts(runs)), watched_charts(runs, watched)
    health = _read_each(runs, health_of)
    # In the order of the template: the script finds the numbers of a chart by its position on the page.
    machines = [ChartGroup("Machines", run_health.charts) for _, run_health in health]
    charts = [c for group in [*groups, *machines, memory, *([scores] if scores else [])] for c in group.charts]
    # Prompts, file names and messages are untrusted: the template escapes them, and the script inserts them as text.
    page = render_page(
        Path(__file__).with_name("report.html"),
        filters={"code": with_code, "svg": chart_svg, "grid": grid_html},
        title=", ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        runs=runs,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        reload_s=reload_s,
        status_of=sections.status_of,
        facts_of=sections.facts_of,
        figures=sections.summary_figures(runs[0]),
        compared=sections.compared(runs),
        memory=_read_each(runs, summarize_memory),
        memory_charts=memory.charts,
        health=health,
        data=_read_each(runs, sections.summarize_data),
        events=_read_each(runs, sections.events_of),
        settings=sections.list_settings(runs),
        commands=_read_each(runs, sections.list_commands),
        groups=groups,
        scores=scores,
        marked={mark.kind for chart in charts for mark in chart.marks},
        chart_data=[chart_data(chart) for chart in charts],
        shown=video_sections,
        videos=_videos_text([videos for _, titled in video_sections.values() for _, videos in titled], runs),
        size=_SIZE,
    )
    # A lone half of a character, from a file name that is not UTF-8, becomes a visible escape.
    content = page.encode("utf-8", "backslashreplace")
    kilobytes = len(content) / 1e3
    size = f"{kilobytes / 1e3:.1f} MB" if kilobytes >= 1e3 else f"{max(1, round(kilobytes))} kB"
    return content.decode("utf-8").replace(_SIZE, size)


def _read_each(runs: Sequence[RunRecords], read: Callable[[RunRecords], Any]) -> list[tuple[RunRecords, Any]]:
    """Return each run with the value that `read` returns for it, except where that is empty."""
    return [(run, value) for run in runs if (value := read(run))]


def _video_sections(
    runs: Sequence[RunRecords], watched: Sequence[Watched], limits: VideoLimits
) -> dict[str, tuple[str, list[tuple[str, Videos]]]]:
    """Return titles and videos of the sections with videos, by name.

    Each section gets a share of the videos; the first one also gets those that the others leave.
    """
    several = len(runs) > 1
    titled_runs = [(run.name if several else "", run) for run in runs]
    makers: dict[str, tuple[str, list[tuple[str, Callable[[VideoLimits], Videos]]]]] = {
        "rollouts": (
            "Best and worst clips of rollouts",
            [(title, partial(rollout_videos, run)) for title, run in titled_runs],
        ),
        "drawn": (
            "Drawn with finetrainers sample",
            [(title, partial(drawn_samples, run)) for title, run in titled_runs],
        ),
        "watched": (
            "Watched checkpoints",
            [
                (f"{p.run.name}, {p.preset}" if several else f"preset {p.preset}", partial(watched_videos, p))
                for p in watched
            ],
        ),
    }
    # Sections without a video get no share.
    present = {
        name: (heading, [(title, build) for title, build in entries if build(_NONE).left_out])
        for name, (heading, entries) in makers.items()
    }
    parts = 1 + sum(bool(entries) for _, entries in present.values())
    shown = {}
    for name, (heading, entries) in present.items():
        share = replace(limits, count=limits.count // parts // max(1, len(entries)) // 2 * 2)
        shown[name] = heading, [(title, build(share)) for title, build in entries]
    remaining = limits.count - sum(videos.shown_count for _, entries in shown.values() for _, videos in entries)
    return {"samples": ("Samples", [("", sample_videos(runs, replace(limits, count=remaining)))]), **shown}


def _videos_text(videos: Sequence[Videos], runs: Sequence[RunRecords]) -> str:
    """Return the number of videos on the page, and the command that includes those left out."""
    count, left_out = sum(grid.shown_count for grid in videos), sum(grid.left_out for grid in videos)
    if not left_out:
        return plural(count, "video") if count else ""
    names = " ".join(str(run.root) for run in runs)
    more = f"`finetrainers report {names} --videos {count + left_out}`"
    return f"{plural(count, 'video')} of {count + left_out}; {left_out} left out, {more} shows more"


def write_run_report(root: Path) -> None:
    """Write the page of a run that has just ended into its directory.

    Errors are logged as warnings: the run is done.
    """
    try:
        write_text_atomic(root / REPORT, make_report([read_run(root)], VideoLimits(MOST_VIDEOS, own_size=True)))
    except Exception as error:
        logger.warning("%s was not written: %s: %s", root / REPORT, type(error).__name__, error)
