"""What happens in a process that decodes a whole file, or makes small pictures of it; see `full_decode`."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageOps

from .fates import Refusal
from .manifest import Kind
from .media import IMAGE_ERRORS, open_container, open_image

#: Memory that a file's decoding may ask for, beyond what the process has when it starts.
MEMORY_BYTES = 4 << 30

_BLACK = 24  # of 255: limited range has its black at 16
_STILL = 1.5  # grey levels, on average, between the first frame and any other: what encoding alone may change
_STEP = 8  # pixels looked at: every eighth of every eighth row


def serve(pipe: Connection, function: Callable[..., Any]) -> None:
    """Answer calls until the other end is closed. The parent ends this process: Ctrl-C is its business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _bound_memory()
    pipe.send("up")
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(function(*arguments))


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS
        used = MEMORY_BYTES
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def decode_task(path: str, kind: Kind, declared: int) -> Refusal | tuple[str, ...]:
    """Decode a file from end to end: why it cannot be used, or what is remarkable (`black`, `still`)."""
    try:
        return _decode_image(path) if kind == "image" else _decode_video(path, declared)
    except MemoryError:
        return Refusal("decoder_failed", f"decoding takes more than {MEMORY_BYTES >> 30} GiB")


def _decode_image(path: str) -> Refusal | tuple[str, ...]:
    try:
        with open_image(path) as image:
            grey = np.asarray(image.convert("L"))[::_STEP, ::_STEP]
    except IMAGE_ERRORS as error:
        return Refusal("damaged", f"the image cannot be decoded: {error}")
    return ("black",) if grey.mean() < _BLACK else ()


def _decode_video(path: str, declared: int) -> Refusal | tuple[str, ...]:
    count = broken = 0
    first: np.ndarray | None = None
    black, still = True, True
    try:
        with open_container(Path(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "NONE"  # as many processes as processors run at once
            for frame in container.decode(stream):
                count += 1
                broken += frame.is_corrupt
                grey = _grey(frame) if black or still else None
                if grey is None:
                    black = still = False
                    continue
                first = grey if first is None else first
                black = black and float(grey.mean()) < _BLACK
                still = still and grey.shape == first.shape and float(np.abs(grey - first).mean()) < _STILL
    except av.FFmpegError as error:
        if "memory" in str(error.strerror).lower():
            raise MemoryError from error
        what = error.strerror or error
        return Refusal("damaged", f"decoding fails after frame {count} of {declared}: {what}")
    except OSError as error:
        return Refusal("unreadable", f"cannot be read: {error.strerror or error}")
    if broken:
        return Refusal("damaged", f"{broken} of {count} frames are broken")
    if count < declared:
        return Refusal("cut_off", f"cut off: it declares {declared} frames, and {count} can be decoded")
    return tuple(name for name, holds in (("black", black), ("still", still and not black and count > 1)) if holds)


def _grey(frame: av.VideoFrame) -> np.ndarray | None:
    """Some pixels of a frame's brightness plane; None where pixels are laid out in another way than the usual."""
    if not frame.format.name.startswith(("yuv4", "yuvj4", "nv12", "gray8")) or "le" in frame.format.name[-4:]:
        return None
    plane = frame.planes[0]
    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
    return rows[: frame.height : _STEP, : frame.width : _STEP].astype(np.float32)


def thumbnail_task(path: str, kind: Kind, height: int) -> bytes | None:
    """First, middle and last picture of a file side by side, as WebP; one of an image; None where there is none."""
    try:
        pictures = [_small(p, height) for p in (_picture(path) if kind == "image" else _pictures(path))]
    except (av.FFmpegError, MemoryError, *IMAGE_ERRORS):
        return None
    if not pictures:
        return None
    strip = Image.new("RGB", (sum(p.width for p in pictures) + 2 * (len(pictures) - 1), height))
    left = 0
    for picture in pictures:
        strip.paste(picture, (left, 0))
        left += picture.width + 2
    file = io.BytesIO()
    strip.save(file, "WEBP", quality=60, method=4)
    return file.getvalue()


def _picture(path: str) -> Iterator[Image.Image]:
    with open_image(path) as image:
        image.draft("RGB", (256, 256))  # JPEGs are decoded at an eighth of their size where that is enough
        yield ImageOps.exif_transpose(image).convert("RGB")


def _pictures(path: str) -> Iterator[Image.Image]:
    """The first frame, and the key frames before the middle and the end where they can be reached, else the last."""
    with open_container(Path(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        first = next(container.decode(stream), None)
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
            wanted = begin + duration * share * 0.98
            shown = None
            for number, frame in enumerate(container.decode(stream)):
                shown = frame
                if number >= _FOLLOWED or (frame.pts is not None and frame.pts >= wanted):
                    break
            if shown is not None:
                yield _upright(shown)


_FOLLOWED = 100  # frames decoded after a key frame, in search of the wanted one


def _upright(frame: av.VideoFrame) -> Image.Image:
    return frame.to_image().rotate(round(frame.rotation / 90) * 90, expand=True)


def _small(picture: Image.Image, height: int) -> Image.Image:
    width = min(max(round(picture.width * height / picture.height), 1), 4 * height)
    return picture.resize((width, height), Image.Resampling.BILINEAR)
