"""Assignment of one dataset's items to buckets, with the reason if an item has none. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

from finetrainers.config.checks.windows import window_problems
from finetrainers.config.errors import Problem
from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import DataSection
from finetrainers.utils.text import plural

from ..buckets.bucket_choice import BucketSet, choose_buckets
from ..buckets.buckets import Bucket, choose_bucket, cover_size, filled_resolution, legal_length, lower_buckets
from ..buckets.clip import Clip, ControlInput, Mask
from ..buckets.frames import SAME_RATE, num_available, playback_fps, select_frames
from ..buckets.windows import cut_windows, describe_windows, with_window_buckets
from ..reading.datasets import Dataset
from ..reading.items import DataError, Kind, Reading
from ..reading.media import MAX_FRAME_PIXELS
from ..reading.sources.rows import printable_name
from ..reading.status import InvalidSample
from ..video.backends import fallback_reason, resolve_backend
from .file_facts import FileFacts, default_directory
from .item_report import DISTORTED, ItemReport
from .masks import probe_masks
from .probe import Probe
from .probe_all import ProbedItem, ProbeOptions, probe_items

#: A function from kind, usable frames, height and width to a bucket, and to those among which it was chosen.
ChooseBucket: TypeAlias = Callable[[Kind, int, int, int], tuple[Bucket | None, Sequence[Bucket]]]


@dataclass
class Part:
    """The items of one dataset, and the clips that are cut from them.

    Attributes:
        dataset: its options.
        reading: its items as they were read.
        target_fps: target frame rate of its clips.
        probed: all items, in order.
        clips: the clips that are cut from them, in order; with sliding windows several of one item.
        buckets: the buckets in use, configured or chosen: for videos, then for images.
        notes: messages about automatic decisions.
        has_chosen_buckets: whether its buckets were chosen from its clips.
        reports: on all items, in order, once the held-out items are chosen.
    """

    dataset: Dataset
    reading: Reading
    target_fps: float
    probed: list[ProbedItem]
    clips: list[Clip]
    buckets: list[Bucket]
    notes: list[str]
    has_chosen_buckets: bool
    reports: list[ItemReport] = field(default_factory=list)


def assign_buckets(
    dataset: Dataset, reading: Reading, number: int, *, geometry: Geometry, options: ProbeOptions
) -> Part:
    """Probe the items of a dataset, and give each a bucket.

    Args:
        dataset: its options.
        reading: its items.
        number: of the dataset in the run.
        geometry: of the model: its sizes and frame rate.
        options: how closely to probe the files.

    Raises:
        DataError: there are illegal buckets or windows.
    """
    data, target_fps = dataset.data, dataset.data.target_fps or geometry.fps
    problems = [
        Problem(option, problem, "invalid" if option == "sliding_window_size" else "conflict")
        for option, problem in window_problems(data, geometry)
    ]
    if problems:
        raise DataError("windows that cannot be cut", problems)
    probed = _probe(reading, data, options, target_fps=target_fps)
    usable = [entry for entry in probed if entry.unusable is None]
    backend = resolve_backend(data.video_backend)
    for entry in usable:
        for medium in (entry, *dict(entry.further).values(), entry.mask):
            if medium is not None:
                _set_rate(medium, data=data, target_fps=target_fps, backend=backend)
        entry.unusable = _nothing_to_animate(entry, data=data, geometry=geometry)
    usable = [entry for entry in usable if entry.unusable is None]
    window_data = with_window_buckets(data)
    sizes: dict[Kind, list[Bucket]] = {"video": [], "image": []}
    for entry in usable:
        sizes[entry.item.kind].append((entry.available, entry.header.height, entry.header.width))
    bucket_set = choose_buckets(window_data, geometry, sizes)
    clips: list[Clip] = []

    @cache  # many clips are alike
    def choose_cached(kind: Kind, frames: int, height: int, width: int) -> tuple[Bucket | None, Sequence[Bucket]]:
        buckets = filled_resolution(height, width, bucket_set.by_kind[kind])
        return choose_bucket(frames, height, width, buckets), buckets

    for entry in usable:
        clip = _make_clip(
            entry, number, data=window_data, geometry=geometry, bucket_set=bucket_set, choose=choose_cached
        )
        if isinstance(clip, InvalidSample):
            entry.unusable = clip
        else:
            entry.clip, *others = cut_windows(clip, entry.available, data=data, geometry=geometry)
            clips += [entry.clip, *others]
    available = {entry.item.index: entry.available for entry in usable}
    notes = [*bucket_set.notes, *geometry.size_notes(bucket_set.all)]
    notes += describe_windows(clips, available, data=data, geometry=geometry)
    return Part(dataset, reading, target_fps, probed, clips, list(bucket_set.all), notes, bucket_set.are_chosen)


def _probe(reading: Reading, data: DataSection, options: ProbeOptions, *, target_fps: float) -> list[ProbedItem]:
    """Return all items with the probes of their files, including those of further media."""
    root = data.data_root or (data.dataset_file.parent if data.dataset_file else Path())
    facts = FileFacts.for_dataset(data.probe_dir or default_directory(), root, recall=options.recall)
    probed = _with_rates(
        probe_items(reading.items, facts=facts, max_pixels=data.max_pixels, options=options), target_fps
    )
    options = replace(options, duplicates=False)
    for name, items in reading.further.items():
        others = _with_rates(probe_items(items, facts=facts, max_pixels=data.max_pixels, options=options), target_fps)
        for entry, other in zip(probed, others, strict=True):
            entry.further += ((name, other),)
            entry.unusable = entry.unusable or _mismatch(entry, name, other)
    probe_masks(
        probed, reading.masks, facts=facts, max_pixels=data.max_pixels, options=options, lowest=data.unmasked_weight
    )
    facts.tidy()
    return probed


def _with_rates(probed: list[ProbedItem], target_fps: float) -> list[ProbedItem]:
    """Return the items; those whose rate is not that of their file have it in their header."""
    for entry in probed:
        if entry.item.rate is not None and entry.header.fps:
            fps = entry.item.rate or target_fps
            entry.header = replace(entry.header, fps=fps, duration=entry.header.frames / fps)
    return probed


def _too_short(entry: ProbedItem, needed: int, *, data: DataSection, geometry: Geometry) -> InvalidSample:
    """Return the reason why a clip has no bucket, and remedies."""
    header, length, remedies = entry.header, legal_length(entry.available, geometry), []
    has_windows = data.sliding_window_size is not None
    if length > 1:
        remedies.append(
            f"lower `sliding_window_size` to {length}" if has_windows else f"add a bucket of {length} frames"
        )
    if data.video_resolution_buckets and not has_windows:
        remedies.append("leave out `video_resolution_buckets` (sizes are then chosen from the clips)")
    if header.frames >= needed > entry.available:
        remedies.append("raise `target_fps`")
    remedies.append("remove the file")
    supply = f"{plural(header.frames, 'frame')} at {header.fps:.4g} fps"
    if (entry.available, entry.fps) != (header.frames, header.fps):
        supply += f" give {entry.available} at {entry.fps:.4g} fps"
    requirement = f"{'a window' if has_windows else 'the shortest bucket'} needs {needed}"
    alternatives = f"{', '.join(remedies[:-1])}{' or ' * (len(remedies) > 1)}{remedies[-1]}"
    shortest = "" if length > 1 else f"; no video of this model has less than {geometry.temporal + 1}"
    return InvalidSample("too_short", f"too short: {supply}, and {requirement}{shortest}; {alternatives}")


def _nothing_to_animate(entry: ProbedItem, *, data: DataSection, geometry: Geometry) -> InvalidSample | None:
    """Return why an item would be nothing but the image that the checkpoint's clips start from, or None."""
    if legal_length(entry.available, geometry) >= geometry.shortest:
        return None
    if entry.item.kind == "video":
        return _too_short(entry, geometry.temporal + 1, data=data, geometry=geometry)
    reason = "a single image has nothing to animate; remove it, or train a text-to-video checkpoint"
    return InvalidSample("no_bucket", reason)


