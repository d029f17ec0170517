"""Clips in a grid as one image: a column for each way to sample, and the compared rows below headings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_MARGIN, _GAP, _STRIP_GAP = 24, 14, 3
_WIDEST, _LEAST, _MOST = 2000, 256, 640  # pixels of all cells of a row together, and of a cell
_FONTS = {"heading": 24, "column": 22, "label": 18}
_INK, _PALE, _PAPER, _LINE, _EMPTY = (27, 31, 36), (91, 100, 112), (251, 251, 250), (220, 223, 227), (233, 235, 238)
_BAD = (180, 35, 24)


@dataclass(frozen=True)
class Tile:
    """One clip of a grid.

    Attributes:
        frames: some of its frames, `[N, H, W, 3]` uint8, the middle one enlarged, or None without a clip.
        note: text in place of a missing clip.
    """

    frames: np.ndarray | None
    note: str = ""


@dataclass(frozen=True)
class TileRow:
    """Tiles side by side, one for each column; the label may be empty."""

    label: str
    tiles: Sequence[Tile]


def grid_sheet(columns: Sequence[str], groups: Sequence[tuple[str, Sequence[TileRow]]]) -> Image.Image:
    """Draw groups of rows below each other, each group with its heading over it.

    Args:
        columns: their headings.
        groups: a heading, whose further lines are paler, and rows.
    """
    fonts = {name: ImageFont.load_default(size=size) for name, size in _FONTS.items()}
    rows = [row for _, group_rows in groups for row in group_rows]
    ruler = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    label_width = max((round(ruler.textlength(row.label, fonts["label"])) for row in rows), default=0)
    left = _MARGIN + (label_width + _GAP if label_width else 0)
    cell = _cell_width(rows, len(columns))
    column_text_width = max((ruler.textlength(text, fonts["column"]) for text in columns), default=0)
    cell = max(cell, min(round(column_text_width) + 2, _MOST))
    width = left + len(columns) * (cell + _GAP) - _GAP + _MARGIN
    width = max(width, 900)
    page = _Page(width, fonts)
    for index, text in enumerate(columns):
        page.text(text, left + index * (cell + _GAP), "column", _INK, advance=index == len(columns) - 1)
    page.rule()
    for heading, group_rows in groups:
        for line_index, line in enumerate(heading.splitlines()):
            page.wrapped(line, "label" if line_index else "heading", _PALE if line_index else _INK)
        page.space(6)
        for row in group_rows:
            page.row(row, left, cell)
        page.space(10)
    return page.image()


def _cell_width(rows: Sequence[TileRow], count: int) -> int:
    """Return the width of the widest clip, enlarged by an integer factor if it is small."""
    widths = [tile.frames.shape[2] for row in rows for tile in row.tiles if tile.frames is not None]
    natural = max(widths, default=_LEAST)
    natural *= max(1, -(-_LEAST // natural))
    return max(64, min(natural, _MOST, (_WIDEST - (count - 1) * _GAP) // max(count, 1)))


class _Page:
    """An image that grows downwards: its content is buffered until its height is known."""

    def __init__(self, width: int, fonts: dict[str, ImageFont.ImageFont | ImageFont.FreeTypeFont]) -> None:
        self.width, self._fonts = width, fonts
        self._top = _MARGIN
        self._ruler = ImageDraw.Draw(Image.new("RGB", (1, 1)))
        self._texts: list[tuple[str, int, int, str, tuple[int, int, int]]] = []
        self._images: list[tuple[Image.Image, int, int]] = []
        self._rules: list[int] = []

    def text(self, text: str, left: int, font: str, ink: tuple[int, int, int], *, advance: bool = True) -> None:
        """Add a line of text; the next one is below it if `advance`."""
        self._texts.append((text, left, self._top, font, ink))
        self._top += round(1.4 * _FONTS[font]) if advance else 0

    def wrapped(self, text: str, font: str, ink: tuple[int, int, int]) -> None:
        """Add text in as many lines as it needs."""
        line = ""
        for word in text.split():
            longer = f"{line} {word}".strip()
            if line and self._ruler.textlength(longer, self._fonts[font]) > self.width - 2 * _MARGIN:
                self.text(line, _MARGIN, font, ink)
                longer = word
            line = longer
        if line:
            self.text(line, _MARGIN, font, ink)

    def space(self, pixels: int) -> None:
        self._top += pixels

    def rule(self) -> None:
        self._rules.append(self._top)
        self._top += 12

    def row(self, row: TileRow, left: int, cell: int) -> None:
        """Add the tiles of a row, and its label in the middle of their height."""
        images = [_tile_image(tile, cell) for tile in row.tiles]
        height = max(image.height for image in images)
        for index, image in enumerate(images):
            self._images.append((image, left + index * (cell + _GAP), self._top))
        for index, tile in enumerate(row.tiles):
            if tile.frames is None and tile.note:
                note_left = left + index * (cell + _GAP) + 8
                self._texts.append((tile.note, note_left, self._top + 8, "label", _BAD))
        self._texts.append((row.label, _MARGIN, self._top + height // 2 - _FONTS["label"], "label", _PALE))
        self._top += height + _GAP

    def image(self) -> Image.Image:
        sheet = Image.new("RGB", (self.width, self._top + _MARGIN - _GAP), _PAPER)
        draw = ImageDraw.Draw(sheet)
        for top in self._rules:
            draw.line((_MARGIN, top, self.width - _MARGIN, top), fill=_LINE, width=2)
        for image, left, top in self._images:
            sheet.paste(image, (left, top))
            draw.rectangle((left - 1, top - 1, left + image.width, top + image.height), outline=_LINE)
        for text, left, top, font, ink in self._texts:
            draw.text((left, top), text, fill=ink, font=self._fonts[font])
        return sheet


def _tile_image(tile: Tile, width: int) -> Image.Image:
    """Return the middle frame, as wide as a cell, over a strip of all frames."""
    if tile.frames is None:
        return Image.new("RGB", (width, round(width * 0.4)), _EMPTY)
    count, height, clip_width, _ = tile.frames.shape
    main = (width, max(1, round(height * width / clip_width)))
    if main[1] > 1.25 * width:  # upright clips
        main = (max(1, round(1.25 * width * clip_width / height)), round(1.25 * width))
    if count == 1:
        return _resize(tile.frames[0], main)
    small_width = (main[0] - (count - 1) * _STRIP_GAP) // count
    small = (max(1, small_width), max(1, round(height * small_width / clip_width)))
    image = Image.new("RGB", (main[0], main[1] + _STRIP_GAP + small[1]), _PAPER)
    image.paste(_resize(tile.frames[count // 2], main), (0, 0))
    for index, frame in enumerate(tile.frames):
        image.paste(_resize(frame, small), (round(index * (main[0] - small[0]) / (count - 1)), main[1] + _STRIP_GAP))
    return image


def _resize(frame: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Return a frame resized to a size in pixels; small clips keep their square pixels."""
    resampling = Image.Resampling.NEAREST if size[0] >= 3 * frame.shape[1] else Image.Resampling.LANCZOS
    return Image.fromarray(frame).resize(size, resampling)
