"""Contact sheets: clips as rows of labeled frames, in one image that is readable at the width of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from finetrainers.utils.video import evenly_spaced

from .sheet import Letters, Sheet

_GUTTER = 4  # between frames
_MARGIN = 12
_MIN_HEIGHT, _MAX_WIDTH = 96, 2000  # of a frame, and of all frames of a row together
_PAGE, _LETTERS = 860, 15  # width of a page, and height of its letters
_INK, _PALE, _PAPER = (20, 20, 20), (80, 80, 80), (214, 214, 214)


@dataclass(frozen=True)
class Strip:
    """Frames of a clip, with their numbers.

    Attributes:
        label: distinguishes the clip within its section.
        frames: `[N, H, W, 3]` uint8.
        numbers: indices of these frames in the clip.
    """

    label: str
    frames: np.ndarray
    numbers: Sequence[int]

    @classmethod
    def of(cls, label: str, clip: np.ndarray, *, columns: int = 8) -> Strip:
        """Make a strip of evenly spaced frames of a clip `[T, H, W, 3]`, including the first and the last."""
        numbers = evenly_spaced(len(clip), columns)
        return cls(label, clip[numbers], numbers)


def contact_sheet(sections: Sequence[tuple[str, Sequence[Strip]]]) -> Image.Image:
    """Draw sections below each other, each a heading over its strips.

    Frame numbers are under the last strip that has them.

    Args:
        sections: a heading (its further lines are paler), and clips to be compared with each other.
    """
    strips = [strip for _, strips in sections for strip in strips]
    rows = [_row(strip) for strip in strips]
    widest = max(row.width for row in rows)
    size = max(_LETTERS, round(_LETTERS * (widest + 2 * _MARGIN) / _PAGE))
    dark, pale = Letters(size, _INK), Letters(round(0.8 * size), _PALE)
    label_width = max(pale.length(strip.label) for strip in strips)
    left = _MARGIN + (label_width + size if label_width else 0)
    sheet = Sheet(left + widest + _MARGIN, margin=_MARGIN, line_height=1.35)
    index = 0
    for heading, section_strips in sections:
        if index:
            sheet.top += size // 2
        for line_index, line in enumerate(heading.splitlines()):
            sheet.paragraph(line, pale if line_index else dark)
        sheet.top += _GUTTER
        for strip in section_strips:
            row = rows[index]
            sheet.write(strip.label, _MARGIN, pale, below=(row.height - pale.size) // 2)
            sheet.place(row, left)
            sheet.top += row.height + _GUTTER
            index += 1
            if index == len(strips) or _columns(strips[index]) != _columns(strip):
                distance = (row.width + _GUTTER) // len(strip.numbers)
                for column, frame in enumerate(strip.numbers):
                    sheet.write(str(frame) if column else f"frame {frame}", left + column * distance, pale)
                sheet.advance(pale)
    return sheet.draw(_PAPER)


def _columns(strip: Strip) -> tuple[object, ...]:
    """Return the key of a strip's frame numbers and columns; strips with equal keys share one line of numbers."""
    return strip.frames.shape, tuple(strip.numbers)


def _row(strip: Strip) -> Image.Image:
    """Return frames side by side: small ones enlarged by integer factors, large ones reduced."""
    count, height, width, _ = strip.frames.shape
    factor = max(1.0, -(-_MIN_HEIGHT // height))
    max_frame_width = (_MAX_WIDTH - (count - 1) * _GUTTER) / count
    factor = min(factor, max_frame_width / width)
    resampling = Image.Resampling.NEAREST if factor >= 1 and factor == int(factor) else Image.Resampling.LANCZOS
    size = max(1, round(width * factor)), max(1, round(height * factor))
    row = Image.new("RGB", (count * (size[0] + _GUTTER) - _GUTTER, size[1]), _PAPER)
    for column, frame in enumerate(strip.frames):
        row.paste(Image.fromarray(frame).resize(size, resampling), (column * (size[0] + _GUTTER), 0))
    return row