def _set_rate(entry: ProbedItem, *, data: DataSection, target_fps: float, backend: str) -> None:
    """Set frame rate, number of frames, and decoder: `backend` if it returns the same pixels as PyAV."""
    if entry.item.kind == "image":
        entry.fps, entry.available = target_fps, 1
        return
    header = entry.header
    entry.fps = playback_fps(header.fps, target_fps)
    entry.available = header.frames
    if data.frame_selection != "uniform":
        entry.available = num_available(header.frames, source_fps=header.fps, fps=entry.fps)
    entry.fallback_reason = fallback_reason(entry.item.path, backend)
    if entry.fallback_reason is None:
        entry.backend = backend


def _mismatch(entry: ProbedItem, name: str, other: ProbedItem) -> InvalidSample | None:
    """Return the reason why a further medium does not match its clip, frame by frame, or None if it does."""
    clip, medium, label = entry.header, other.header, f"its {name} {printable_name(other.item.name)}"
    if other.unusable is not None:
        status = "missing" if other.unusable.status == "skipped" else other.unusable.status
        return InvalidSample(status, f"{label}: {other.unusable.reason}")
    if other.item.kind != entry.item.kind:
        return InvalidSample("mismatch", f"{label} is of another kind; give a file of type {entry.item.kind}")
    if medium.frames != clip.frames or abs(medium.fps - clip.fps) > SAME_RATE * clip.fps:
        actual, required = (f"{plural(header.frames, 'frame')} at {header.fps:.4g} fps" for header in (medium, clip))
        remedy = "give one with a frame for each of the clip's, at its rate"
    elif abs(medium.width / medium.height * clip.height / clip.width - 1) > DISTORTED:
        actual, required = (f"{header.width}x{header.height} pixels" for header in (medium, clip))
        remedy = "give one of the clip's aspect ratio"
    else:
        return None
    return InvalidSample("mismatch", f"{label} has {actual}, and the clip {required}; {remedy}")


