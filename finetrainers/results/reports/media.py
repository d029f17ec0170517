"""Videos of a page: samples by prompt and step, by weights and strength, of watched checkpoints, and of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from finetrainers.draw.curves import is_number
from finetrainers.plan.lineage import ancestors
from finetrainers.rundir.find import step_of
from finetrainers.rundir.run_records import RunRecords
from finetrainers.sampling.grid import Cell, Grid, Group, Row
from finetrainers.utils.files import names_existing
from finetrainers.utils.reading import fits, fitting, read_json_object, read_jsonl
from finetrainers.utils.text import shortened
from finetrainers.utils.video import evenly_spaced, read_comment

from .watched import Watched

_Place = tuple[str, str, int]  # prompt, size and seed
_MOST_PROMPTS, _MOST_STEPS = 8, 10
#: Types in the record of a rollout, which may be edited.
_SCORES_TYPES = {"heads": {str: dict}, "best": dict, "worst": dict}
_MISSING = "not on this page"
#: Initial widths in pixels of a row of clips and of one clip, so that curves stay in sight.
_ROW, _WIDEST = 1100, 300
#: Prompts that are open before the others are unfolded.
_OPEN = 3


@dataclass(frozen=True)
class VideoLimits:
    """Limits for the videos of a page.

    Attributes:
        count: maximum number of videos.
        own_size: allow only files that are small without encoding, since encoding takes time.
    """

    count: int
    own_size: bool = False

    #: Maximum bytes of a small file; `web_video` does not encode it.
    SMALL = 300_000

    def takes(self, path: Path) -> bool:
        """Return whether a file may be on the page."""
        return self.count > 0 and path.is_file() and (not self.own_size or path.stat().st_size <= self.SMALL)


@dataclass(frozen=True)
class Videos:
    """A grid of videos, or None without any, and the number of other videos that are left out."""

    grid: Grid | None
    left_out: int = 0

    @property
    def shown_count(self) -> int:
        """Number of videos in the grid."""
        return 0 if self.grid is None else sum(cell.video is not None for cell in self.grid.cells)


def sample_videos(runs: Sequence[RunRecords], limits: VideoLimits) -> Videos:
    """Return samples by prompt (and run) and step.

    With many prompts and steps only some of them, including the last step.
    """
    by_run = {run.root: _by_step(run.root / "samples") for run in runs}
    paths = [path for steps in by_run.values() for videos in steps.values() for path in videos.values()]
    names = sorted({path.stem for path in paths})
    steps = sorted({step for run_steps in by_run.values() for step in run_steps})
    if not names or limits.count < 1:
        return Videos(None, len(paths))
    videos_per_run = max(1, limits.count // len(runs))
    names = names[: min(_MOST_PROMPTS, max(1, videos_per_run // 2))]
    columns = _select_steps(steps, min(_MOST_STEPS, max(1, videos_per_run // len(names))))
    groups = []
    for name in names:
        rows = []
        for run in runs:
            row_paths = [by_run[run.root].get(step, {}).get(name) for step in columns]
            if any(row_paths):
                rows.append(Row(run.name if len(runs) > 1 else "", [_cell(path, limits) for path in row_paths]))
        if rows:
            first = next(path for path in paths if path.stem == name)
            groups.append(Group(_read_comment(first).partition("\n")[0] or name, rows))
    # Weights from another run are not those of the base model, even at step 0.
    start = "step 0" if any(ancestors(run.root) for run in runs) else "base (step 0)"
    return _videos(Grid([f"step {step}" if step else start for step in columns], groups, open=_OPEN), len(paths))


def _videos(grid: Grid, count: int) -> Videos:
    """Return a grid as the videos of a page, where `count` videos exist."""
    videos = Videos(replace(grid, missing=_MISSING, widest=min(_WIDEST, _ROW // len(grid.columns))))
    return Videos(videos.grid if videos.shown_count else None, count - videos.shown_count)


def _by_step(folder: Path) -> dict[int, dict[str, Path]]:
    """Return videos by step and name."""
    return {
        step: {video.stem: video for video in sorted(path.glob("[!.]*.mp4"))}
        for path in sorted(folder.glob("step-*"))
        if (step := step_of(path)) is not None
    }


def _select_steps(steps: Sequence[int], count: int) -> list[int]:
    """Return at most `count` steps: the last and, if there is room, the first among them."""
    return [steps[-1]] if count == 1 else [steps[index] for index in evenly_spaced(len(steps), count)]


def _cell(path: Path | None, limits: VideoLimits, *, caption: str = "") -> Cell:
    if path is None or not limits.takes(path):
        return Cell(None, caption=caption)
    settings = _read_comment(path).partition("\n")[2]
    return Cell(path, {"file": str(path), **({"sampled with": settings} if settings else {})}, caption=caption)


def _read_comment(path: Path) -> str:
    """Return a video's comment: its prompt, and lines with its sampling settings; empty if it cannot be read."""
    try:
        return read_comment(path)
    except (OSError, ValueError):  # truncated while it is copied; PyAV's errors are subclasses of these
        return ""


