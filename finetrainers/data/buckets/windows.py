"""Sliding windows: every segment of W frames of a clip is a separate example. Pure functions; imports no torch.

A clip of N frames gives N - W + 1 windows that start one frame apart. Each is a `Clip` and is encoded by itself, unless
its latents are to be cut from those of the entire clip (`Clip.latent_segment`), which is not the same: the first latent
frame of a causal VAE stands for one frame and depends on no other, and one from within a clip stands for several and
depends on earlier frames.

Chunks are windows that follow each other without overlap. The rest at the end of a clip is shorter than a chunk and not
used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import DataSection
from finetrainers.utils.failures import InputError
from finetrainers.utils.text import plural

from .buckets import Bucket, legal_length
from .clip import Clip

if TYPE_CHECKING:
    from torch import Tensor

_ITEM_BITS = 32


def window_starts(frames: int, window: int, *, stride: int = 1) -> range:
    """Return the first frames of the windows of a clip: 0, stride, 2 stride, ... as long as a full window follows.

    There are (frames - window) // stride + 1, and none if the clip is shorter than a window.
    """
    return range(0, frames - window + 1, stride)


def example_index(item: int, number: int) -> int:
    """Return the unique index of the `number`-th window of an item.

    The index of the first window is the item's, so an item gets the same random numbers with one window as with none.
    In order of indices, the windows of different items alternate.
    """
    return item + (number << _ITEM_BITS)


def item_index(index: int) -> int:
    """Return the index of an example's item."""
    return index & ((1 << _ITEM_BITS) - 1)


def is_first(index: int) -> bool:
    """Return whether an example is the first window of its item, or not a window."""
    return index >> _ITEM_BITS == 0


def is_window(clip: Clip) -> bool:
    """Return whether an example is a sliding window of a clip. A chunk is not: it is independent of others."""
    return clip.start is not None and clip.frame_selection != "chunk"


def is_inner_window(clip: Clip) -> bool:
    """Return whether an example is a sliding window from within a clip, so that context comes before it."""
    return is_window(clip) and not is_first(clip.index)


def windows_by_item(clips: Sequence[Clip]) -> list[list[int]]:
    """Return the positions of each item's windows in `clips`, in order; other clips and chunks are single."""
    items: dict[int, list[int]] = {}
    for position, clip in enumerate(clips):
        is_chunk = clip.frame_selection == "chunk"
        items.setdefault(clip.index if is_chunk else item_index(clip.index), []).append(position)
    return [sorted(positions, key=lambda position: clips[position].index) for positions in items.values()]


def with_window_buckets(data: DataSection) -> DataSection:
    """Return the options with the length of a window in the buckets of videos; those of images stay."""
    size = data.sliding_window_size
    if size is None:
        return data
    buckets = dict.fromkeys((frames if frames == 1 else size, h, w) for frames, h, w in data.video_resolution_buckets)
    lengths = [size] if not data.video_resolution_buckets else []
    return data.model_copy(update={"video_resolution_buckets": list(buckets), "frame_buckets": lengths})


def frame_limit(data: DataSection, bucket: Bucket) -> int | None:
    """Return the number of a clip's frames that windows are cut from, by the bucket of the windows, or None if all are.

    The length of a configured bucket is an upper bound. The longest of several with the same height and width counts:
    all windows are equally long, so clips of different lengths need no separate buckets.
    """
    lengths = [frames for frames, *size in data.video_resolution_buckets if frames > 1 and tuple(size) == bucket[1:]]
    return max([*lengths, *(frames for frames in data.frame_buckets if frames > 1)], default=None)