def _make_clip(
    entry: ProbedItem,
    number: int,
    *,
    data: DataSection,
    geometry: Geometry,
    bucket_set: BucketSet,
    choose: ChooseBucket,
) -> Clip | InvalidSample:
    """Return the clip with its bucket, or the reason why it has none."""
    item, header = entry.item, entry.header
    resolutions = bucket_set.by_kind[item.kind]
    if not resolutions:
        option = "HxW in `image_resolution_buckets`" if item.kind == "image" else "FxHxW in `video_resolution_buckets`"
        automatic = "leave out all buckets, so that sizes are chosen from the clips"
        return InvalidSample("no_bucket", f"no bucket for {item.kind}s; add one ({option}), or {automatic}")
    bucket, buckets = choose(item.kind, entry.available, header.height, header.width)
    if bucket is None:
        return _too_short(entry, min(buckets)[0], data=data, geometry=geometry)
    if (too_narrow := _too_narrow(header, bucket, data)) is not None:
        return too_narrow
    mask = None
    if (medium := entry.mask) is not None:
        grid = geometry.temporal, geometry.spatial
        mask = Mask(medium.item.path, medium.item.kind, grid, data.unmasked_weight, medium.backend)
    return Clip(
        index=item.index,
        path=item.path,
        caption=item.caption,
        kind=item.kind,
        bucket=bucket,
        fps=_clip_rate(entry, bucket, data),
        num_frames=header.frames,
        source_fps=header.fps,
        width=header.width,
        height=header.height,
        reshape_mode=data.video_reshape_mode,
        frame_selection=data.frame_selection,
        lower=tuple(_find_lower(entry, bucket, [candidate for group in resolutions for candidate in group], data)),
        dataset=number,
        is_variable=header.is_variable,
        has_row_rate=item.rate is not None,
        backend=entry.backend,
        captions=item.captions if len(item.captions) > 1 else (),
        further=tuple(ControlInput(name, other.item.path, other.backend) for name, other in entry.further),
        mask=mask,
    )


def _too_narrow(header: Probe, bucket: Bucket, data: DataSection) -> InvalidSample | None:
    """Return the reason why an image or video cannot be resized to cover its bucket, or None if it can."""
    if data.video_reshape_mode == "none":
        return None
    height, width = cover_size(header.height, header.width, *bucket[1:])
    if height * width <= MAX_FRAME_PIXELS:
        return None
    return InvalidSample(
        "too_large",
        f"too narrow: {header.width}x{header.height} pixels, resized until they cover {bucket[2]}x{bucket[1]}, are "
        f"{width}x{height}, over the limit of {MAX_FRAME_PIXELS} pixels; crop the file, or remove it",
    )


def _clip_rate(entry: ProbedItem, bucket: Bucket, data: DataSection) -> float:
    """Return the frame rate of the clip after it is cut to a bucket."""
    header, mode = entry.header, data.frame_selection
    if entry.item.kind == "image" or mode != "uniform":
        return entry.fps
    return select_frames(header.frames, source_fps=header.fps, fps=entry.fps, length=bucket[0], mode=mode)[1]


def _find_lower(
    entry: ProbedItem, bucket: Bucket, buckets: Sequence[Bucket], data: DataSection
) -> Iterator[tuple[Bucket, float]]:
    """Yield the lower buckets that a clip may fall through to, each with its rate, until one keeps all of its clips."""
    if not data.bucket_keep_prob:
        return
    keep = dict(data.bucket_keep_prob)
    height, width = entry.header.height, entry.header.width
    for lower in lower_buckets(bucket, height, width, buckets, shorter=data.bucket_fall_shorter):
        if keep.get(bucket, 1.0) == 1.0:
            return
        yield lower, _clip_rate(entry, lower, data)
        bucket = lower