# ---- `finetrainers sample` and `finetrainers watch` ------------------------------------------------------------------


def drawn_samples(run: RunRecords, limits: VideoLimits) -> Videos:
    """Return the samples of `finetrainers sample` in the run's directory.

    They have a column for each LoRA and scale, newest settings first.
    """
    by_place: dict[_Place, dict[str, dict[str, Any]]] = {}  # and by column
    for ledger in sorted((run.root / "samples").glob("*/ledger*.jsonl")):
        for record in sorted(read_jsonl(ledger)[0], key=lambda record: str(record.get("time"))):
            video = ledger.parent / str(record.get("file"))
            if isinstance(record.get("column"), str) and isinstance(record.get("seed"), int) and names_existing(video):
                place = str(record.get("prompt")), str(record.get("size")), record["seed"]
                by_place.setdefault(place, {})[record["column"]] = {**record, "video": video}
    columns = sorted(dict.fromkeys(name for clips in by_place.values() for name in clips), key=_column_order)
    count = sum(map(len, by_place.values()))
    if not columns or limits.count < 1:
        return Videos(None, count)
    selected = columns[: max(1, min(_MOST_STEPS, limits.count))]
    groups = _by_prompt(by_place, selected, limits, lambda place, name: _sample_cell(by_place[place].get(name), limits))
    # Such as `result, scale 0.5`.
    titles = [name.replace("_scale-", ", scale ").replace("base", "base model", name == "base") for name in selected]
    return _videos(Grid(titles, groups), count)