def cut_windows(clip: Clip, available: int, *, data: DataSection, geometry: Geometry) -> list[Clip]:
    """Return the windows or chunks of a clip, in order, or just the clip if none are configured or it is an image.

    Args:
        clip: an item whose bucket has the length of a window or chunk.
        available: frames that it has at its rate, at least those of one window or chunk.
        data: its options before `with_window_buckets`.
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
        frames = legal_length(frames, geometry)
        segment = (first, frames)
    starts = window_starts(frames, size, stride=effective_stride(data, geometry))
    return _examples(replace(clip, frame_selection="head", latent_segment=segment), [first + start for start in starts])


def _examples(clip: Clip, starts: Iterable[int]) -> list[Clip]:
    return [replace(clip, index=example_index(clip.index, k), start=start) for k, start in enumerate(starts)]


def effective_stride(data: DataSection, geometry: Geometry) -> int:
    """Return the frames between the starts of two windows; with cut latents, windows start only at latent frames."""
    stride = data.sliding_window_stride
    if data.sliding_window_latents == "encode":
        return stride
    return -(-stride // geometry.temporal) * geometry.temporal


def describe_windows(
    clips: Sequence[Clip], available: Mapping[int, int], *, data: DataSection, geometry: Geometry
) -> Iterator[str]:
    """Yield notes for the user about the numbers of windows or chunks and of clips, rounding, and the unused rest.

    Args:
        clips: all examples.
        available: frames of each item at its rate.
        data: its options.
        geometry: of the model.
    """
    windows = [clip for clip in clips if clip.start is not None]
    if data.sliding_window_size is not None:
        stride = effective_stride(data, geometry)
        yield (
            f"{plural(len(windows), 'sliding window')} of {data.sliding_window_size} frames, "
            f"{plural(stride, 'frame')} apart, from "
            f"{plural(len({item_index(clip.index) for clip in windows}), 'clip')}; each is a separate sample"
            + (
                ", and all windows of a clip are in one optimizer step"
                if data.sliding_window_batching == "clip"
                else ""
            )
        )
        inside = sum(not is_first(clip.index) for clip in windows)
        if data.window_context and inside:
            frames = (data.window_context - 1) * geometry.temporal + 1
            yield (
                f"{plural(inside, 'window')} from within clips {('has' if inside == 1 else 'have')} "
                f"{plural(frames, 'frame')} of context (--window_context {data.window_context})"
            )
        if stride != data.sliding_window_stride:
            yield (
                f"--sliding_window_stride {data.sliding_window_stride} became {stride}: latents that are cut from "
                f"those of a whole clip start every {geometry.temporal} frames"
            )
    elif windows:
        items = {item_index(clip.index) for clip in clips}
        total = sum(available[item] for item in items)
        unused = total - sum(clip.bucket[0] for clip in clips)
        yield (
            f"chunks: {plural(len(items), 'item')} give {plural(len(clips), 'clip')}; {unused / max(total, 1):.1%} of "
            "the frames, at ends shorter than a chunk, are not used"
        )


def non_overlapping(clips: Iterable[Clip]) -> list[Clip]:
    """Return windows that do not overlap an earlier one of their item, and every other clip.

    For evaluation: windows a frame apart are nearly the same, and all would be encoded and kept.
    """
    selected: list[Clip] = []
    ends: dict[int, int] = {}
    for clip in clips:
        item = item_index(clip.index)
        if clip.start is None or clip.start >= ends.get(item, 0):
            selected.append(clip)
            ends[item] = (clip.start or 0) + clip.bucket[0]
    return selected


def count_used_frames(clips: Iterable[Clip]) -> dict[int, int]:
    """Return the number of frames, at its rate, that the clips of each item use; overlaps of windows count once.

    Args:
        clips: those of an item in order of their starts.
    """
    counts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for clip in clips:
        item, start = item_index(clip.index), clip.start or 0
        end = start + clip.bucket[0]
        counts[item] = counts.get(item, 0) + end - max(start, ends.get(item, 0))
        ends[item] = end
    return counts


def encoded_clip(clip: Clip) -> Clip:
    """Return the clip that the VAE encodes: itself, or the segment that its latents are cut from."""
    if clip.latent_segment is None:
        return clip
    start, frames = clip.latent_segment
    index = item_index(clip.index)
    return replace(clip, index=index, bucket=(frames, *clip.bucket[1:]), start=start, latent_segment=None)


def encoded_clips(clips: Iterable[Clip]) -> Iterator[Clip]:
    """Yield the clips that the VAE encodes; a segment that several windows share comes once."""
    seen: set[tuple[int, Bucket]] = set()
    for clip in clips:
        segment = item_index(clip.index), clip.bucket
        if clip.latent_segment is None or segment not in seen:
            yield encoded_clip(clip)
        seen.add(segment)


def cut_latents(latents: Tensor, clip: Clip) -> Tensor:
    """Return a window's latents `[B, C, T, H, W]` from those of its segment; any other clip's latents are unchanged.

    With c frames to a latent frame, latent 0 of the segment stands for its frame 0, and latent k for frames
    (k - 1) c + 1 to k c. A window of m c + 1 frames that starts at frame j c gets latents j to j + m: all but the first
    stand for exactly its frames, and the first, unless j is 0, for its first frame and the c - 1 before.

    Raises:
        ValueError: the VAE's temporal compression differs from the one that the window was made for.
    """
    if clip.latent_segment is None or clip.start is None:
        return latents
    first, frames = clip.latent_segment
    ratio, rest = divmod(frames - 1, max(latents.shape[2] - 1, 1))
    offset, length = clip.start - first, clip.bucket[0] - 1
    if rest or offset % ratio or length % ratio:
        raise InputError(
            f"{clip.path}: a window of frames {clip.start} to {clip.start + length} is not on the grid of the "
            f"{latents.shape[2]} latent frames of {frames} frames; use --sliding_window_latents encode",
            "mismatch",
        )
    return latents[:, :, offset // ratio : (offset + length) // ratio + 1]
