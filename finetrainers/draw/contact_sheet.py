"""Contact sheets: clips as rows of labeled frames, in one image that is readable at the width of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from finetrainers.utils.video import evenly_spaced

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
    page = _Page(widest=max(row.width for row in rows), labels=[strip.label for strip in strips])
    index = 0
    for heading, section_strips in sections:
        page.heading(heading)
        for strip in section_strips:
            page.row(strip.label, rows[index])
            index += 1
            if index == len(strips) or _columns(strips[index]) != _columns(strip):
                page.numbers(strip.numbers, distance=(rows[index - 1].width + _GUTTER) // len(strip.numbers))
    return page.sheet()


class _Page:
    """A sheet that grows downwards."""

    def __init__(self, *, widest: int, labels: Sequence[str]) -> None:
        """Args:
        widest: pixels of the widest row.
        labels: of all rows, which decide the width of their column.
        """
        size = max(_LETTERS, round(_LETTERS * (widest + 2 * _MARGIN) / _PAGE))
        self._sizes = {_INK: size, _PALE: round(0.8 * size)}
        self._fonts = {ink: ImageFont.load_default(size=height) for ink, height in self._sizes.items()}
        self._ruler = ImageDraw.Draw(Image.new("RGB", (1, 1)))
        label_width = max(self._length(label, _PALE) for label in labels)
        self._left = _MARGIN + (label_width + size if label_width else 0)
        self._width = self._left + widest + _MARGIN
        self._top = _MARGIN
        self._texts: list[tuple[str, int, int, tuple[int, int, int]]] = []
        self._rows: list[tuple[Image.Image, int]] = []

    def heading(self, text: str) -> None:
        """Add lines of text, the first one darker and larger."""
        if self._rows:
            self._top += self._sizes[_INK] // 2
        for index, line in enumerate(text.splitlines()):
            for part in self._wrap(line, _PALE if index else _INK):
                self._line(part, _MARGIN, _PALE if index else _INK)
        self._top += _GUTTER

    def row(self, label: str, row: Image.Image) -> None:
        """Add a row of frames with its label."""
        self._texts.append((label, _MARGIN, self._top + (row.height - self._sizes[_PALE]) // 2, _PALE))
        self._rows.append((row, self._top))
        self._top += row.height + _GUTTER

    def numbers(self, numbers: Sequence[int], *, distance: int) -> None:
        """Add the numbers of the frames above."""
        top = self._top
        for column, frame in enumerate(numbers):
            self._top = top
            self._line(f"frame {frame}" if column == 0 else str(frame), self._left + column * distance, _PALE)

    def sheet(self) -> Image.Image:
        """Return the finished image."""
        sheet = Image.new("RGB", (self._width, self._top + _MARGIN), _PAPER)
        draw = ImageDraw.Draw(sheet)
        for text, left, top, ink in self._texts:
            draw.text((left, top), text, fill=ink, font=self._fonts[ink])
        for row, top in self._rows:
            sheet.paste(row, (self._left, top))
        return sheet

    def _line(self, text: str, left: int, ink: tuple[int, int, int]) -> None:
        self._texts.append((text, left, self._top, ink))
        self._top += round(1.35 * self._sizes[ink])

    def _length(self, text: str, ink: tuple[int, int, int]) -> int:
        return round(self._ruler.textlength(text, self._fonts[ink]))

    def _wrap(self, text: str, ink: tuple[int, int, int]) -> list[str]:
        """Wrap text to the width; a word that is too long is not broken."""
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and self._length(longer, ink) > self._width - 2 * _MARGIN:
                lines.append(word)
            else:
                lines[-1] = longer
        return lines


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
