"""Writing what a model generated: mp4 files and PNG contact sheets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw


def write_mp4(path: Path, frames: np.ndarray, *, fps: float) -> None:
    """Write frames `[T, H, W, 3]` uint8 as H.264, whole or not at all; odd sizes lose their last row or column."""
    height, width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    with av.open(str(unfinished), "w") as container:
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


def contact_sheet(rows: Sequence[tuple[str, np.ndarray]], *, columns: int = 8, min_height: int = 96) -> Image.Image:
    """One labelled row of evenly spaced frames per video.

    Args:
        rows: label and frames `[T, H, W, 3]` uint8; sizes may differ.
        columns: frames shown per row, at most.
        min_height: rows are enlarged by whole factors to at least this many pixels.
    """
    strips = []
    for label, frames in rows:
        picks = np.unique(np.linspace(0, len(frames) - 1, min(columns, len(frames))).round().astype(int))
        strip = np.concatenate([frames[i] for i in picks], axis=1)
        factor = max(1, -(-min_height // strip.shape[0]))
        image = Image.fromarray(strip).resize(
            (strip.shape[1] * factor, strip.shape[0] * factor), Image.Resampling.NEAREST
        )
        strips.append((label, image))
    margin = 16
    sheet = Image.new(
        "RGB", (max(s.width for _, s in strips), sum(s.height + margin for _, s in strips)), (255, 255, 255)
    )
    draw, top = ImageDraw.Draw(sheet), 0
    for label, image in strips:
        draw.text((4, top + 2), label, fill=(0, 0, 0))
        sheet.paste(image, (0, top + margin))
        top += image.height + margin
    return sheet


def slug(text: str, *, limit: int = 40) -> str:
    """A file-name-safe start of a text."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()[:limit].rstrip("-") or "empty"
