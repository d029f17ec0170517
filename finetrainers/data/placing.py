"""Where the items of one data set go: a bucket for each, or the reason why there is none. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import DataSection
from finetrainers.utils.text import plural

from .buckets import Bucket, choose_bucket, default_buckets
from .clip import Clip
from .fates import Refusal
from .frames import num_available, playback_fps, select_frames
from .manifest import DataError, Item, Kind
from .probe import Probe
from .probe_memory import ProbeMemory, default_directory
from .probing import Effort, Found, find_out

Choose = Callable[[int, int, int, Sequence[Bucket]], Bucket | None]


class Probed(NamedTuple):
    """An item with what is known of its file, and how many frames it has at which rate."""

    found: Found
    fps: float = 0.0
    available: int = 0

    @property
    def item(self) -> Item:
        """The item."""
        return self.found.item

    @property
    def header(self) -> Probe | None:
        """What its header says; None where it cannot be used."""
        return self.found.answer if isinstance(self.found.answer, Probe) else None


@dataclass(frozen=True)
class Placed:
    """The items of one data set, each with what its file is and what is cut from it.

    Attributes:
        probed: all items, in order.
        clips: what is trained on, in order of the items.
        refusals: why other items cannot be used, by index.
        buckets: those in use, given or chosen: for videos, then for images.
        notes: what was decided for the user.
    """

    probed: list[Probed]
    clips: list[Clip]
    refusals: dict[int, Refusal]
    buckets: list[Bucket]
    notes: list[str]


def place_items(items: Sequence[Item], *, data: DataSection, geometry: Geometry, effort: Effort) -> Placed:
    """Probe and bucket the items of one data set.

    Args:
        items: of the data set.
        data: its options.
        geometry: which sizes the model takes, and its frame rate.
        effort: how closely to look at the files.

    Raises:
        DataError: illegal buckets.
    """
    target_fps = data.target_fps or geometry.fps
    memory = ProbeMemory(data.probe_dir or default_directory(), data_folder(data), recall=effort.recall)
    found = find_out(items, memory=memory, max_pixels=data.max_pixels, effort=effort)
    probed = [_at_rate(one, data=data, target_fps=target_fps) for one in found]
    video_buckets, image_buckets, notes = _buckets(data, geometry, probed)
    clips: list[Clip] = []
    refusals: dict[int, Refusal] = {}
    choose = cache(choose_bucket)  # many clips are alike
    buckets: dict[Kind, tuple[Bucket, ...]] = {"video": tuple(video_buckets), "image": tuple(image_buckets)}
    for entry in probed:
        clip = _place(entry, data=data, buckets=buckets[entry.item.kind], choose=choose)
        if isinstance(clip, Clip):
            clips.append(clip)
        else:
            refusals[entry.item.index] = clip
    return Placed(probed, clips, refusals, [*video_buckets, *image_buckets], notes)


def data_folder(data: DataSection) -> Path:
    """The folder that the names of a data set's files begin at."""
    return data.data_root or (data.dataset_file.parent if data.dataset_file else Path())


def _at_rate(found: Found, *, data: DataSection, target_fps: float) -> Probed:
    header = found.answer
    if isinstance(header, Refusal):
        return Probed(found)
    if found.item.kind == "image":
        return Probed(found, fps=target_fps, available=1)
    fps = playback_fps(header.fps, target_fps)
    uniform = data.frame_selection == "uniform"
    available = header.frames if uniform else num_available(header.frames, source_fps=header.fps, fps=fps)
    return Probed(found, fps=fps, available=available)


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
        sizes = [(p.available, h.height, h.width) for p in probed if p.item.kind == kind and (h := p.header)]
        if sizes:
            buckets += default_buckets(sizes, geometry)
            shown = ", ".join("x".join(map(str, bucket)) for bucket in buckets)
            notes.append(f"no buckets were given; chose {shown} from the sizes of {plural(len(sizes), kind)}")
    return chosen["video"], chosen["image"], notes


def _place(entry: Probed, *, data: DataSection, buckets: Sequence[Bucket], choose: Choose) -> Clip | Refusal:
    """The clip with its bucket, or the reason why it has none."""
    item, found = entry.item, entry.found.answer
    if isinstance(found, Refusal):
        return found
    if not buckets:
        wanted = "HxW in `image_resolution_buckets`" if item.kind == "image" else "FxHxW in `video_resolution_buckets`"
        return Refusal("no_bucket", f"there is no bucket for {item.kind}s; add one, {wanted}")
    bucket = choose(entry.available, found.height, found.width, buckets)
    if bucket is None:
        shortest = min(buckets)
        return Refusal(
            "too_short",
            f"too short: {plural(found.frames, 'frame')} at {found.fps:.4g} fps give {entry.available} at "
            f"{entry.fps:.4g} fps, and the shortest bucket needs {shortest[0]}; "
            "add a shorter bucket, raise `target_fps`, or remove the file",
        )
    fps = entry.fps
    if item.kind == "video" and data.frame_selection == "uniform":
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
    )
