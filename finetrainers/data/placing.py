"""Where the items of one data set go: a bucket for each, or the reason why there is none. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import DataSection
from finetrainers.utils.text import plural

from .buckets import Bucket, choose_bucket, default_buckets
from .clip import Clip
from .frames import num_available, playback_fps, select_frames
from .manifest import DataError, Item, Kind
from .probe import Probe, ProbeError, probe


@dataclass(frozen=True)
class Probed:
    """An item with what its header says, or why it could not be read."""

    item: Item
    size_bytes: int
    found: Probe | None
    reason: str | None
    fps: float = 0.0
    available: int = 0


@dataclass(frozen=True)
class Placed:
    """The items of one data set, each with what its header says and what is cut from it.

    Attributes:
        probed: all items, in order.
        clips: what is trained on, in order of the items.
        reasons: why other items cannot be used, by index.
        buckets: those in use, given or chosen: for videos, then for images.
        notes: what was decided for the user.
    """

    probed: list[Probed]
    clips: list[Clip]
    reasons: dict[int, str]
    buckets: list[Bucket]
    notes: list[str]


def place_items(items: Sequence[Item], *, data: DataSection, geometry: Geometry) -> Placed:
    """Probe and bucket the items of one data set.

    Args:
        items: of the data set.
        data: its options.
        geometry: which sizes the model takes, and its frame rate.

    Raises:
        DataError: illegal buckets.
    """
    target_fps = data.target_fps or geometry.fps
    with ThreadPoolExecutor(min(16, (os.cpu_count() or 1) + 4)) as pool:
        probed = list(pool.map(lambda item: _probe_item(item, data=data, target_fps=target_fps), items))
    video_buckets, image_buckets, notes = _buckets(data, geometry, probed)
    clips: list[Clip] = []
    reasons: dict[int, str] = {}
    for entry in probed:
        clip = _place(entry, data=data, buckets=image_buckets if entry.item.kind == "image" else video_buckets)
        if isinstance(clip, Clip):
            clips.append(clip)
        else:
            reasons[entry.item.index] = clip
    return Placed(probed, clips, reasons, [*video_buckets, *image_buckets], notes)


def _probe_item(item: Item, *, data: DataSection, target_fps: float) -> Probed:
    size = item.path.stat().st_size
    try:
        found = probe(item.path, kind=item.kind)
    except ProbeError as error:
        return Probed(item, size, None, str(error))
    if item.kind == "image":
        return Probed(item, size, found, None, fps=target_fps, available=1)
    fps = playback_fps(found.fps, target_fps)
    uniform = data.frame_selection == "uniform"
    available = found.frames if uniform else num_available(found.frames, source_fps=found.fps, fps=fps)
    return Probed(item, size, found, None, fps=fps, available=available)


def _buckets(
    data: DataSection, geometry: Geometry, probed: Sequence[Probed]
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


def _place(entry: Probed, *, data: DataSection, buckets: Sequence[Bucket]) -> Clip | str:
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
        index=item.index,
        path=item.path,
        caption=item.caption,
        kind=item.kind,
        bucket=bucket,
        fps=fps,
        num_frames=found.frames,
        source_fps=found.fps,
        width=found.width,
        height=found.height,
        reshape_mode=data.video_reshape_mode,
        frame_selection=data.frame_selection,
        captions=item.captions if len(item.captions) > 1 else (),
    )
