"""Sliding windows: every segment of W frames of a clip is an example of its own. Pure functions; imports no torch.

A clip of N frames gives N - W + 1 windows that start one frame apart. Each is a `Clip` and is encoded by itself, unless
its latents are to be cut from those of the whole clip (`Clip.latents_of`), which is not the same: the first latent
frame of a causal VAE stands for one frame and knows no other, and one from within a clip stands for several and has
seen what came before.

Chunks are windows that follow each other without overlap. What remains at the end of a clip is shorter than a chunk and
not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import DataSection
from finetrainers.utils.text import plural

from .buckets import Bucket
from .clip import Clip

if TYPE_CHECKING:
    from torch import Tensor

_ITEM_BITS = 32


def window_starts(frames: int, window: int, *, stride: int = 1) -> range:
    """First frames of the windows of a clip: 0, stride, 2 stride, ... as long as a whole window follows.

    There are (frames - window) // stride + 1, and none where the clip is shorter than a window.
    """
    return range(0, frames - window + 1, stride)


def example_index(item: int, number: int) -> int:
    """Return the unique index of the `number`-th window of an item.

    That of the first window is the item's, so an item gets the same random numbers with one window as with none; and
    counted upwards, the windows of different items alternate.
    """
    return item + (number << _ITEM_BITS)


def item_of(index: int) -> int:
    """Return the item that an example is of."""
    return index & ((1 << _ITEM_BITS) - 1)


def is_first(index: int) -> bool:
    """Return whether an example is the first window of its item, or no window."""
    return index >> _ITEM_BITS == 0


def is_window(clip: Clip) -> bool:
    """Return whether an example is a sliding window of a clip. A chunk is not: it follows on no other example."""
    return clip.start is not None and clip.frame_selection != "chunk"


def is_inner_window(clip: Clip) -> bool:
    """Return whether an example is a sliding window from within a clip, so that context comes before it."""
    return is_window(clip) and not is_first(clip.index)


def windows_by_item(clips: Sequence[Clip]) -> list[list[int]]:
    """Return the places of each item's windows among all clips, in order; a clip without windows, or a chunk, is alone."""
    items: dict[int, list[int]] = {}
    for place, clip in enumerate(clips):
        is_chunk = clip.frame_selection == "chunk"
        items.setdefault(clip.index if is_chunk else item_of(clip.index), []).append(place)
    return [sorted(places, key=lambda place: clips[place].index) for places in items.values()]


def with_window_buckets(data: DataSection) -> DataSection:
    """Return the options as those of a clip that is a window: buckets of videos have its length, those of images stay."""
    size = data.sliding_window_size
    if size is None:
        return data
    buckets = dict.fromkeys((frames if frames == 1 else size, h, w) for frames, h, w in data.video_resolution_buckets)
    lengths = [size] if not data.video_resolution_buckets else []
    return data.model_copy(update={"video_resolution_buckets": list(buckets), "frame_buckets": lengths})


def frame_limit(data: DataSection, bucket: Bucket) -> int | None:
    """Return how many frames of a clip windows are cut from, by the bucket that the windows have; None: all of them.

    The length of a given bucket is an upper bound. Of several with the same height and width the longest counts: all
    windows are equally long, so clips of different lengths need no buckets of their own.
    """
    lengths = [frames for frames, *size in data.video_resolution_buckets if frames > 1 and tuple(size) == bucket[1:]]
    return max([*lengths, *(frames for frames in data.frame_buckets if frames > 1)], default=None)


def cut_windows(clip: Clip, available: int, *, data: DataSection, geometry: Geometry) -> list[Clip]:
    """Return the windows or chunks of a clip, in order; just the clip if none are asked for, or if it is an image.

    Args:
        clip: an item whose bucket has the length of a window or chunk.
        available: frames that it has at its rate, at least those of one.
        data: its options as they were given.
        geometry: of the model; latents are cut on its grid.
    """
    if data.frame_selection == "chunk" and clip.kind == "video":
        length = clip.bucket[0]
        return _examples(clip, window_starts(available, length, stride=length))
    size = data.sliding_window_size
    if size is None or clip.bucket[0] == 1:
        return [clip]
    limit = frame_limit(data, clip.bucket)
    frames = available if limit is None else min(available, limit)
    first = (available - frames) // 2 if data.frame_selection == "middle" else 0
    segment = None
    if data.sliding_window_latents == "slice":
        frames = (frames - 1) // geometry.temporal * geometry.temporal + 1
        segment = (first, frames)
    starts = window_starts(frames, size, stride=stride_of(data, geometry))
    return _examples(replace(clip, frame_selection="head", latents_of=segment), [first + start for start in starts])