def _by_prompt(
    places: Iterable[_Place], columns: Sequence[Any], limits: VideoLimits, cell: Callable[[_Place, Any], Cell]
) -> list[Group]:
    """Return a group for each prompt and size, with a row for each seed.

    With many places, those of the first seed of each prompt come first, then those of the second one, and so on.
    """
    by_prompt: dict[tuple[str, str], list[_Place]] = {}
    for place in places:
        by_prompt.setdefault(place[:2], []).append(place)
    turns = [place for turn in zip_longest(*map(sorted, by_prompt.values())) for place in turn if place is not None]
    rows: dict[tuple[str, str], list[Row]] = {}
    for place in turns[: max(1, limits.count // len(columns))]:
        rows.setdefault(place[:2], []).append(Row(f"seed {place[2]}", [cell(place, column) for column in columns]))
    return [Group(prompt, seed_rows) for (prompt, _), seed_rows in rows.items()]


def _column_order(name: str) -> tuple[bool, str, float]:
    """Return the sort key of a column: the base model first, then the weights, each by scale."""
    weights, _, scale = name.partition("_scale-")
    try:
        return name != "base", weights, float(scale or 1)
    except ValueError:  # edited
        return name != "base", weights, 1.0


def _sample_cell(record: Mapping[str, Any] | None, limits: VideoLimits) -> Cell:
    if record is None or not limits.takes(record["video"]):
        return Cell(None)
    titles = {
        "prompt": "prompt",
        "seed": "seed",
        "size": "size",
        "num_inference_steps": "denoising steps",
        "guidance_scale": "guidance scale",
        "frame_rate": "frames per second",
        "path": "weights",
        "scale": "LoRA scale",
    }
    facts = {title: str(record[name]) for name, title in titles.items() if record.get(name) is not None}
    return Cell(record["video"], {**facts, "file": str(record["video"])})


def watched_videos(watched: Watched, limits: VideoLimits) -> Videos:
    """Return the clips of a preset by prompt, seed and checkpoint, with their scores."""
    clips = {
        place: video
        for place, record in watched.records.items()
        if names_existing(video := watched.folder / str(record.get("file")))
    }
    steps = sorted({step for step, _, _ in clips})
    if not steps or limits.count < 1:
        return Videos(None, len(clips))
    selected = _select_steps(steps, min(_MOST_STEPS, limits.count))
    if watched.best in steps and watched.best not in selected:
        selected = sorted([*selected[1:], watched.best])

    def cell(place: _Place, step: int) -> Cell:
        prompt, _, seed = place
        scores = watched.records.get((step, prompt, seed), {}).get("scores") or {}
        lines = [f"{label} {f'{score:.4g}' if is_number(score) else 'failed'}" for label, score in scores.items()]
        return _cell(clips.get((step, prompt, seed)), limits, caption="\n".join(lines))

    places = dict.fromkeys((prompt, "", seed) for _, prompt, seed in clips)
    columns = [f"step {step}{', best' if step == watched.best else ''}" for step in selected]
    return _videos(Grid(columns, _by_prompt(places, selected, limits, cell)), len(clips))


# ---- rollouts --------------------------------------------------------------------------------------------------------


def rollout_videos(run: RunRecords, limits: VideoLimits) -> Videos:
    """Return the best and the worst clip of some rollouts by advantage, and by each reward, with their scores."""
    folders = [
        (folder, scores)
        for folder in sorted((run.root / "rollouts").glob("step-*"))
        if (scores := _read_scores(folder))
    ]
    paths = [path for folder, _ in folders for path in folder.glob("[!.]*.mp4")]
    if not folders or limits.count < 2:
        return Videos(None, len(paths))
    heads = ["", *dict.fromkeys(name for _, scores in folders for name in scores.get("heads") or {})]
    columns_per_page = min(_MOST_STEPS, max(1, limits.count // (2 * len(heads))))
    selected = [folders[index] for index in _select_steps(range(len(folders)), columns_per_page)]
    groups = []
    for head in heads[: max(1, limits.count // (2 * len(selected)))]:
        kinds = [kind for kind in ("best", "worst") if any(_clip_record(scores, head, kind) for _, scores in selected)]
        rows = [Row(kind, [_rollout_cell(f, scores, head, kind, limits) for f, scores in selected]) for kind in kinds]
        several = len(heads) > 1
        groups.append(Group(f"by {head}" if head else "by advantage, over all rewards" if several else "", rows))
    columns = [f"step {step_of(folder)}" for folder, _ in selected]
    return _videos(Grid(columns, groups), len(paths))


def _rollout_cell(folder: Path, scores: Mapping[str, Any], head: str, kind: str, limits: VideoLimits) -> Cell:
    """Return the cell of the best or the worst clip of a rollout by a reward, or by the advantage."""
    clip = _clip_record(scores, head, kind)
    if clip is None:
        return Cell(None)
    video = folder / str(clip.get("video", f"{kind}.mp4"))
    return _cell(video if names_existing(video) else None, limits, caption=_caption(scores, clip))


def _clip_record(scores: Mapping[str, Any], head: str, kind: str) -> Mapping[str, Any] | None:
    """Return the record of a rollout's best or worst clip, or None where a prompt has only one clip."""
    clip = ((scores.get("heads") or {}).get(head) or {}).get(kind) if head else scores.get(kind)
    return clip if isinstance(clip, Mapping) else None


def _read_scores(folder: Path) -> dict[str, Any]:
    try:
        scores = read_json_object(folder / "scores.json")
    except ValueError:
        return {}
    return {} if step_of(folder) is None else fitting(scores, _SCORES_TYPES)


def _caption(scores: Mapping[str, Any], clip: Mapping[str, Any]) -> str:
    """Return scores, advantage and prompt of a clip."""
    rewards = clip["reward"] if fits(clip.get("reward"), {str: float}) else {}
    lines = [f"{name} {value:.4g}" for name, value in rewards.items()]
    if fits(clip.get("advantage"), float):
        lines.append(f"advantage {clip['advantage']:+.2f}")
    return "\n".join([*lines, shortened(str(scores.get("prompt", "")), 120)])
