"""The probe of a media file by its header: size, frames, rate. Only its first frame is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av

from ..reading.items import Kind
from ..reading.media import (
    MAX_FRAME_PIXELS,
    decode_frames,
    demux_packets,
    error_reason,
    is_lasting,
    is_out_of_memory,
    open_container,
    open_image,
    require_file,
    too_large,
    video_stream,
)
from ..reading.status import InvalidSampleError
from ..video.timeline import display_times, mean_rate, read_index, steady_rate

#: Changes when the same file gives another probe; stored facts are then ignored.
PROBE_VERSION = 3

_MAX_FPS = 1000  # for containers without a rate, FFmpeg returns that of their clock


@dataclass(frozen=True, slots=True)
class Probe:
    """Properties of a media file.

    Attributes:
        frames: number of frames; 1 for images.
        fps: frame rate; 0 for images.
        is_variable: whether the frames are shown at uneven times; `fps` is then their exact mean rate.
        width: displayed width in pixels, after rotation and with square pixels.
        height: displayed height in pixels.
        duration: seconds; 0 for images.
    """

    frames: int
    fps: float
    width: int
    height: int
    duration: float
    is_variable: bool = False


#: The probe of a file that cannot be used.
NO_PROBE = Probe(frames=0, fps=0.0, width=0, height=0, duration=0.0)


def probe(path: Path, *, kind: Kind = "video") -> Probe:
    """Probe a video or an image; anything but a regular file is refused without opening it.

    Raises:
        InvalidSampleError: the file cannot be read, is visibly cut off, its frames are too large, or it has another
            problem.
    """
    size = require_file(path).st_size
    try:
        if kind == "video":
            return _probe_video(path, size=size)
        with open_image(path) as image:
            is_rotated = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            width, height = reversed(image.size) if is_rotated else image.size
        return Probe(frames=1, fps=0.0, width=width, height=height, duration=0.0)
    except InvalidSampleError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InvalidSampleError(
            f"cannot read the {kind}: {error_reason(error)}", "unreadable", lasting=is_lasting(error)
        ) from error


def _probe_video(path: Path, *, size: int) -> Probe:
    with open_container(path) as container:
        stream = video_stream(container)
        rate = _check_rate(float(stream.average_rate or stream.guessed_rate or 0), "its header says")
        if stream.width * stream.height > MAX_FRAME_PIXELS:
            raise too_large(stream.width, stream.height)
        times = _declared_times(container, stream, size=size)
        # The rotation is only readable on a decoded frame; decoding one also proves that the codec is known.
        first = next(decode_frames(container, stream), None)
        if first is None:
            raise InvalidSampleError("no frame can be decoded", "damaged")
        width, height = first.width, first.height
        if stream.sample_aspect_ratio and stream.sample_aspect_ratio > 0:
            width = max(round(width * float(stream.sample_aspect_ratio)), 1)
        if round(first.rotation / 90) % 2:
            width, height = height, width
        tick = stream.time_base
        assert tick is not None  # every stream of a file has one
        fps = steady_rate(times, tick=tick, declared=rate) if times else None
        is_variable = False
        if times is not None and fps is not None:
            frames = len(times)
        else:
            # The index lacks the times, or has only those of decoding: the file is read, but not decoded.
            container.seek(0)
            packets = [p.pts for p in demux_packets(container, stream) if p.size and not p.is_discard]
            frames, fps, is_variable = _timing(packets, tick=tick, declared=rate)
    fps = _check_rate(fps, "by the times of its frames, it has")
    return Probe(frames=frames, fps=fps, width=width, height=height, duration=frames / fps, is_variable=is_variable)


def _check_rate(rate: float, source: str) -> float:
    if not rate > 0:
        raise InvalidSampleError("no frame rate in its header", "no_rate")
    if rate > _MAX_FPS:
        raise InvalidSampleError(f"{source} {rate:g} frames per second, over the limit of {_MAX_FPS}", "no_rate")
    return rate


def _declared_times(container: av.container.InputContainer, stream: av.VideoStream, *, size: int) -> list[int] | None:
    """Return the time at which each frame is decoded, by the container's index, or None if the index is incomplete.

    A guess from the duration does not suffice: a clip that turns out one frame shorter would stop the training.
    """
    entries = read_index(container, stream)
    # Matroska declares no number of frames, and indexes key frames only.
    if not stream.frames or len(entries) < stream.frames:
        return None
    inside = sum(entry.pos + entry.size <= size for entry in entries)
    if inside < len(entries):
        # Such files play without errors, but shorter.
        raise InvalidSampleError(
            f"cut off: its index lists {len(entries)} frames, but only {inside} are in the file", "cut_off"
        )
    return [entry.timestamp for entry in entries if not entry.is_discard]


def _timing(packets: list[int | None], *, tick: Fraction, declared: float) -> tuple[int, float, bool]:
    """Return the number of frames, their rate, and whether it varies, by the display times of all packets.

    Raises:
        InvalidSampleError: there are no frames, or all have the same time.
    """
    if not packets:
        raise InvalidSampleError("no frame can be found in it a second time", "damaged")
    if len(packets) > 1 and packets[0] is not None and len(set(packets)) == 1:
        raise InvalidSampleError(
            f"all of its {len(packets)} frames are shown at one time, so it has no frame rate", "no_rate"
        )
    times = display_times(packets)
    if times is None:
        return len(packets), declared, False
    steady = steady_rate(times, tick=tick, declared=declared)
    return len(packets), steady or mean_rate(times, tick=tick), steady is None
