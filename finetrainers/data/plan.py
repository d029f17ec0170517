"""Decides, before any weight is loaded, what becomes of every item: its bucket, or why it cannot be used.

Imports no torch. The same data and options give the same plan on every machine and every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataSection
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.text import plural

from .buckets import Bucket, choose_bucket, default_buckets
from .frames import chunk_starts, is_slower, num_available, playback_fps, select_frames
from .manifest import DataError, Item, Kind, read_items
from .probe import Probe, ProbeError, probe
from .video.backends import backend_of, reason_against

#: Options that decide what is cut from the clips, beside the fingerprint; `--reset data` allows others.
_CRITICAL: Mapping[str, str | None] = dict.fromkeys(("target_fps", "frame_selection", "video_reshape_mode"), "data")
_NAMED = 5  # file names shown in a warning


@dataclass(frozen=True)
class Clip:
    """An item that will be trained on, and what is cut from it.

    Attributes:
        index: unlike that of every other clip; the clip's random numbers are derived from it. For the first, or only,
            clip of an item it is the item's place in the data set.
        path: the media file.
        caption: cleaned caption.
        kind: video or image.
        bucket: `(frames, height, width)` it is cut to.
        fps: frame rate of the cut clip.
        num_frames: frames of the source.
        source_fps: frame rate of the source; 0 for images.
        width: displayed width of the source, in pixels.
        height: displayed height of the source, in pixels.
        start: the first frame of the cut clip, counted after resampling to `fps`; None: as `frame_selection` says.
        is_variable: whether the frames of the source are shown at uneven times; `source_fps` is then their mean rate.
        backend: what decodes it.
    """

    index: int
    path: Path
    caption: str
    kind: Kind
    bucket: Bucket
    fps: float
    num_frames: int
    source_fps: float
    width: int
    height: int
    start: int | None = None
    is_variable: bool = False
    backend: str = "pyav"


@dataclass(frozen=True)
class Verdict:
    """What becomes of one item. `bucket` and `fps` are None, and `reason` is given, when it is rejected.

    `clips` is how many clips are cut from it.
    """

    index: int
    name: str
    path: Path
    caption: str
    use: Literal["train", "eval", "rejected"]
    size_bytes: int
    bucket: Bucket | None = None
    fps: float | None = None
    reason: str | None = None
    clips: int = 1

    def record(self) -> dict[str, object]:
        """The verdict as plain values, one line of `manifest.jsonl`."""
        bucket = "x".join(map(str, self.bucket)) if self.bucket else None
        return {**self.__dict__, "path": str(self.path), "bucket": bucket}


@dataclass(frozen=True)
class DatasetPlan:
    """The data set as it will be trained on.

    Attributes:
        clips: training clips, in order of the data set.
        eval_clips: clips held out for the evaluation loss.
        verdicts: one for every item.
        buckets: the buckets in use, given or chosen.
        warnings: what the user should know, each with a count.
        notes: what was decided for the user.
        fingerprint: hex digest that changes with any file, caption or bucket; kept with checkpoints.
    """

    clips: tuple[Clip, ...]
    eval_clips: tuple[Clip, ...]
    verdicts: tuple[Verdict, ...]
    buckets: tuple[Bucket, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str

    noun = "clip"
    fingerprint_of = "files, captions, buckets or held-out items"
    critical_options = _CRITICAL
    cut_in_batches = True
    title = "data"
    beside_memory = ""

    @property
    def count(self) -> int:
        """How many clips are trained on."""
        return len(self.clips)

    @property
    def size(self) -> Bucket:
        """The training bucket with most pixels, `(frames, height, width)`."""
        return max((clip.bucket for clip in self.clips), key=lambda b: b[0] * b[1] * b[2])

    @property
    def example(self) -> str:
        """Caption of the first clip."""
        return self.clips[0].caption

    @property
    def fps(self) -> float:
        """Frame rate of the first clip."""
        return self.clips[0].fps

    def write(self, path: Path) -> None:
        """Write the verdicts, one JSON object a line."""
        lines = [json.dumps(verdict.record(), ensure_ascii=False) for verdict in self.verdicts]
        write_text_atomic(path, "\n".join(lines) + "\n")

    def step_of(self, config: TrainConfig) -> str:
        """Clips of an optimizer step."""
        return f"{config.dataloader.batch_size * config.training.gradient_accumulation_steps} clips per process"

    def table(self) -> list[tuple[str, str, str, str]]:
        """For printing: a row of headings, then one for each bucket, largest first."""
        rows = [("bucket", "clips", "held out", "fps")]
        for bucket in sorted({clip.bucket for clip in (*self.clips, *self.eval_clips)}, reverse=True):
            train = [clip for clip in self.clips if clip.bucket == bucket]
            held_out = [clip for clip in self.eval_clips if clip.bucket == bucket]
            rates = sorted({round(clip.fps, 2) for clip in (*train, *held_out)})
            shown = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g}-{rates[-1]:g}"
            rows.append(("x".join(map(str, bucket)), str(len(train)), str(len(held_out)), shown))
        return rows


@dataclass(frozen=True)
class _Probed:
    """An item with what its header says, or why it could not be read."""

    item: Item
    size_bytes: int
    found: Probe | None
    reason: str | None
    fps: float = 0.0
    available: int = 0
    backend: str = "pyav"
    backend_reason: str | None = None


def plan_clips(config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> DatasetPlan | None:
    """The plan of the configured data set; None where none is named, or where no clip can be placed.

    Raises:
        DataError: see `plan_dataset`.
    """
    if not (config.data.data_root or config.data.dataset_file):
        return None
    if sizes_are_wrong:  # whether the data is there can still be said
        read_items(config.data)
        return None
    return plan_dataset(config, geometry)


def plan_dataset(config: TrainConfig, geometry: Geometry) -> DatasetPlan:
    """Read, probe and bucket the whole data set.

    Clips are sampled at `target_fps`, by default the model's own rate, and slower clips at their own. Held-out items
    are chosen by a hash of name and caption, so adding data does not reshuffle them.

    Raises:
        DataError: wrong metadata, illegal buckets, more than `max_bad_samples` unusable files, or nothing to train on.
    """
    data = config.data
    target_fps = data.target_fps or geometry.fps
    items = read_items(data)
    with ThreadPoolExecutor(min(16, (os.cpu_count() or 1) + 4)) as pool:
        probed = list(pool.map(lambda item: _probe_item(item, data=data, target_fps=target_fps), items))

    video_buckets, image_buckets, notes = _buckets(data, geometry, probed)
    placed: dict[int, list[Clip]] = {}  # by item
    reasons: dict[int, str] = {}
    for entry in probed:
        found = _place(entry, data=data, buckets=image_buckets if entry.item.kind == "image" else video_buckets)
        if isinstance(found, Clip):
            placed[entry.item.index] = _chunks(entry, found, data=data, num_items=len(items))
        else:
            reasons[entry.item.index] = found
    name = _namer(data)
    rejected = [f"{name(items[index].path)}: {reason}" for index, reason in reasons.items()]
    if len(rejected) > data.max_bad_samples:
        allowed = f" and `max_bad_samples` allows {data.max_bad_samples}"
        raise DataError(f"{len(rejected)} of {plural(len(items), 'item')} cannot be used{allowed}", rejected)

    # The first clip of an item stands for it, and carries its index: all its clips are held out, or none.
    firsts = [clips[0] for clips in placed.values()]
    held_out = _hold_out(firsts, data.eval_num_items, name)
    verdicts = tuple(_verdict(entry, placed.get(entry.item.index), held_out, reasons, name) for entry in probed)
    if data.frame_selection == "chunk":
        notes.append(_chunk_note(placed, probed))
    return DatasetPlan(
        clips=tuple(clip for index, clips in placed.items() if index not in held_out for clip in clips),
        eval_clips=tuple(clip for index, clips in placed.items() if index in held_out for clip in clips),
        verdicts=verdicts,
        buckets=tuple(dict.fromkeys((*video_buckets, *image_buckets))),
        warnings=tuple(
            _warnings(firsts, rejected, name, target_fps=target_fps) + _backend_warnings(probed, data, name)
        ),
        notes=tuple(notes),
        fingerprint=_fingerprint(verdicts),
    )


def _probe_item(item: Item, *, data: DataSection, target_fps: float) -> _Probed:
    size = item.path.stat().st_size
    try:
        found = probe(item.path, kind=item.kind)
    except ProbeError as error:
        return _Probed(item, size, None, str(error))
    if item.kind == "image":
        return _Probed(item, size, found, None, fps=target_fps, available=1)
    fps = playback_fps(found.fps, target_fps)
    uniform = data.frame_selection == "uniform"
    available = found.frames if uniform else num_available(found.frames, source_fps=found.fps, fps=fps)
    backend = backend_of(data.video_backend)
    against = reason_against(item.path, backend)
    return _Probed(item, size, found, None, fps, available, "pyav" if against else backend, against)


def _buckets(
    data: DataSection, geometry: Geometry, probed: Sequence[_Probed]
) -> tuple[list[Bucket], list[Bucket], list[str]]:
    """Buckets for videos and for images, given or chosen, and notes about the choice."""
    given: list[Bucket] = [*data.video_resolution_buckets, *((1, h, w) for h, w in data.image_resolution_buckets)]
    problems = [f"{'x'.join(map(str, b))}: {problem}" for b in given for problem in geometry.problems(*b)]
    if problems:
        raise DataError("buckets that this model cannot train on", problems)
    if given:
        return list(data.video_resolution_buckets), [bucket for bucket in given if bucket[0] == 1], []
    notes = []
    chosen: dict[Kind, list[Bucket]] = {"video": [], "image": []}
    for kind, buckets in chosen.items():
        sizes = [(p.available, p.found.height, p.found.width) for p in probed if p.item.kind == kind and p.found]
        if sizes:
            buckets += default_buckets(sizes, geometry)
            shown = ", ".join("x".join(map(str, bucket)) for bucket in buckets)
            notes.append(f"no buckets were given; chose {shown} from the sizes of {plural(len(sizes), kind)}")
    return chosen["video"], chosen["image"], notes


def _place(entry: _Probed, *, data: DataSection, buckets: Sequence[Bucket]) -> Clip | str:
    """The clip with its bucket, or the reason why it has none."""
    item, found = entry.item, entry.found
    if found is None:
        return str(entry.reason)
    if not buckets:
        wanted = "HxW in `image_resolution_buckets`" if item.kind == "image" else "FxHxW in `video_resolution_buckets`"
        return f"there is no bucket for {item.kind}s; add one, {wanted}"
    bucket = choose_bucket(entry.available, found.height, found.width, buckets)
    if bucket is None:
        shortest = min(buckets)
        return (
            f"too short: {plural(found.frames, 'frame')} at {found.fps:.4g} fps give {entry.available} at "
            f"{entry.fps:.4g} fps, and the shortest bucket needs {shortest[0]}; "
            "add a shorter bucket, raise `target_fps`, or remove the file"
        )
    fps = entry.fps
    if item.kind == "video":
        _, fps = select_frames(found.frames, source_fps=found.fps, fps=fps, length=bucket[0], mode=data.frame_selection)
    return Clip(
        item.index, item.path, item.caption, item.kind, bucket, fps, found.frames, found.fps, found.width, found.height,
        is_variable=found.is_variable, backend=entry.backend,
    )  # fmt: skip


def _chunks(entry: _Probed, clip: Clip, *, data: DataSection, num_items: int) -> list[Clip]:
    """The clips that an item is cut to. Their indices are `num_items` apart, so that no two items share one."""
    if data.frame_selection != "chunk" or clip.kind == "image":
        return [clip]
    starts = chunk_starts(entry.available, clip.bucket[0])
    return [replace(clip, index=clip.index + k * num_items, start=start) for k, start in enumerate(starts)]


def _chunk_note(placed: Mapping[int, Sequence[Clip]], probed: Sequence[_Probed]) -> str:
    """How many clips the items give, and what their ends leave over."""
    used = sum(clip.bucket[0] for clips in placed.values() for clip in clips)
    there = sum(entry.available for entry in probed if entry.item.index in placed)
    count = sum(len(clips) for clips in placed.values())
    return (
        f"chunks: {plural(len(placed), 'item')} give {plural(count, 'clip')}; {(there - used) / max(there, 1):.1%} of "
        "the frames, at ends shorter than a chunk, are not used"
    )


def _hold_out(clips: Sequence[Clip], count: int, name: Callable[[Path], str]) -> set[int]:
    """Indices of the evaluation clips."""
    if count and count >= len(clips):
        raise DataError(
            f"`eval_num_items` {count} leaves nothing to train on: there are {plural(len(clips), 'usable item')}"
        )
    if not clips:
        raise DataError("no usable item")

    def digest(clip: Clip) -> bytes:
        return hashlib.sha256(f"{name(clip.path)}\0{clip.caption}".encode()).digest()

    return {clip.index for clip in sorted(clips, key=digest)[:count]}


def _namer(data: DataSection) -> Callable[[Path], str]:
    """A function from a path to its name below the data set's folder, which does not depend on the machine."""
    root = data.data_root or (data.dataset_file.parent if data.dataset_file else Path())

    def name(path: Path) -> str:
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()

    return name


