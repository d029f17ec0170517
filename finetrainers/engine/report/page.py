"""The page of one run or several, and what writes it at the end of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from finetrainers.data.inspect.html_report import with_code
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.page import render_page
from finetrainers.utils.svg_chart import chart_data, chart_svg
from finetrainers.utils.text import plural

from ..sample.grid import grid_html
from . import sections
from .charts import chart_groups
from .media import VideoLimits, Videos, rollout_videos, sample_videos
from .run_records import RunRecords, read_run

logger = logging.getLogger(__name__)

#: The page that every run has at its end.
REPORT = "report.html"
#: Videos on a page, at most.
MOST_VIDEOS = 36
_SIZE = "@page-size@"


def make_report(runs: Sequence[RunRecords], limits: VideoLimits) -> str:
    """The page: a file that needs no other and no network.

    Args:
        runs: one, or several that are compared.
        limits: how much video it may have.
    """
    rollouts = _rollouts(runs, limits)
    samples = sample_videos(runs, VideoLimits(limits.count - sum(one.shown for _, one in rollouts), limits.own_size))
    groups = chart_groups(runs)
    videos = [samples, *(one for _, one in rollouts)]
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
        memory=_of_each(runs, sections.memory_rows),
        data=_of_each(runs, sections.data_of),
        events=_of_each(runs, sections.events_of),
        settings=sections.settings_of(runs),
        commands=_of_each(runs, sections.commands_of),
        groups=groups,
        chart_data=[chart_data(chart) for group in groups for chart in group.charts],
        samples=samples,
        rollouts=[(name, one) for name, one in rollouts if one.grid is not None],
        videos=_videos_text(videos, runs, limits),
        size=_SIZE,
    )
    # A lone half of a character, from a file name that is not UTF-8, becomes a visible escape.
    page = page.encode("utf-8", "backslashreplace").decode("utf-8")
    return page.replace(_SIZE, _size_text(len(page.encode())))


def _of_each(runs: Sequence[RunRecords], read: Callable[[RunRecords], Any]) -> list[tuple[RunRecords, Any]]:
    """What is read of each run that has it."""
    return [(run, found) for run in runs if (found := read(run))]


def _rollouts(runs: Sequence[RunRecords], limits: VideoLimits) -> list[tuple[str, Videos]]:
    """The rollouts of each run, which get a third of the videos at most."""
    share = VideoLimits(limits.count // (3 * len(runs)) // 2 * 2, limits.own_size)
    return [(run.name, rollout_videos(run, share)) for run in runs]


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
