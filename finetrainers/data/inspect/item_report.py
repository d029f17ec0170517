"""The report on one item: its status, bucket and marks; a line of `manifest.jsonl` and of every check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..buckets.buckets import Bucket, bucket_text, cover_size
from ..buckets.clip import Clip
from ..buckets.frames import is_slower
from ..reading.items import Kind
from ..reading.status import Mark, Status
from .probe_all import ProbedItem

_CROPPED = 0.01  # share of the frame below which cropping is not reported, as sizes are always rounded
DISTORTED = 0.02

Use: TypeAlias = Literal["train", "eval", "skipped", "rejected"]


@dataclass(slots=True)  # not frozen: as for `Clip`
class ItemReport:
    """The report on one item; it never changes after creation.

    Its fields are described in docs/how-to/data.md.
    """

    index: int
    name: str
    path: Path
    caption: str
    use: Use
    size_bytes: int
    bucket: Bucket | None
    fps: float | None
    reason: str | None
    status: Status
    kind: Kind
    where: str
    frames: int
    source_fps: float
    width: int
    height: int
    crop: float
    scale: float | None
    usable_frames: int
    used_frames: int
    marks: tuple[Mark, ...]
    same_as: str | None
    examples: int
    decoded: bool
    captions: tuple[str, ...]
    dataset: str
    extra: Mapping[str, Any]
    further: Mapping[str, str]
    mask: str
    mask_white: float | None

    def record(self) -> dict[str, object]:
        """Return the report as plain values for `manifest.jsonl`, without empty captions, dataset and columns."""
        values: dict[str, Any] = dict(zip(_NAMES, _values(self), strict=True))
        values["path"] = str(self.path)
        values["bucket"] = bucket_text(self.bucket) if self.bucket else None
        for name in ("captions", "dataset", "extra", "further", "mask"):
            if not values[name]:
                del values[name]
        if self.mask_white is None:
            del values["mask_white"]
        return values


_NAMES = tuple(field.name for field in fields(ItemReport))
_values = attrgetter(*_NAMES)


def report_item(
    entry: ProbedItem,
    *,
    dataset: str,
    target_fps: float,
    examples: int,
    used_frames: int,
    held_out: bool,
    seen: bool,
    blank: str = "",
) -> ItemReport:
    """Return the report on an item.

    Args:
        entry: the item, its file, and the clip that is cut from it.
        dataset: name of its dataset.
        target_fps: target frame rate of the dataset's clips.
        examples: number of its clips that are trained on or evaluated.
        used_frames: number of frames, at its rate, that these clips use.
        held_out: whether it is held out for the evaluation loss.
        seen: whether an earlier item has the same path.
        blank: caption of items without one: the trigger word, if there is one.
    """
    item, header, unusable, clip = entry.item, entry.header, entry.unusable, entry.clip
    is_spread = clip is not None and clip.frame_selection == "uniform"  # from the first frame to the last
    use: Use = "eval" if held_out else "train"
    if unusable:
        use = "skipped" if unusable.status == "skipped" else "rejected"
    return ItemReport(
        index=item.index,
        name=item.name,
        path=item.path,
        caption=item.caption,
        use=use,
        size_bytes=entry.size_bytes,
        bucket=clip.bucket if clip else None,
        fps=clip.fps if clip else None,
        reason=unusable.reason if unusable else None,
        status=unusable.status if unusable else "used",
        kind=item.kind,
        where=item.where,
        frames=header.frames,
        source_fps=header.fps,
        width=header.width,
        height=header.height,
        crop=round(crop_loss(clip), 4) if clip else 0.0,
        scale=round(max(clip.bucket[1] / clip.height, clip.bucket[2] / clip.width), 4) if clip else None,
        usable_frames=entry.available if clip else 0,
        used_frames=entry.available if is_spread else used_frames,
        marks=tuple(_marks(entry, target_fps, seen=seen, blank=blank)),
        same_as=entry.same_as.name if entry.same_as else None,
        examples=examples,
        decoded=entry.marks is not None,
        captions=item.captions if len(item.captions) > 1 else (),
        dataset=dataset,
        extra=item.extra,
        further={name: str(other.item.path) for name, other in entry.further},
        mask=str(entry.mask.item.path) if entry.mask else "",
        mask_white=None if entry.white is None else round(entry.white, 4),
    )


def _marks(entry: ProbedItem, target_fps: float, *, seen: bool, blank: str) -> Iterator[Mark]:
    if (clip := entry.clip) is not None:
        _, height, width = clip.bucket
        if clip.kind == "video" and is_slower(clip.source_fps, target_fps):
            yield "slower"
        elif clip.kind == "video" and clip.fps != clip.source_fps:
            yield "resampled"
        if crop_loss(clip) > _CROPPED:
            yield "cropped"
        if clip.reshape_mode == "none" and abs(clip.width / clip.height * height / width - 1) > DISTORTED:
            yield "distorted"
        if is_enlarged(clip):
            yield "enlarged"
        if clip.caption == blank:
            yield "no_caption"
    if seen:
        yield "same_file"
    if entry.same_as is not None:
        yield "same_content"
    yield from entry.marks or ()


def crop_loss(clip: Clip) -> float:
    """Return the share of a clip's frames that its bucket cuts off."""
    if clip.reshape_mode == "none":
        return 0.0
    return _crop_loss(clip.bucket, clip.height, clip.width)


@lru_cache(maxsize=10_000)  # many clips are alike
def _crop_loss(bucket: Bucket, height: int, width: int) -> float:
    full_height, full_width = cover_size(height, width, bucket[1], bucket[2])
    return 1 - bucket[1] * bucket[2] / (full_height * full_width)


def is_enlarged(clip: Clip) -> bool:
    """Return whether a clip is smaller than its bucket."""
    return clip.height < clip.bucket[1] or clip.width < clip.bucket[2]
