"""Choice of a run's buckets by its options and clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import DataSection
from finetrainers.utils.text import plural

from ..reading.items import DataError, Kind
from .buckets import Bucket, area_sizes, bucket_text, default_buckets, default_lengths, legal_lengths, nearest_bucket

Value = TypeVar("Value", int, float)
#: Buckets by resolution, largest first.
Resolutions: TypeAlias = tuple[tuple[Bucket, ...], ...]


@dataclass(frozen=True)
class BucketSet:
    """The buckets of a run.

    Attributes:
        by_kind: for videos and for images, by resolution, largest first; those that the user listed count as one.
        notes: messages about buckets that were chosen or rounded.
        are_chosen: whether sizes and lengths were chosen from the clips.
    """

    by_kind: Mapping[Kind, Resolutions]
    notes: tuple[str, ...] = ()
    are_chosen: bool = False

    @property
    def all(self) -> tuple[Bucket, ...]:
        """All buckets, each once: those for videos, then for images."""
        resolutions = (*self.by_kind["video"], *self.by_kind["image"])
        return tuple(dict.fromkeys(bucket for buckets in resolutions for bucket in buckets))


def choose_buckets(data: DataSection, geometry: Geometry, clips: Mapping[Kind, Sequence[Bucket]]) -> BucketSet:
    """Return the buckets: listed ones, those of `resolutions`, or chosen from the clips.

    Args:
        data: the options.
        geometry: of the model.
        clips: usable frames, height and width of every readable video and image.

    Raises:
        DataError: there are sizes or lengths that the model cannot be trained on.
    """
    listed = tuple((1, height, width) for height, width in data.image_resolution_buckets)
    configured = (*data.video_resolution_buckets, *listed)
    _check_buckets(configured, geometry)
    automatic = data.resolutions or data.frame_buckets
    if configured and not automatic:
        single = tuple(bucket for bucket in configured if bucket[0] == 1)
        longer = tuple(bucket for bucket in configured if bucket[0] > 1)
        # Videos are not trained as images, unless there are no other buckets for them.
        return BucketSet(
            {"video": _as_resolutions(longer or tuple(data.video_resolution_buckets)), "image": _as_resolutions(single)}
        )
    try:
        lengths, notes = legal_lengths(data.frame_buckets, geometry)
        if len(lengths) > 1:  # then 1 is for images, which always have it; videos do not become images
            lengths = [length for length in lengths if length > 1]
        if data.resolutions:
            by_kind = _resolution_buckets(data, geometry, lengths, notes, videos=clips["video"])
        else:
            by_kind = dict.fromkeys(clips, ())
            for kind, sizes in ((kind, sizes) for kind, sizes in clips.items() if sizes):
                buckets = tuple(default_buckets(sizes, geometry, lengths if kind == "video" else ()))
                listing = ", ".join(map(bucket_text, buckets))
                notes.append(f"no buckets were set; chose {listing} from the sizes of {plural(len(sizes), kind)}")
                by_kind[kind] = (buckets,)
    except ValueError as error:
        raise DataError("sizes that this model does not support", [str(error)]) from None
    bucket_set = BucketSet(
        {"video": by_kind["video"], "image": _as_resolutions(listed) or by_kind["image"]},
        tuple(notes),
        are_chosen=not (automatic or configured),
    )
    _check_buckets(bucket_set.all, geometry)
    return bucket_set


def _check_buckets(buckets: Sequence[Bucket], geometry: Geometry) -> None:
    """Check that the model can train on every bucket.

    Raises:
        DataError: there is a bucket that it cannot train on.
    """
    problems = [f"{bucket_text(bucket)}: {problem}" for bucket in buckets for problem in geometry.problems(*bucket)]
    if problems:
        raise DataError("buckets that this model does not support", problems)


def _resolution_buckets(
    data: DataSection, geometry: Geometry, lengths: list[int], notes: list[str], *, videos: Sequence[Bucket]
) -> dict[Kind, Resolutions]:
    sizes: dict[tuple[tuple[int, int], ...], None] = {}
    for resolution in sorted(data.resolutions, key=lambda resolution: -resolution[0] * resolution[1]):
        shapes, rounding_notes = area_sizes(
            resolution, geometry, count=data.num_ar_buckets, min_ar=data.min_ar, max_ar=data.max_ar
        )
        sizes[tuple(shapes)] = None
        notes += rounding_notes
    if not data.num_ar_buckets:  # separate shapes, which are not alternatives to one another
        sizes = {tuple(size for same_area in sizes for size in same_area): None}
    if not lengths and videos:
        lengths = default_lengths([video[0] for video in videos], geometry)
        notes.append(
            f"no lengths were set; chose {', '.join(map(str, lengths))} frames from {plural(len(videos), 'video')}"
        )
    listing = "; ".join(", ".join(f"{height}x{width}" for height, width in same_area) for same_area in sizes)
    notes.append(f"sizes of --resolutions: {listing}")
    videos_by_area = tuple(tuple((f, *size) for f in lengths for size in same_area) for same_area in sizes)
    return {
        "video": videos_by_area if lengths else (),
        "image": () if geometry.shortest > 1 else tuple(tuple((1, *size) for size in areas) for areas in sizes),
    }


def named_buckets(
    option: str, entries: Sequence[tuple[Bucket, Value]], buckets: Sequence[Bucket]
) -> dict[Bucket, Value]:
    """Return the values that an option gives to single buckets.

    Raises:
        DataError: the option names unknown buckets.
    """
    unknown = [
        f"{bucket_text(bucket)} is not a bucket of this run; the nearest is "
        f"{bucket_text(nearest_bucket(bucket, buckets))}"
        for bucket, _ in entries
        if bucket not in buckets and buckets
    ]
    if unknown:
        raise DataError(f"`{option}` names unknown buckets", unknown, "unknown")
    return dict(entries)


def _as_resolutions(buckets: tuple[Bucket, ...]) -> Resolutions:
    return (buckets,) if buckets else ()