def _examples(clip: Clip, starts: Iterable[int]) -> list[Clip]:
    return [replace(clip, index=example_index(clip.index, k), start=start) for k, start in enumerate(starts)]


def stride_of(data: DataSection, geometry: Geometry) -> int:
    """Frames between the starts of two windows; those whose latents are cut start only where a latent frame does."""
    stride = data.sliding_window_stride
    if data.sliding_window_latents == "encode":
        return stride
    return -(-stride // geometry.temporal) * geometry.temporal


def describe_windows(
    clips: Sequence[Clip], available: Mapping[int, int], *, data: DataSection, geometry: Geometry
) -> Iterator[str]:
    """Notes for the user: how many windows or chunks of how many clips there are, what was rounded, and what is left over.

    Args:
        clips: all examples.
        available: frames of each item at its rate.
        data: its options.
        geometry: of the model.
    """
    windows = [clip for clip in clips if clip.start is not None]
    if data.sliding_window_size is not None:
        stride = stride_of(data, geometry)
        yield (
            f"{plural(len(windows), 'sliding window')} of {data.sliding_window_size} frames, {plural(stride, 'frame')} apart, "
            f"from {plural(len({item_of(clip.index) for clip in windows}), 'clip')}; each is an example of its own"
            + (", and all of a clip come in one optimizer step" if data.sliding_window_batching == "clip" else "")
        )
        inside = sum(not is_first(clip.index) for clip in windows)
        if data.window_context and inside:
            frames = (data.window_context - 1) * geometry.temporal + 1
            yield (
                f"{plural(inside, 'window')} from within clips {'is' if inside == 1 else 'are'} given "
                f"{plural(frames, 'frame')} of context (--window_context {data.window_context})"
            )
        if stride != data.sliding_window_stride:
            yield (
                f"--sliding_window_stride {data.sliding_window_stride} became {stride}: latents that are cut from those of a "
                f"whole clip start every {geometry.temporal} frames"
            )
    elif windows:
        items = {item_of(clip.index) for clip in clips}
        there = sum(available[item] for item in items)
        rest = there - sum(clip.bucket[0] for clip in clips)
        yield (
            f"chunks: {plural(len(items), 'item')} give {plural(len(clips), 'clip')}; {rest / max(there, 1):.1%} of the "
            "frames, at ends shorter than a chunk, are not used"
        )


def apart(clips: Iterable[Clip]) -> list[Clip]:
    """Windows that do not overlap an earlier one of their item, and every other clip.

    For evaluation: windows a frame apart are nearly the same, and all would be encoded and kept.
    """
    kept: list[Clip] = []
    end: dict[int, int] = {}
    for clip in clips:
        item = item_of(clip.index)
        if clip.start is None or clip.start >= end.get(item, 0):
            kept.append(clip)
            end[item] = (clip.start or 0) + clip.bucket[0]
    return kept


def encoded_clip(clip: Clip) -> Clip:
    """Return the clip that the VAE encodes: itself, or the segment that its latents are cut from."""
    if clip.latents_of is None:
        return clip
    start, frames = clip.latents_of
    index = item_of(clip.index)
    return replace(clip, index=index, bucket=(frames, *clip.bucket[1:]), start=start, latents_of=None)


def encoded_clips(clips: Iterable[Clip]) -> Iterator[Clip]:
    """Yield the clips that the VAE encodes; a segment that several windows share comes once."""
    seen: set[tuple[int, Bucket]] = set()
    for clip in clips:
        segment = item_of(clip.index), clip.bucket
        if clip.latents_of is None or segment not in seen:
            yield encoded_clip(clip)
        seen.add(segment)


def cut_latents(latents: Tensor, clip: Clip) -> Tensor:
    """Return a window's latents `[B, C, T, H, W]` from those of its whole segment; any other clip's own as they are.

    With c frames to a latent frame, latent 0 of the segment stands for its frame 0, and latent k for frames
    (k - 1) c + 1 to k c. A window of m c + 1 frames that starts at frame j c gets latents j to j + m: all but the first
    stand for exactly its frames, and the first, unless j is 0, for its first frame and the c - 1 before.

    Raises:
        ValueError: the VAE compresses otherwise than the window was made for.
    """
    if clip.latents_of is None or clip.start is None:
        return latents
    first, frames = clip.latents_of
    ratio, rest = divmod(frames - 1, max(latents.shape[2] - 1, 1))
    offset, length = clip.start - first, clip.bucket[0] - 1
    if rest or offset % ratio or length % ratio:
        raise ValueError(
            f"{clip.path}: a window of frames {clip.start} to {clip.start + length} is not on the grid of the "
            f"{latents.shape[2]} latent frames of {frames} frames; use --sliding_window_latents encode"
        )
    return latents[:, :, offset // ratio : (offset + length) // ratio + 1]
