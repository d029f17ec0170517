"""The videos of a page: samples by prompt and step, by weights and strength, of watched checkpoints, and of rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetrainers.rundir.run_records import RunRecords
from finetrainers.sampling.grid import Cell, Grid, Group, Row
from finetrainers.utils.files import read_jsonl
from finetrainers.utils.text import shortened
from finetrainers.utils.video import comment_of, evenly_spaced

from .watched import Watched

_MOST_PROMPTS, _MOST_STEPS = 8, 6
_MISSING = "not on this page"
#: Pixels of a row of clips at first, and of one of them, so that curves are in sight.
_ROW, _WIDEST = 1100, 300
#: Prompts that are seen before the others are asked for.
_OPEN = 3


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
    return _videos(Grid([f"step {step}" for step in shown], groups, open=_OPEN), len(every))


def _videos(grid: Grid, count: int) -> Videos:
    """A grid that has some of so many videos."""
    videos = Videos(replace(grid, missing=_MISSING, widest=min(_WIDEST, _ROW // len(grid.columns))))
    return Videos(videos.grid if videos.shown else None, count - videos.shown)


def _by_step(folder: Path) -> Iterator[tuple[int, dict[str, Path]]]:
    """Videos by step and name."""
    for path in sorted(folder.glob("step-*")):
        number = path.name.removeprefix("step-")
        if number.isdigit():
            yield int(number), {video.stem: video for video in sorted(path.glob("[!.]*.mp4"))}


def _some(steps: Sequence[int], most: int) -> list[int]:
    """At most so many steps, the last and if there is room the first among them."""
    return [steps[-1]] if most == 1 else [steps[place] for place in evenly_spaced(len(steps), most)]


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


# ---- `finetrainers sample` and `finetrainers watch` --------------------------------------------------------------------


def drawn_samples(run: RunRecords, limits: VideoLimits) -> Videos:
    """What `finetrainers sample` has drawn in the run's directory: a column for each LoRA and scale, newest settings first."""
    found: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}  # by prompt, size and seed, then by column
    for ledger in sorted((run.root / "samples").glob("*/ledger*.jsonl")):
        for record in sorted(read_jsonl(ledger)[0], key=lambda one: str(one.get("time"))):
            video = ledger.parent / str(record.get("file"))
            if isinstance(record.get("column"), str) and isinstance(record.get("seed"), int) and video.is_file():
                place = str(record.get("prompt")), str(record.get("size")), record["seed"]
                found.setdefault(place, {})[record["column"]] = {**record, "video": video}
    columns = sorted(dict.fromkeys(name for clips in found.values() for name in clips), key=_column_order)
    count = sum(map(len, found.values()))
    if not columns or limits.count < 1:
        return Videos(None, count)
    shown = columns[: max(1, min(_MOST_STEPS, limits.count))]
    rows: dict[tuple[str, str], list[Row]] = {}
    for prompt, size, seed in _in_turns(found)[: max(1, limits.count // len(shown))]:
        cells = [_drawn(found[prompt, size, seed].get(name), limits) for name in shown]
        rows.setdefault((prompt, size), []).append(Row(f"seed {seed}", cells))
    groups = [Group(prompt, some) for (prompt, _), some in rows.items()]
    return _videos(Grid([_column(name) for name in shown], groups), count)


def _in_turns(places: Iterable[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """The first seed of each prompt, then the second one of each, and so on."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for prompt, size, seed in places:
        seeds.setdefault((prompt, size), []).append(seed)
    turns = [(turn, (*of, seed)) for of, some in seeds.items() for turn, seed in enumerate(sorted(some))]
    return [place for _, place in sorted(turns, key=lambda one: one[0])]


def _column_order(name: str) -> tuple[bool, str, float]:
    """The base model first, then the weights, each by scale."""
    weights, _, scale = name.partition("_scale-")
    return name != "base", weights, float(scale) if scale else 1.0


def _column(name: str) -> str:
    """`result, scale 0.5`: what a column of `finetrainers sample` is called."""
    return name.replace("_scale-", ", scale ").replace("base", "base model", name == "base")


def _drawn(record: Mapping[str, Any] | None, limits: VideoLimits) -> Cell:
    if record is None or not limits.takes(record["video"]):
        return Cell(None)
    told = {"prompt": "prompt", "seed": "seed", "size": "size", "num_inference_steps": "denoising steps",
            "guidance_scale": "guidance scale", "frame_rate": "frames per second", "path": "weights", "scale": "LoRA scale"}  # fmt: skip
    facts = {said: str(record[name]) for name, said in told.items() if record.get(name) is not None}
    return Cell(record["video"], {**facts, "file": str(record["video"])})


def watched_videos(watched: Watched, limits: VideoLimits) -> Videos:
    """The clips of a preset by prompt, seed and checkpoint, with their scores."""
    clips = {place: watched.folder / str(record.get("file")) for place, record in watched.records.items()}
    clips = {place: video for place, video in clips.items() if video.is_file()}
    steps = sorted({step for step, _, _ in clips})
    if not steps or limits.count < 1:
        return Videos(None, len(clips))
    shown = _some(steps, min(_MOST_STEPS, limits.count))
    if watched.best in steps and watched.best not in shown:
        shown = sorted([*shown[1:], watched.best])
    rows: dict[str, list[Row]] = {}
    pairs = dict.fromkeys((prompt, "", seed) for _, prompt, seed in clips)
    for prompt, _, seed in _in_turns(pairs)[: max(1, limits.count // len(shown))]:
        cells = []
        for step in shown:
            record, video = watched.records.get((step, prompt, seed), {}), clips.get((step, prompt, seed))
            scores = {k: "failed" if v is None else f"{v:.4g}" for k, v in (record.get("scores") or {}).items()}
            caption = "\n".join(f"{label} {score}" for label, score in scores.items())
            cells.append(_cell(video, limits, caption=caption))
        rows.setdefault(prompt, []).append(Row(f"seed {seed}", cells))
    columns = [f"step {step}{', best' if step == watched.best else ''}" for step in shown]
    groups = [Group(prompt, some) for prompt, some in rows.items()]
    return _videos(Grid(columns, groups), len(clips))


# ---- rollouts ----------------------------------------------------------------------------------------------------------


def rollout_videos(run: RunRecords, limits: VideoLimits) -> Videos:
    """The best and the worst clip of some rollouts by advantage, and by each reward, with their scores."""
    folders = [
        (folder, scores) for folder in sorted((run.root / "rollouts").glob("step-*")) if (scores := _scores(folder))
    ]
    every = [path for folder, _ in folders for path in folder.glob("[!.]*.mp4")]
    if not folders or limits.count < 2:
        return Videos(None, len(every))
    heads = ["", *dict.fromkeys(name for _, scores in folders for name in scores.get("heads") or {})]
    most = min(_MOST_STEPS, max(1, limits.count // (2 * len(heads))))
    shown = [folders[place] for place in _some(range(len(folders)), most)]
    groups = []
    for head in heads[: max(1, limits.count // (2 * len(shown)))]:
        kinds = [kind for kind in ("best", "worst") if any(_clip(scores, head, kind) for _, scores in shown)]
        rows = [Row(kind, [_rollout(f, scores, head, kind, limits) for f, scores in shown]) for kind in kinds]
        several = len(heads) > 1
        groups.append(Group(f"by {head}" if head else "by advantage, over all rewards" if several else "", rows))
    columns = [f"step {int(folder.name.removeprefix('step-'))}" for folder, _ in shown]
    return _videos(Grid(columns, groups), len(every))


def _rollout(folder: Path, scores: Mapping[str, Any], head: str, kind: str, limits: VideoLimits) -> Cell:
    """The best or the worst clip of a rollout by a reward, or by the advantage."""
    clip = _clip(scores, head, kind)
    if clip is None:
        return Cell(None)
    video = folder / str(clip.get("video", f"{kind}.mp4"))
    return _cell(video if video.is_file() else None, limits, caption=_caption(scores, clip))


def _clip(scores: Mapping[str, Any], head: str, kind: str) -> Mapping[str, Any] | None:
    """What is known of that clip; None where a prompt has only one."""
    clip = ((scores.get("heads") or {}).get(head) or {}).get(kind) if head else scores.get(kind)
    return clip if isinstance(clip, Mapping) else None


def _scores(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "scores.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and folder.name.removeprefix("step-").isdigit() else {}


def _caption(scores: Mapping[str, Any], clip: Mapping[str, Any]) -> str:
    """Scores, advantage and prompt of a clip."""
    lines = [f"{name} {value:.4g}" for name, value in (clip.get("reward") or {}).items()]
    if isinstance(clip.get("advantage"), int | float):
        lines.append(f"advantage {clip['advantage']:+.2f}")
    return "\n".join([*lines, shortened(str(scores.get("prompt", "")), 120)])
