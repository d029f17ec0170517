"""Decoding of a clip's frames, which are resized one by one while the next one is decoded.

Only two frames are ever in memory as large as they are stored. Each resized one is written to its place in the clip.

Frames are resized by torch's antialiased bicubic on uint8, which equals PIL's to one grey level, rather than by FFmpeg
inside PyAV's `reformat`: its result shifts brightness a little (0.4 levels on a 720p clip) and depends on FFmpeg's
version, while videos and images should be resampled in the same way, and cached latents like fresh ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..buckets.buckets import cover_size
from ..buckets.clip import Clip
from ..buckets.frames import select_frames
from ..reading.media import decoding, open_image, to_rgb
from ..reading.status import InvalidSampleError
from .backends import open_video
from .timeline import shown_at

#: A part of a frame: top, left, height, width.
Box: TypeAlias = tuple[int, int, int, int]
T = TypeVar("T")


def read_frames(
    path: Path,
    indices: Sequence[int],
    *,
    height: int,
    width: int,
    box: Box | None = None,
    backend: str = "pyav",
    out: Tensor | None = None,
) -> Tensor:
    """Decode frames of a video, turned upright, resized and cropped.

    Args:
        path: the video.
        indices: frame numbers in display order, ascending; a number may repeat.
        height, width: size in pixels that they are resized to.
        box: the part of each that is returned, or None for all of it.
        backend: the backend that decodes; see `data/video/backends.py`.
        out: the destination of the frames, in any layout, or None to allocate it.

    Returns:
        `[T, H, W, 3]` uint8, one frame for each index.

    Raises:
        InvalidSampleError: the file cannot be read, or ends before the last requested frame.
    """
    box = box or (0, 0, height, width)
    frames = torch.empty(len(indices), *box[2:], 3, dtype=torch.uint8) if out is None else out
    positions: dict[int, list[int]] = {}
    for position, number in enumerate(indices):
        positions.setdefault(number, []).append(position)
    requested, done = sorted(positions), 0
    try:
        with decoding(path), closing(open_video(path, backend)) as video:
            for number, pixels in _one_ahead(video.frames(requested)):
                frame = resize(torch.from_numpy(np.ascontiguousarray(pixels)), height, width)
                for position in positions[number]:
                    frames[position].copy_(crop(frame, box))
                done += 1
    except InvalidSampleError as error:
        if not done:
            raise
        raise InvalidSampleError(f"{error}, after {done} of {len(requested)} requested frames") from error
    if done < len(requested):
        raise InvalidSampleError(
            f"{path} ends early: {done} of {len(requested)} requested frames could be decoded, the last requested "
            f"one is number {max(indices)}; the file is truncated or damaged"
        )
    return frames


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items; a thread gets the next one while the caller works on this one.

    FFmpeg decodes without Python's lock. Its own threads would decode further than requested, and with them the decoder
    of H.264 does not report which frames are damaged.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="decode") as pool:
        upcoming = pool.submit(next, items, end)
        while (item := upcoming.result()) is not end:
            upcoming = pool.submit(next, items, end)
            yield item  # type: ignore[misc]
            del item


def read_image(path: Path, *, height: int, width: int) -> Tensor:
    """Read an image, turned upright and resized, as one frame `[1, H, W, 3]` uint8.

    Raises:
        InvalidSampleError: the file cannot be read.
    """
    return resize(_upright(path), height, width)[None]


def read_covering(path: Path, *, height: int, width: int) -> Tensor:
    """Read an image as `[3, H, W]` uint8, resized to cover that size and cropped in the middle.

    Raises:
        InvalidSampleError: the file cannot be read.
    """
    image = _upright(path)
    full = cover_size(image.shape[0], image.shape[1], height, width)
    box = (full[0] - height) // 2, (full[1] - width) // 2, height, width
    return crop(resize(image, *full), box).permute(2, 0, 1).contiguous()


def _upright(path: Path) -> Tensor:
    """Return an image, turned upright, `[H, W, 3]` uint8."""
    with decoding(path), open_image(path, whole=True) as image:
        return torch.from_numpy(np.array(to_rgb(image)))


def resize(frame_HWC: Tensor, height: int, width: int) -> Tensor:
    """Resize one uint8 frame `[H, W, 3]` by antialiased bicubic interpolation."""
    if frame_HWC.shape[:2] == (height, width):
        return frame_HWC
    planes = frame_HWC.permute(2, 0, 1)[None]
    resized = F.interpolate(planes, size=(height, width), mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous()


def load_clip(clip: Clip, *, generator: torch.Generator) -> Tensor:
    """Cut a clip to its bucket, `[3, T, H, W]` uint8, and each of its further media likewise, on three more channels.

    Args:
        clip: the clip, with its bucket and the way to cut it. With `center` and `random` it is resized to cover the
            bucket, then cropped.
        generator: CPU generator of the random start and crop; always drawn from three times, so that one choice does
            not shift another.

    Raises:
        InvalidSampleError: the file cannot be decoded.
    """
    (height, width), box, indices = find_cut(clip, generator)
    if clip.kind == "image":
        media = [crop(read_image(path, height=height, width=width)[0], box)[None] for path in clip.files]
        return torch.cat(media, dim=3).permute(3, 0, 1, 2).contiguous()
    backends = (clip.backend, *(medium.backend for medium in clip.further))
    frames = torch.empty(3 * len(backends), len(indices), *box[2:], dtype=torch.uint8)
    for path, backend, channels in zip(clip.files, backends, frames.split(3), strict=True):
        out = channels.permute(1, 2, 3, 0)
        read_frames(path, indices, height=height, width=width, box=box, backend=backend, out=out)
    return frames


class Cut(NamedTuple):
    """The part that is cut from every file of a clip.

    Attributes:
        full: height and width in pixels that frames are resized to.
        box: the part of each that is cut out.
        indices: numbers of the frames, ascending; 0 for an image.
    """

    full: tuple[int, int]
    box: Box
    indices: Sequence[int]


def find_cut(clip: Clip, generator: torch.Generator) -> Cut:
    """Return the cut of a clip; see `load_clip`."""
    length, height, width = clip.bucket
    draw, down, right = torch.randint(2**31, (3,), generator=generator, device="cpu").tolist()
    full = (height, width) if clip.reshape_mode == "none" else cover_size(clip.height, clip.width, height, width)
    spare_down, spare_right = full[0] - height, full[1] - width
    if clip.reshape_mode == "random":
        box = down % (spare_down + 1), right % (spare_right + 1), height, width
    else:
        box = spare_down // 2, spare_right // 2, height, width
    if clip.kind == "image":
        return Cut(full, box, [0])
    indices, _ = select_frames(
        clip.num_frames,
        source_fps=clip.source_fps,
        # The rate of the cut clip; `uniform` ignores it.
        fps=clip.fps,
        length=length,
        mode=clip.frame_selection,
        draw=draw,
        start=clip.start,
        times=_times(clip) if clip.is_variable else None,
    )
    return Cut(full, box, indices)


def crop(frame_HWC: Tensor, box: Box) -> Tensor:
    """Return a part of a frame."""
    top, left, height, width = box
    return frame_HWC[top : top + height, left : left + width]


def _times(clip: Clip) -> list[float]:
    """Return the second at which each frame of a clip's file is shown.

    Raises:
        InvalidSampleError: the file does not have the times, or has fewer frames than when the run was planned.
    """
    with decoding(clip.path):
        times = shown_at(clip.path)
    if len(times) < clip.num_frames:
        raise InvalidSampleError(f"{clip.path} ends early: it has {len(times)} frames, and had {clip.num_frames}")
    return times
