"""Write generated clips as mp4 files, read them back, and turn them into GIFs."""

from __future__ import annotations

import io
import math
import os
import re
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

#: A browser shows GIF frames of less than 20 ms more slowly than they say.
_GIF_MS = 20


def write_mp4(path: Path, frames: np.ndarray, *, fps: float, comment: str = "") -> None:
    """Write frames `[T, H, W, 3]` uint8 as H.264, atomically; odd sizes lose their last row or column.

    Args:
        path: of the file.
        frames: of the clip.
        fps: frames per second.
        comment: what the clip is, as metadata of the file; see `comment_of`.
    """
    height, width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of its own for each process: those that share samples may write the same clip at the same time.
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.unfinished{path.suffix}")
    try:
        with av.open(str(unfinished), "w") as container:
            container.metadata["comment"] = comment
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
            stream.width, stream.height = width, height
            stream.pix_fmt = "yuv420p"
            # With x264's macroblock tree, tiny frames were encoded differently from one time to the next.
            stream.options = {"crf": "18", "x264-params": "mbtree=0"}
            for image in frames:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image[:height, :width]), format="rgb24")
                for packet in stream.encode(frame):
                    container.mux(packet)
            for packet in stream.encode():
                container.mux(packet)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_mp4(path: Path, *, columns: int) -> tuple[np.ndarray, list[int]]:
    """Evenly spaced frames `[N, H, W, 3]` uint8 of what `write_mp4` wrote, and which ones they are."""
    with av.open(str(path)) as container:
        numbers = evenly_spaced(container.streams.video[0].frames, columns)
        frames = [
            frame.to_ndarray(format="rgb24")
            for number, frame in enumerate(container.decode(video=0))
            if number in numbers
        ]
    return np.stack(frames), numbers


def comment_of(path: Path) -> str:
    """The comment that `write_mp4` wrote; empty where there is none."""
    with av.open(str(path)) as container:
        return container.metadata.get("comment", "")


def gif_of(path: Path, *, width: int) -> tuple[bytes, tuple[int, int]]:
    """A video as an animated GIF of at most this width, at its own speed; its bytes, and its width and height."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        fps = float(stream.average_rate or 1)
        every = max(1, math.ceil(fps * _GIF_MS / 1000))  # of fast videos every second frame, or fewer
        size = stream.width, stream.height
        if size[0] > width:
            size = width, max(1, round(size[1] * width / size[0]))
        pictures = [
            frame.to_image().resize(size, Image.Resampling.LANCZOS)
            for number, frame in enumerate(container.decode(stream))
            if number % every == 0
        ]
    data = io.BytesIO()
    delay_ms = round(1000 * every / fps)
    pictures[0].save(data, "GIF", save_all=True, append_images=pictures[1:], duration=delay_ms, loop=0)
    return data.getvalue(), size


def web_video(path: Path, *, max_side: int = 512, max_bytes: int = 300_000) -> bytes:
    """A video file for a web page: as it is if it is small, else encoded again in at most so many pixels a side."""
    if path.stat().st_size <= max_bytes:
        return path.read_bytes()
    made = io.BytesIO()
    with av.open(str(path)) as source, av.open(made, "w", format="mp4") as container:
        given = source.streams.video[0]
        factor = min(1.0, max_side / max(given.width, given.height))
        stream = container.add_stream("libx264", rate=given.average_rate)
        stream.width, stream.height = (max(2, round(side * factor) // 2 * 2) for side in (given.width, given.height))
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "24"}
        for number, frame in enumerate(source.decode(video=0)):
            picture = frame.reformat(width=stream.width, height=stream.height, format="yuv420p")
            picture.pts, picture.time_base = number, 1 / Fraction(given.average_rate or 1)
            for packet in stream.encode(picture):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return made.getvalue()


def slug(text: str, *, limit: int = 40) -> str:
    """A file-name-safe start of a text."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()[:limit].rstrip("-") or "empty"


def evenly_spaced(count: int, columns: int) -> list[int]:
    """Return at most `columns` of the integers below `count`, with both ends; at equal distances if five or more have them."""
    for some in range(min(columns, count), 4, -1):
        if (count - 1) % (some - 1) == 0:
            return list(range(0, count, (count - 1) // (some - 1)))
    return np.unique(np.linspace(0, count - 1, min(columns, count)).round().astype(int)).tolist()
