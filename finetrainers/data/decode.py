"""Turns a clip's file into pixels: the wanted frames only, resized one by one, never the whole clip in memory.

Frames are resized by torch's antialiased bicubic on uint8, which equals PIL's to one grey level, rather than by FFmpeg
inside PyAV's `reformat`: its result shifts brightness a little (0.4 levels on a 720p clip) and depends on FFmpeg's
version, while videos and images should meet the same resampling, and cached latents the same as fresh ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import numpy as np
import torch
import torch.nn.functional as F
from av.video.reformatter import VideoReformatter
from PIL import Image, ImageOps
from torch import Tensor

from .buckets import cover_size
from .clip import Clip
from .frames import select_frames
from .media import open_video

# Below this many frames, decoding from the start is cheaper than looking for a key frame.
_SEEK_FROM = 24


class DecodeError(ValueError):
    """A media file whose frames cannot be decoded; the message names the file."""


def read_frames(path: Path, indices: Sequence[int], *, height: int, width: int) -> Tensor:
    """Decode frames of a video, turned upright and resized.

    Args:
        path: the video.
        indices: frame numbers in display order, ascending; a number may repeat.
        height, width: size of the result in pixels.

    Returns:
        `[T, H, W, 3]` uint8, one frame for each index.

    Raises:
        DecodeError: the file cannot be read, or ends before the last wanted frame.
    """
    wanted = set(indices)
    to_rgb = VideoReformatter()  # one for all frames: each sets up a scaler and its threads, 2 ms
    frames: dict[int, Tensor] = {}
    try:
        with open_video(path) as container:
            stream = container.streams.video[0]
            # One thread per slice only: frame threads read ahead of what is wanted, in every loader worker at once.
            stream.thread_type = "SLICE"
            for number, frame in _numbered(container, stream, first=min(indices)):
                if number in wanted:
                    pixels = to_rgb.reformat(frame, format="rgb24").to_ndarray()
                    upright = np.rot90(pixels, k=round(frame.rotation / 90))
                    frames[number] = resize(torch.from_numpy(np.ascontiguousarray(upright)), height, width)
                    if len(frames) == len(wanted):
                        break
    except (av.FFmpegError, OSError, IndexError) as error:
        got = f" after {len(frames)} of {len(wanted)} wanted frames" if frames else ""
        raise DecodeError(f"cannot decode {path}{got}: {getattr(error, 'strerror', None) or error}") from error
    if len(frames) < len(wanted):
        raise DecodeError(
            f"{path} ends early: {len(frames)} of {len(wanted)} wanted frames could be decoded, "
            f"the last wanted one is number {max(indices)}; the file is cut off or damaged"
        )
    return torch.stack([frames[number] for number in indices])


def read_image(path: Path, *, height: int, width: int) -> Tensor:
    """Read an image, turned upright and resized, as one frame `[1, H, W, 3]` uint8.

    Raises:
        DecodeError: the file cannot be read.
    """
    try:
        with Image.open(path) as image:
            pixels = np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, Image.DecompressionBombError) as error:
        raise DecodeError(f"cannot decode {path}: {error}") from error
    return resize(torch.from_numpy(pixels), height, width)[None]


def resize(frame_HWC: Tensor, height: int, width: int) -> Tensor:
    """Resize one uint8 frame `[H, W, 3]` by antialiased bicubic interpolation."""
    if frame_HWC.shape[:2] == (height, width):
        return frame_HWC
    planes = frame_HWC.permute(2, 0, 1)[None]
    resized = F.interpolate(planes, size=(height, width), mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous()


def load_clip(clip: Clip, *, generator: torch.Generator) -> Tensor:
    """Cut a clip to its bucket: `[3, T, H, W]` fp32 in [-1, 1].

    Args:
        clip: what to cut, to which bucket and how. With `center` and `random` it is resized so that the bucket is covered,
            then cropped.
        generator: CPU generator of the random start and crop; always drawn from three times, so that one choice does
            not shift another.

    Raises:
        DecodeError: the file cannot be decoded.
    """
    length, height, width = clip.bucket
    draw, down, right = torch.randint(2**31, (3,), generator=generator).tolist()
    full = (height, width) if clip.reshape_mode == "none" else cover_size(clip.height, clip.width, height, width)
    if clip.kind == "image":
        frames = read_image(clip.path, height=full[0], width=full[1])
    else:
        indices, _ = select_frames(
            clip.num_frames,
            source_fps=clip.source_fps,
            # The rate of the cut clip; `uniform` does not ask for it.
            fps=clip.fps,
            length=length,
            mode=clip.frame_selection,
            draw=draw,
            start=clip.start,
        )
        frames = read_frames(clip.path, indices, height=full[0], width=full[1])
    spare_down, spare_right = full[0] - height, full[1] - width
    if clip.reshape_mode == "random":
        top, left = down % (spare_down + 1), right % (spare_right + 1)
    else:
        top, left = spare_down // 2, spare_right // 2
    cropped = frames[:, top : top + height, left : left + width]
    return cropped.permute(3, 0, 1, 2).to(torch.float32) / 127.5 - 1.0


def _numbered(
    container: av.container.InputContainer, stream: av.VideoStream, *, first: int
) -> Iterator[tuple[int, av.VideoFrame]]:
    """Decoded frames with their numbers in display order, starting at or before number `first`.

    Far into a clip, the file is read once without decoding to list its display times; they turn times into numbers
    exactly, also at variable frame rates. Where times are missing or seeking lands too late, frames are counted from
    the start instead.
    """
    times = _display_times(container, stream) if first >= _SEEK_FROM else None
    if times is not None and first < len(times):
        numbers = {time: number for number, time in enumerate(times)}
        container.seek(times[first], stream=stream)
        decoded = container.decode(stream)
        opening = next(decoded, None)
        if opening is not None and opening.pts in numbers and numbers[opening.pts] <= first:
            yield numbers[opening.pts], opening
            for frame in decoded:
                if frame.pts in numbers:
                    yield numbers[frame.pts], frame
            return
    if first >= _SEEK_FROM:
        container.seek(0)
    yield from enumerate(container.decode(stream))


def _display_times(container: av.container.InputContainer, stream: av.VideoStream) -> list[int] | None:
    """Display times of all frames, ascending; None when the container does not give every frame its own."""
    times = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
    if None in times or len(set(times)) != len(times):
        return None
    return sorted(time for time in times if time is not None)
