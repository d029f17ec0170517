"""Reads what a media file says about itself: size, frames, rate. Only its first frame is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import av
from av.stream import Disposition
from PIL import Image, UnidentifiedImageError

from .fates import Fate, Refusal
from .manifest import Kind
from .media import IMAGE_ERRORS, MAX_FRAME_PIXELS, look, open_container, open_image
from .video.timeline import display_times, mean_rate, steady_rate

#: Changes when the same file gives another answer; what was remembered of files is then forgotten.
PROBE_VERSION = 2

_MOST_FPS = 1000  # containers without a rate make FFmpeg answer with their clock's


class ProbeError(ValueError):
    """A media file that cannot be used; the message is the reason, without the file's name.

    Attributes:
        fate: the kind of reason.
        lasting: whether it lies in the file, and not in the disk, the network or permissions.
    """

    def __init__(self, fate: Fate, reason: str, *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.fate = fate
        self.lasting = lasting

    @property
    def refusal(self) -> Refusal:
        """Kind and reason."""
        return Refusal(self.fate, str(self))


@dataclass(frozen=True, slots=True)
class Probe:
    """What a clip is before anything is done to it.

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


def probe(path: Path, *, kind: Kind = "video") -> Probe:
    """Probe a video or an image; anything but a regular file is refused without opening it.

    Raises:
        ProbeError: the file cannot be read, or is visibly cut off, or its frames are too large.
    """
    found = look(path)
    if isinstance(found, Refusal):
        raise ProbeError(found.fate, found.reason, lasting=False)
    return _probe_image(path) if kind == "image" else _probe_video(path, size=found.st_size)


def _probe_image(path: Path) -> Probe:
    try:
        with open_image(path) as image:
            turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            width, height = reversed(image.size) if turned else image.size
    except UnidentifiedImageError as error:
        raise ProbeError("unreadable", "not an image that PIL can read") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ProbeError("too_large", f"cannot read the image: {error}") from error
    except IMAGE_ERRORS as error:
        of_system = isinstance(error, OSError) and error.errno is not None
        raise ProbeError("unreadable", f"cannot read the image: {error}", lasting=not of_system) from error
    return Probe(frames=1, fps=0.0, width=width, height=height, duration=0.0)


def _probe_video(path: Path, *, size: int) -> Probe:
    container = None
    try:
        with open_container(path) as container:
            streams = [s for s in container.streams.video if Disposition.attached_pic not in s.disposition]
            if not streams:
                raise ProbeError("no_video", "no video stream")
            stream = streams[0]
            if stream is not container.streams.video[0]:
                raise ProbeError("unreadable", "its first video stream is a cover picture")
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            if not 0 < rate <= _MOST_FPS:
                raise ProbeError("no_rate", f"no frame rate in the header (it says {rate:g} frames per second)")
            if stream.width * stream.height > MAX_FRAME_PIXELS:
                raise ProbeError(
                    "too_large",
                    f"{stream.width}x{stream.height} pixels is over the limit of {MAX_FRAME_PIXELS} for a frame",
                )
            times = _declared_times(stream, size=size)
            # The rotation is only readable on a decoded frame; decoding one also proves that the codec is known.
            first = next(container.decode(stream), None)
            if first is None:
                raise ProbeError("damaged", "no frame can be decoded")
            width, height = first.width, first.height
            if stream.sample_aspect_ratio:
                width = max(round(width * float(stream.sample_aspect_ratio)), 1)
            if round(first.rotation / 90) % 2:
                width, height = height, width
            tick = stream.time_base
            assert tick is not None  # every stream of a file has one
            steady = steady_rate(times, tick=tick, declared=rate) if times else None
            if times is None or steady is None:
                # What the index does not tell, or tells of decoding only: the file is read, though not decoded.
                container.seek(0)
                packets = [p.pts for p in container.demux(stream) if p.size and not p.is_discard]
                frames, times = len(packets), display_times(packets)
                steady = steady_rate(times, tick=tick, declared=rate) if times else rate
            else:
                frames = len(times)
            if steady is not None:
                rate = steady
            elif times is not None:
                rate = mean_rate(times, tick=tick)
    except (av.FFmpegError, OSError) as error:
        # FFmpeg's own errors are about the content; those of the system (permissions, network) can pass.
        of_system = isinstance(error, OSError)
        if container is None and isinstance(error, av.error.ArgumentError):
            raise ProbeError(
                "unreadable", "cannot read the video: a format that names other files, or unknown"
            ) from error
        raise ProbeError(
            "unreadable", f"cannot read the video: {error.strerror or error}", lasting=not of_system
        ) from error
    return Probe(
        frames=frames, fps=rate, width=width, height=height, duration=frames / rate, is_variable=steady is None
    )


def _declared_times(stream: av.VideoStream, *, size: int) -> list[int] | None:
    """When each frame is decoded according to the container's index, or None when it has no complete one.

    A guess from the duration will not do: a clip that turns out one frame shorter would stop the training.
    """
    entries = list(getattr(stream, "index_entries", ()))  # older PyAV has no access to the index
    if not entries or len(entries) < stream.frames:
        return None
    if stream.frames == 0:  # Matroska indexes key frames only
        return None
    inside = sum(entry.pos + entry.size <= size for entry in entries)
    if inside < len(entries):
        # Such files play without any error, just shorter.
        raise ProbeError(
            "cut_off", f"cut off: its index lists {len(entries)} frames, but only {inside} are in the file"
        )
    return [entry.timestamp for entry in entries if not entry.is_discard]