def _verdict(
    entry: _Probed,
    clips: Sequence[Clip] | None,
    held_out: set[int],
    reasons: dict[int, str],
    name: Callable[[Path], str],
) -> Verdict:
    item = entry.item
    common = (item.index, name(item.path), item.path, item.caption)
    if clips is None:
        return Verdict(*common, "rejected", entry.size_bytes, reason=reasons[item.index], clips=0)
    use: Literal["train", "eval"] = "eval" if item.index in held_out else "train"
    return Verdict(*common, use, entry.size_bytes, bucket=clips[0].bucket, fps=clips[0].fps, clips=len(clips))


def _fingerprint(verdicts: Sequence[Verdict]) -> str:
    digest = hashlib.sha256()
    for v in verdicts:
        digest.update(json.dumps([v.name, v.size_bytes, v.caption, v.bucket, v.use]).encode() + b"\n")
    return digest.hexdigest()


def _warnings(
    clips: Sequence[Clip], rejected: Sequence[str], name: Callable[[Path], str], *, target_fps: float
) -> list[str]:
    """One sentence for each kind of oddity, with a count and the first names."""
    videos = [clip for clip in clips if clip.kind == "video"]
    captions = Counter((clip.path, clip.caption) for clip in clips)
    kinds: list[tuple[str, list[str]]] = [
        ("cannot be used and left out", list(rejected)),
        ("without a caption", [name(clip.path) for clip in clips if not clip.caption]),
        (
            f"slower than {target_fps:g} fps and trained at their own rate",
            [f"{name(c.path)} ({c.source_fps:.4g} fps)" for c in videos if is_slower(c.source_fps, target_fps)],
        ),
        (
            "smaller than their bucket and enlarged",
            [name(c.path) for c in clips if c.height < c.bucket[1] or c.width < c.bucket[2]],
        ),
        ("listed more than once", [name(path) for (path, _), count in captions.items() if count > 1]),
    ]
    return _sentences(kinds)


def _backend_warnings(probed: Sequence[_Probed], data: DataSection, name: Callable[[Path], str]) -> list[str]:
    """Which clips the wanted backend does not decode."""
    names = [f"{name(entry.item.path)} ({entry.backend_reason})" for entry in probed if entry.backend_reason]
    return _sentences([(f"decoded by PyAV, since {data.video_backend} may show other pixels", names)])


def _sentences(kinds: Sequence[tuple[str, list[str]]]) -> list[str]:
    found = []
    for what, names in kinds:
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            found.append(f"{plural(len(names), 'item')} {what}: {', '.join(names[:_NAMED])}{more}")
    return found
