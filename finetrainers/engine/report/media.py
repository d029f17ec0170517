"""The videos of a page: samples by prompt and step, and the best and the worst clips of rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.utils.contact_sheet import spaced
from finetrainers.utils.text import shortened
from finetrainers.utils.video import comment_of

from ..sample.grid import Cell, Grid, Group, Row
from .run_records import RunRecords

_MOST_PROMPTS, _MOST_STEPS = 8, 6
_MISSING = "not on this page"


@dataclass(frozen=True)
class VideoLimits:
    """How much video a page may have.

    Attributes:
        count: of videos, at most.
        own_size: whether only files that are small as they are may be on it, since encoding others takes time.
    """

    count: int
    own_size: bool = False

    #: Bytes of a file that is small; `web_video` leaves it as it is.
    SMALL = 300_000

    def takes(self, path: Path) -> bool:
        """Whether a file may be on the page."""
        return self.count > 0 and (not self.own_size or path.stat().st_size <= self.SMALL)


@dataclass(frozen=True)
class Videos:
    """A grid of videos, and how many that were found are not in it; no grid where there is nothing to show."""

    grid: Grid | None
    left_out: int = 0

    @property
    def shown(self) -> int:
        """How many are in the grid."""
        return 0 if self.grid is None else sum(cell.video is not None for cell in self.grid.cells)


def sample_videos(runs: Sequence[RunRecords], limits: VideoLimits) -> Videos:
    """Samples by prompt (and run) and step; of many steps and prompts some, the last step among them."""
    found = {run.root: dict(_by_step(run.root / "samples")) for run in runs}
    every = [path for steps in found.values() for videos in steps.values() for path in videos.values()]
    names = list(dict.fromkeys(path.stem for path in sorted(every, key=lambda path: path.stem)))
    steps = sorted({step for of_run in found.values() for step in of_run})
    if not names or limits.count < 1:
        return Videos(None, len(every))
    most = max(1, limits.count // len(runs))
    names = names[: min(_MOST_PROMPTS, max(1, most // 2))]
    shown = _some(steps, min(_MOST_STEPS, max(1, most // len(names))))
    groups = []
    for name in names:
        rows = []
        for run in runs:
            paths = [found[run.root].get(step, {}).get(name) for step in shown]
            if any(paths):
                rows.append(Row(run.name if len(runs) > 1 else "", [_cell(path, limits) for path in paths]))
        if rows:
            groups.append(Group(_heading(next(path for path in every if path.stem == name)), rows))
    grid = Grid([f"step {step}" for step in shown], groups, missing=_MISSING)
    videos = Videos(grid)
    return Videos(grid if videos.shown else None, len(every) - videos.shown)


def _by_step(folder: Path) -> Iterator[tuple[int, dict[str, Path]]]:
    """Videos by step and name."""
    for path in sorted(folder.glob("step-*")):
        number = path.name.removeprefix("step-")
        if number.isdigit():
            yield int(number), {video.stem: video for video in sorted(path.glob("[!.]*.mp4"))}


def _some(steps: Sequence[int], most: int) -> list[int]:
    """At most so many steps, the last and if there is room the first among them."""
    return [steps[-1]] if most == 1 else [steps[place] for place in spaced(len(steps), most)]


def _cell(path: Path | None, limits: VideoLimits, *, caption: str = "") -> Cell:
    if path is None or not limits.takes(path):
        return Cell(None, caption=caption)
    return Cell(path, {"file": str(path), **_told(path)}, caption=caption)


def _told(path: Path) -> dict[str, str]:
    """What the video says of itself."""
    _, _, rest = _comment(path).partition("\n")
    return {"sampled with": rest} if rest else {}


def _heading(path: Path) -> str:
    """The prompt of a sample; its name where the video does not say it."""
    return _comment(path).partition("\n")[0] or path.stem


def _comment(path: Path) -> str:
    try:
        return comment_of(path)
    except (OSError, ValueError):  # cut off while it is copied; PyAV's errors are of these
        return ""


def rollout_videos(run: RunRecords, limits: VideoLimits) -> Videos:
    """The best and the worst clip of some rollouts, with their scores."""
    folders = [
        (folder, scores) for folder in sorted((run.root / "rollouts").glob("step-*")) if (scores := _scores(folder))
    ]
    every = [path for folder, _ in folders for path in folder.glob("[!.]*.mp4")]
    if not folders or limits.count < 2:
        return Videos(None, len(every))
    places = _some(range(len(folders)), min(_MOST_STEPS, limits.count // 2))
    shown = [folders[place] for place in places]
    rows = []
    for kind in ("best", "worst"):
        cells = []
        for folder, scores in shown:
            video = folder / f"{kind}.mp4"
            cells.append(_cell(video if video.is_file() else None, limits, caption=_caption(scores, kind)))
        rows.append(Row(kind, cells))
    columns = [f"step {int(folder.name.removeprefix('step-'))}" for folder, _ in shown]
    videos = Videos(Grid(columns, [Group("", rows)], missing=_MISSING))
    return Videos(videos.grid if videos.shown else None, len(every) - videos.shown)


def _scores(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "scores.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and folder.name.removeprefix("step-").isdigit() else {}


def _caption(scores: dict[str, Any], kind: str) -> str:
    """Scores, advantage and prompt of a clip."""
    clip = scores.get(kind) or {}
    lines = [f"{name} {value:.4g}" for name, value in (clip.get("reward") or {}).items()]
    if isinstance(clip.get("advantage"), int | float):
        lines.append(f"advantage {clip['advantage']:+.2f}")
    return "\n".join([*lines, shortened(str(scores.get("prompt", "")), 120)])
