"""Write generated clips as mp4 files, read them back, and turn them into GIFs."""

from __future__ import annotations

import io
import math
import re
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from .files import unfinished_path
from .reading import check_regular, read_bytes

#: Browsers show GIF frames of less than 20 ms more slowly than that.
_GIF_MS = 20


def write_mp4(path: Path, frames: np.ndarray, *, fps: float, comment: str = "", max_bytes: int | None = None) -> None:
    """Write frames `[T, H, W, 3]` uint8 as H.264, atomically; odd sizes lose their last row or column.

    Args:
        path: of the file.
        frames: of the clip.
        fps: frames per second.
        comment: description of the clip, as metadata of the file; see `read_comment`.
        max_bytes: size of the file; a larger one is encoded again with a limited rate.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A separate file for each process: those that share samples may write the same clip at the same time.
    unfinished = unfinished_path(path, f"tmp{path.suffix}")
    bits = 0 if max_bytes is None else 8 * max_bytes
    # The size is at most that of the buffer and what the rate fills in the duration of the clip.
    limited = {"maxrate": str(int(0.6 * bits * fps / frames.shape[0])), "bufsize": str(int(0.25 * bits))}
    try:
        _encode(unfinished, frames, fps=fps, comment=comment)
        if max_bytes is not None and unfinished.stat().st_size > max_bytes:
            _encode(unfinished, frames, fps=fps, comment=comment, **limited)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _encode(path: Path, frames: np.ndarray, *, fps: float, comment: str, **options: str) -> None:
    with av.open(str(path), "w") as container:
        container.metadata["comment"] = comment
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = height, width = [side // 2 * 2 for side in frames.shape[1:3]]
        stream.pix_fmt = "yuv420p"
        # With x264's macroblock tree, tiny frames were encoded differently from one time to the next.
        stream.options = {"crf": "18", "x264-params": "mbtree=0", **options}
        for image in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image[:height, :width]), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def read_mp4(path: Path, *, columns: int) -> tuple[np.ndarray, list[int]]:
    """Return evenly spaced frames `[N, H, W, 3]` uint8 of a file of `write_mp4`, and their indices."""
    check_regular(path)
    with av.open(str(path)) as container:
        indices = evenly_spaced(container.streams.video[0].frames, columns)
        frames = [
            frame.to_ndarray(format="rgb24")
            for index, frame in enumerate(container.decode(video=0))
            if index in indices
        ]
    return np.stack(frames), indices


def read_comment(path: Path) -> str:
    """Return the comment that `write_mp4` wrote; empty without one."""
    check_regular(path)
    with av.open(str(path)) as container:
        return container.metadata.get("comment", "")


def make_gif(path: Path, *, width: int) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes and size (width, height) of a video as an animated GIF of at most this width, at its speed."""
    check_regular(path)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        fps = float(stream.average_rate or 1)
        every = max(1, math.ceil(fps * _GIF_MS / 1000))  # for fast videos, every second frame or fewer
        size = stream.width, stream.height
        if size[0] > width:
            size = width, max(1, round(size[1] * width / size[0]))
        images = [
            frame.to_image().resize(size, Image.Resampling.LANCZOS)
            for index, frame in enumerate(container.decode(stream))
            if index % every == 0
        ]
    data = io.BytesIO()
    delay_ms = round(1000 * every / fps)
    images[0].save(data, "GIF", save_all=True, append_images=images[1:], duration=delay_ms, loop=0)
    return data.getvalue(), size


def web_video(path: Path, *, max_side: int = 512, max_bytes: int = 300_000) -> bytes:
    """Return a video file for a web page: unchanged if small, else encoded again with sides of at most `max_side`."""
    check_regular(path)
    if path.stat().st_size <= max_bytes:
        return read_bytes(path, limit=max_bytes)
    output = io.BytesIO()
    with av.open(str(path)) as source, av.open(output, "w", format="mp4") as container:
        source_stream = source.streams.video[0]
        factor = min(1.0, max_side / max(source_stream.width, source_stream.height))
        stream = container.add_stream("libx264", rate=source_stream.average_rate)
        stream.width, stream.height = (
            max(2, round(side * factor) // 2 * 2) for side in (source_stream.width, source_stream.height)
        )
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "24"}
        for index, frame in enumerate(source.decode(video=0)):
            resized = frame.reformat(width=stream.width, height=stream.height, format="yuv420p")
            resized.pts, resized.time_base = index, 1 / Fraction(source_stream.average_rate or 1)
            container.mux(stream.encode(resized))
        container.mux(stream.encode())
    return output.getvalue()


def slug(text: str, *, limit: int = 40) -> str:
    """Return a file-name-safe start of a text."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()[:limit].rstrip("-") or "empty"


def evenly_spaced(count: int, columns: int) -> list[int]:
    """Return at most `columns` integers below `count`, with both ends.

    Five or more have equal distances where that is possible.
    """
    for selected in range(min(columns, count), 4, -1):
        if (count - 1) % (selected - 1) == 0:
            return list(range(0, count, (count - 1) // (selected - 1)))
    return np.unique(np.linspace(0, count - 1, min(columns, count)).round().astype(int)).tolist()
