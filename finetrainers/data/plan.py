"""Decides, before any weight is loaded, what becomes of every item: its bucket, or why it cannot be used.

Imports no torch. The same data and options give the same plan on every machine and every rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataSection
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.text import plural

from .bucket_choice import Choice, choose_buckets, named_buckets
from .buckets import Bucket, bucket_text, choose_bucket, filled_resolution, lower_buckets
from .expected import expected_batches
from .frames import is_slower, num_available, playback_fps, select_frames
from .manifest import DataError, Item, Kind, read_items
from .probe import Probe, ProbeError, probe

#: Options that decide what is cut from the clips, beside the fingerprint; `--reset data` allows others.
_CRITICAL: Mapping[str, str | None] = dict.fromkeys(
    ("target_fps", "frame_selection", "video_reshape_mode", "bucket_keep", "bucket_fall_shorter"), "data"
)
_NAMED = 5  # file names shown in a warning


@dataclass(frozen=True)
class Clip:
    """An item that will be trained on, and what is cut from it.

    Attributes:
        index: place in the data set, from which the clip's random numbers are derived.
        path: the media file.
        caption: cleaned caption.
        kind: video or image.
        bucket: `(frames, height, width)` it is cut to.
        fps: frame rate of the cut clip.
        num_frames: frames of the source.
        source_fps: frame rate of the source; 0 for images.
        width: displayed width of the source, in pixels.
        height: displayed height of the source, in pixels.
        lower: `(bucket, fps)` that it falls through to where it is not kept in its bucket, in order.
        repeats: how often it comes in an epoch, on average.
        dataset: number of the data set it is of.
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
    lower: tuple[tuple[Bucket, float], ...] = ()
    repeats: float = 1.0
    dataset: int = 0

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All that it may be cut to, the first one first."""
        return self.bucket, *(bucket for bucket, _ in self.lower)


def cut_to(clip: Clip, bucket: Bucket) -> Clip:
    """A clip in one of its buckets, and in no other."""
    if not clip.lower:
        return clip
    rates = dict([(clip.bucket, clip.fps), *clip.lower])
    return replace(clip, bucket=bucket, fps=rates[bucket], lower=())


def all_cuts(clips: Iterable[Clip]) -> list[Clip]:
    """Every clip in each of its buckets: all that training may ask for."""
    return [cut_to(clip, bucket) for clip in clips for bucket in clip.buckets]


@dataclass(frozen=True)
class Verdict:
    """What becomes of one item. `bucket` and `fps` are None, and `reason` is given, when it is rejected."""

    index: int
    name: str
    path: Path
    caption: str
    use: Literal["train", "eval", "rejected"]
    size_bytes: int
    bucket: Bucket | None = None
    fps: float | None = None
    reason: str | None = None

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
        batches: of an epoch, in words, by bucket.
    """

    clips: tuple[Clip, ...]
    eval_clips: tuple[Clip, ...]
    verdicts: tuple[Verdict, ...]
    buckets: tuple[Bucket, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str
    batches: Mapping[Bucket, str] = field(default_factory=dict)

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

    def heaviest(self, config: TrainConfig) -> tuple[Bucket, int]:
        """The bucket whose batches have most pixels, and how many clips they have."""
        sizes, usual = dict(config.dataloader.bucket_batch_sizes), config.dataloader.batch_size
        batches = [
            (bucket, sizes.get(bucket, usual)) for bucket in {one for clip in self.clips for one in clip.buckets}
        ]
        return max(batches, key=lambda batch: (math.prod(batch[0]) * batch[1], batch))

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
        loading, accumulation = config.dataloader, config.training.gradient_accumulation_steps
        clips = sorted({loading.batch_size, *(size for _, size in loading.bucket_batch_sizes)})
        shown = [str(size * accumulation) for size in clips]
        return f"{' or '.join(shown)} clips per process{', by bucket' if len(shown) > 1 else ''}"

    def table(self) -> list[tuple[str, ...]]:
        """For printing: a row of headings, then one for each bucket, largest first."""
        rows: list[tuple[str, ...]] = [("bucket", "clips", "batches", "held out", "fps")]
        train: dict[Bucket, list[Clip]] = defaultdict(list)
        held_out: dict[Bucket, list[Clip]] = defaultdict(list)
        for clips, by_bucket in ((all_cuts(self.clips), train), (self.eval_clips, held_out)):
            for clip in clips:
                by_bucket[clip.bucket].append(clip)
        for bucket in sorted({*train, *held_out}, reverse=True):
            rates = sorted({round(clip.fps, 2) for clip in (*train[bucket], *held_out[bucket])})
            shown = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g}-{rates[-1]:g}"
            batches = self.batches.get(bucket, "0")
            rows.append((bucket_text(bucket), str(len(train[bucket])), batches, str(len(held_out[bucket])), shown))
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

    choice = _buckets(data, geometry, probed)
    keep = named_buckets("bucket_keep", data.bucket_keep, choice.all)
    sizes = named_buckets("bucket_batch_sizes", config.dataloader.bucket_batch_sizes, choice.all)
    clips: list[Clip] = []
    reasons: dict[int, str] = {}
    for entry in probed:
        clip = _place(entry, data=data, choice=choice, keep=keep)
        if isinstance(clip, Clip):
            clips.append(clip)
        else:
            reasons[entry.item.index] = clip
    name = _namer(data)
    rejected = [f"{name(items[index].path)}: {reason}" for index, reason in reasons.items()]
    if len(rejected) > data.max_bad_samples:
        allowed = f" and `max_bad_samples` allows {data.max_bad_samples}"
        raise DataError(f"{len(rejected)} of {plural(len(items), 'item')} cannot be used{allowed}", rejected)

    held_out = _hold_out(clips, data.eval_num_items, name)
    by_index = {clip.index: clip for clip in clips}
    training = tuple(clip for clip in clips if clip.index not in held_out)
    buckets = [(clip.buckets, clip.repeats) for clip in training]
    expected = expected_batches(buckets, config, keep=keep, sizes=sizes)
    if not expected.any:
        raise DataError(
            "nothing to train on: no bucket has clips for a whole batch; lower --batch_size, or leave out --epoch_end drop"
        )
    verdicts = tuple(_verdict(entry, by_index.get(entry.item.index), held_out, reasons, name) for entry in probed)
    return DatasetPlan(
        clips=training,
        # Always measured in the same bucket.
        eval_clips=tuple(cut_to(clip, clip.bucket) for clip in clips if clip.index in held_out),
        verdicts=verdicts,
        buckets=choice.all,
        warnings=(*_warnings(clips, rejected, name, target_fps=target_fps), *expected.warnings),
        notes=(*choice.notes, *expected.notes),
        fingerprint=_fingerprint(verdicts, training),
        batches=expected.shown,
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
    return _Probed(item, size, found, None, fps=fps, available=available)


def _buckets(data: DataSection, geometry: Geometry, probed: Sequence[_Probed]) -> Choice:
    sizes: dict[Kind, list[Bucket]] = {"video": [], "image": []}
    for entry in probed:
        if entry.found:
            sizes[entry.item.kind].append((entry.available, entry.found.height, entry.found.width))
    return choose_buckets(data, geometry, videos=sizes["video"], images=sizes["image"])


def _place(entry: _Probed, *, data: DataSection, choice: Choice, keep: Mapping[Bucket, float]) -> Clip | str:
    """The clip with its bucket, or the reason why it has none."""
    item, found = entry.item, entry.found
    if found is None:
        return str(entry.reason)
    resolutions = choice.of_kind(item.kind)
    if not resolutions:
        wanted = "HxW in `image_resolution_buckets`" if item.kind == "image" else "FxHxW in `video_resolution_buckets`"
        return f"there is no bucket for {item.kind}s; add one, {wanted}"
    buckets = filled_resolution(found.height, found.width, resolutions)
    bucket = choose_bucket(entry.available, found.height, found.width, buckets)
    if bucket is None:
        shortest = min(buckets)
        return (
            f"too short: {plural(found.frames, 'frame')} at {found.fps:.4g} fps give {entry.available} at "
            f"{entry.fps:.4g} fps, and the shortest bucket needs {shortest[0]}; "
            "add a shorter bucket, raise `target_fps`, or remove the file"
        )

    def rate(bucket: Bucket) -> float:
        if item.kind == "image":
            return entry.fps
        mode = data.frame_selection
        return select_frames(found.frames, source_fps=found.fps, fps=entry.fps, length=bucket[0], mode=mode)[1]

    lower: list[tuple[Bucket, float]] = []
    below = [one for buckets in resolutions for one in buckets]
    here = bucket
    for further in lower_buckets(bucket, found.height, found.width, below, shorter=data.bucket_fall_shorter):
        if keep.get(here, 1.0) == 1.0:
            break
        lower.append((further, rate(further)))
        here = further
    return Clip(
        item.index, item.path, item.caption, item.kind, bucket, rate(bucket), found.frames, found.fps, found.width,
        found.height, tuple(lower),
    )  # fmt: skip


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
    entry: _Probed, clip: Clip | None, held_out: set[int], reasons: dict[int, str], name: Callable[[Path], str]
) -> Verdict:
    item = entry.item
    common = (item.index, name(item.path), item.path, item.caption)
    if clip is None:
        return Verdict(*common, "rejected", entry.size_bytes, reason=reasons[item.index])
    use: Literal["train", "eval"] = "eval" if clip.index in held_out else "train"
    return Verdict(*common, use, entry.size_bytes, bucket=clip.bucket, fps=clip.fps)


def _fingerprint(verdicts: Sequence[Verdict], clips: Sequence[Clip]) -> str:
    digest = hashlib.sha256()
    others = [
        [c.index, c.lower, c.repeats, c.dataset] for c in clips if (c.lower, c.repeats, c.dataset) != ((), 1.0, 0)
    ]
    if others:
        digest.update(json.dumps(others).encode() + b"\n")
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
    found = []
    for what, names in kinds:
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            found.append(f"{plural(len(names), 'item')} {what}: {', '.join(names[:_NAMED])}{more}")
    return found
