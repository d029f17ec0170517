"""Chooses the buckets of a run by its options and clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import DataSection
from finetrainers.utils.text import plural

from ..reading.items import DataError, Kind
from .buckets import Bucket, area_sizes, bucket_text, default_buckets, default_lengths, legal_lengths, nearest_bucket

Value = TypeVar("Value", int, float)


@dataclass(frozen=True)
class Choice:
    """The buckets of a run.

    Attributes:
        of_kind: for videos and for images, by resolution, largest first; those that the user listed count as one.
        notes: what was chosen or rounded for the user.
    """

    of_kind: Mapping[Kind, tuple[tuple[Bucket, ...], ...]]
    notes: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[Bucket, ...]:
        """All buckets, each once: those for videos, then for images."""
        both = (*self.of_kind["video"], *self.of_kind["image"])
        return tuple(dict.fromkeys(bucket for buckets in both for bucket in buckets))


def choose_buckets(data: DataSection, geometry: Geometry, clips: Mapping[Kind, Sequence[Bucket]]) -> Choice:
    """Return the buckets: listed ones, those of `resolutions`, or chosen from the clips.

    Args:
        data: the options.
        geometry: of the model.
        clips: usable frames, height and width of every readable video and image.

    Raises:
        DataError: sizes or lengths that the model cannot be trained on.
    """
    listed = tuple((1, height, width) for height, width in data.image_resolution_buckets)
    given = (*data.video_resolution_buckets, *listed)
    _check_buckets(given, geometry)
    automatic = data.resolutions or data.frame_buckets
    if given and not automatic:
        single = tuple(bucket for bucket in given if bucket[0] == 1)
        longer = tuple(bucket for bucket in given if bucket[0] > 1)
        # No video is trained as an image, unless there are no other buckets for it.
        return Choice({"video": _one(longer or tuple(data.video_resolution_buckets)), "image": _one(single)})
    try:
        lengths, notes = legal_lengths(data.frame_buckets, geometry)
        if len(lengths) > 1:  # then 1 is for images, which have it anyhow; no video becomes one
            lengths = [length for length in lengths if length > 1]
        if data.resolutions:
            chosen = _of_resolutions(data, geometry, lengths, notes, videos=clips["video"])
        else:
            chosen = {kind: _of_clips(kind, sizes, geometry, lengths, notes) for kind, sizes in clips.items()}
    except ValueError as error:
        raise DataError("sizes that this model cannot train on", [str(error)]) from None
    choice = Choice({"video": chosen["video"], "image": _one(listed) or chosen["image"]}, tuple(notes))
    _check_buckets(choice.all, geometry)
    return choice


def _check_buckets(buckets: Sequence[Bucket], geometry: Geometry) -> None:
    """Check that the model can train on every bucket.

    Raises:
        DataError: it cannot.
    """
    problems = [f"{bucket_text(bucket)}: {problem}" for bucket in buckets for problem in geometry.problems(*bucket)]
    if problems:
        raise DataError("buckets that this model cannot train on", problems)


def _of_resolutions(
    data: DataSection, geometry: Geometry, lengths: list[int], notes: list[str], *, videos: Sequence[Bucket]
) -> dict[Kind, tuple[tuple[Bucket, ...], ...]]:
    sizes: dict[tuple[tuple[int, int], ...], None] = {}
    for resolution in sorted(data.resolutions, key=lambda one: -one[0] * one[1]):
        of_area, rounded = area_sizes(
            resolution, geometry, count=data.num_ar_buckets, min_ar=data.min_ar, max_ar=data.max_ar
        )
        sizes[tuple(of_area)] = None
        notes += rounded
    if not data.num_ar_buckets:  # shapes of their own, which are not alternatives to one another
        sizes = {tuple(size for of_area in sizes for size in of_area): None}
    if not lengths and videos:
        lengths = default_lengths([video[0] for video in videos], geometry)
        notes.append(
            f"no lengths were given; chose {', '.join(map(str, lengths))} frames from {plural(len(videos), 'video')}"
        )
    shown = "; ".join(", ".join(f"{height}x{width}" for height, width in of_area) for of_area in sizes)
    notes.append(f"sizes of --resolutions: {shown}")
    return {
        "video": tuple(tuple((f, *size) for f in lengths for size in of_area) for of_area in sizes) if lengths else (),
        "image": tuple(tuple((1, *size) for size in of_area) for of_area in sizes),
    }


def _of_clips(
    kind: Kind, sizes: Sequence[Bucket], geometry: Geometry, lengths: list[int], notes: list[str]
) -> tuple[tuple[Bucket, ...], ...]:
    if not sizes:
        return ()
    chosen = tuple(default_buckets(sizes, geometry, lengths if kind == "video" else ()))
    shown = ", ".join(map(bucket_text, chosen))
    notes.append(f"no buckets were given; chose {shown} from the sizes of {plural(len(sizes), kind)}")
    return _one(chosen)


def named_buckets(
    option: str, entries: Sequence[tuple[Bucket, Value]], buckets: Sequence[Bucket]
) -> dict[Bucket, Value]:
    """Return the values that an option gives to single buckets.

    Raises:
        DataError: it names some that are not there.
    """
    unknown = [
        f"{bucket_text(bucket)} is no bucket of this run; the nearest is {bucket_text(nearest_bucket(bucket, buckets))}"
        for bucket, _ in entries
        if bucket not in buckets and buckets
    ]
    if unknown:
        raise DataError(f"`{option}` names buckets that are not there", unknown)
    return dict(entries)


def _one(buckets: tuple[Bucket, ...]) -> tuple[tuple[Bucket, ...], ...]:
    return (buckets,) if buckets else ()
