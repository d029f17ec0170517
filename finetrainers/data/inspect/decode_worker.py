"""The worker process that decodes a whole file or makes its thumbnails; see `full_decode`."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import av
import numpy as np
from PIL import Image, ImageOps

from ..reading.items import Kind
from ..reading.media import decode_frames, error_reason, open_container, open_image, video_stream
from ..reading.status import Decoded, InvalidSample
from .probe import probe

R = TypeVar("R")

#: Memory that decoding a file may allocate, beyond that of the process at its start.
MEMORY_BYTES = 4 << 30

_BLACK = 24  # of 255: limited range has its black at 16
_STILL = 1.5  # grey levels, on average, between the first frame and any other, which encoding alone may change
GAP = 2  # pixels between thumbnails
_STEP = 8  # every eighth pixel of every eighth row is read


@dataclass(frozen=True)
class Lost:
    """A task without a result: it failed, or its process was lost. `how` continues a message after "the decoder"."""

    how: str


def serve(pipe: Connection, function: Callable[..., Any]) -> None:
    """Answer calls until the other end is closed. The parent handles Ctrl-C and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _bound_memory()
    pipe.send("up")
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(answer(function, arguments))


def answer(function: Callable[..., R], arguments: tuple[Any, ...]) -> R | Lost:
    """Return the result of a function for a file, or its failure."""
    try:
        return function(*arguments)
    except MemoryError:
        return Lost(f"asked for more than {MEMORY_BYTES >> 30} GiB")
    except Exception as error:
        return Lost(f"failed: {error_reason(error)}")


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    try:
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS
        used_bytes = MEMORY_BYTES
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = used_bytes + MEMORY_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit), hard_limit)
    )


def decode_task(path: str, kind: Kind, declared: int) -> Decoded:
    """Decode a file from end to end; return the reason why it cannot be used, or its marks (`black`, `still`)."""
    return _decode_image(path) if kind == "image" else _decode_video(path, declared)


def _decode_image(path: str) -> Decoded:
    try:
        with open_image(path) as image:
            grey = np.asarray(image.convert("L"))[::_STEP, ::_STEP]
    except MemoryError:
        raise
    except Exception as error:
        return _unusable(error, f"the image cannot be decoded: {error_reason(error)}")
    return ("black",) if grey.mean() < _BLACK else ()


def _decode_video(path: str, declared: int) -> Decoded:
    count = broken = 0
    first: np.ndarray | None = None
    black, still = True, True
    try:
        with open_container(Path(path)) as container:
            stream = video_stream(container)
            stream.thread_type = "NONE"  # there is a process per processor
            for frame in decode_frames(container, stream):
                count += 1
                broken += frame.is_corrupt
                grey = _grey(frame) if black or still else None
                if grey is None:
                    black = still = False
                    continue
                first = grey if first is None else first
                black = black and float(grey.mean()) < _BLACK
                still = still and grey.shape == first.shape and float(np.abs(grey - first).mean()) < _STILL
    except MemoryError:  # includes that of FFmpeg
        raise
    except Exception as error:
        return _unusable(error, f"decoding fails after frame {count} of {declared}: {error_reason(error)}")
    if broken:
        return InvalidSample("damaged", f"{broken} of {count} frames are broken")
    if count < declared:
        return InvalidSample("cut_off", f"cut off: it declares {declared} frames, and {count} can be decoded")
    if black:
        return ("black",)
    return ("still",) if still and count > 1 else ()


def _unusable(error: Exception, reason: str) -> InvalidSample:
    """Return the status of a failed decode; an unreachable disk or network is not damage."""
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, av.FFmpegError):
        return InvalidSample("unreadable", f"cannot be read: {error_reason(error)}")
    return InvalidSample("damaged", reason)


def _grey(frame: av.VideoFrame) -> np.ndarray | None:
    """Return some pixels of a frame's brightness plane, or None if pixels have an unusual layout."""
    if not frame.format.name.startswith(("yuv4", "yuvj4", "nv12", "gray8")) or "le" in frame.format.name[-4:]:
        return None
    plane = frame.planes[0]
    rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
    return rows[: frame.height : _STEP, : frame.width : _STEP].astype(np.float32)


class Thumbnails(NamedTuple):
    """Thumbnails of a file, side by side with `GAP` pixels between them.

    Attributes:
        content: the WebP file.
        number: number of thumbnails.
        width, height: of each.
    """

    content: bytes
    number: int
    width: int
    height: int


def thumbnail_task(path: str, kind: Kind, size: tuple[int, int], height: int) -> Thumbnails | None:
    """Return thumbnails of the first, middle and last frame of a file, or of an image, or None if there are none.

    Args:
        path: of the file.
        kind: of the file.
        size: displayed height and width of its frames, or zeros if its header has not been read.
        height: of the thumbnails.
    """
    if not all(size):
        header = probe(Path(path), kind=kind)
        size = header.height, header.width
    width = min(max(round(size[1] * height / size[0]), 1), 4 * height)
    images = [
        image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=2.0)
        for image in (_read_image(path) if kind == "image" else _key_images(path))
    ]
    if not images:
        return None
    strip = Image.new("RGB", ((width + GAP) * len(images) - GAP, height))
    for index, image in enumerate(images):
        strip.paste(image, (index * (width + GAP), 0))
    file = io.BytesIO()
    strip.save(file, "WEBP", quality=60, method=4)
    return Thumbnails(file.getvalue(), len(images), width, height)


def _read_image(path: str) -> Iterator[Image.Image]:
    with open_image(path) as image:
        image.draft("RGB", (512, 512))  # JPEGs are decoded at a half to an eighth of their size where that is enough
        yield ImageOps.exif_transpose(image).convert("RGB")


def _key_images(path: str) -> Iterator[Image.Image]:
    """Yield the first frame, and the key frames before middle and end, or the last frame if these are unreachable."""
    with open_container(Path(path)) as container:
        stream = video_stream(container)
        stream.thread_type = "NONE"
        first = next(decode_frames(container, stream), None)
        if first is None:
            return
        yield _upright(first)
        duration = stream.duration or 0
        if not duration and container.duration and stream.time_base:
            duration = round(container.duration / av.time_base / stream.time_base)
        begin = first.pts or 0
        for share in (0.5, 1.0):
            if duration:
                container.seek(begin + int(duration * share) - 1, stream=stream)
            target = begin + duration * share * 0.98
            latest = None
            for number, frame in enumerate(decode_frames(container, stream)):
                latest = frame
                if number >= _MAX_FOLLOWED or (frame.pts is not None and frame.pts >= target):
                    break
            if latest is not None:
                yield _upright(latest)


_MAX_FOLLOWED = 100  # frames decoded after a key frame, in search of the target


def _upright(frame: av.VideoFrame) -> Image.Image:
    return frame.to_image().rotate(round(frame.rotation / 90) * 90, expand=True)
