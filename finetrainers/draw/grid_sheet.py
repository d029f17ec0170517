"""Clips in a grid as one picture: a column for each way to sample, below headings the rows that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_MARGIN, _GAP, _STRIP_GAP = 24, 14, 3
_WIDEST, _LEAST, _MOST = 2000, 256, 640  # of all cells of a row together, and of a cell
_FONTS = {"heading": 24, "column": 22, "label": 18}
_INK, _PALE, _PAPER, _LINE, _EMPTY = (27, 31, 36), (91, 100, 112), (251, 251, 250), (220, 223, 227), (233, 235, 238)
_BAD = (180, 35, 24)


@dataclass(frozen=True)
class Tile:
    """One clip of a grid.

    Attributes:
        frames: some of it, `[N, H, W, 3]` uint8, the middle one is shown large; None: there is no clip.
        note: what is shown instead.
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
    rows = [row for _, some in groups for row in some]
    ruler = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    beside = max((round(ruler.textlength(row.label, fonts["label"])) for row in rows), default=0)
    left = _MARGIN + (beside + _GAP if beside else 0)
    cell = _cell_width(rows, len(columns))
    wanted = max((ruler.textlength(text, fonts["column"]) for text in columns), default=0)
    cell = max(cell, min(round(wanted) + 2, _MOST))
    width = left + len(columns) * (cell + _GAP) - _GAP + _MARGIN
    width = max(width, 900)
    page = _Page(width, fonts)
    for place, text in enumerate(columns):
        page.text(text, left + place * (cell + _GAP), "column", _INK, advance=place == len(columns) - 1)
    page.rule()
    for heading, some in groups:
        for number, line in enumerate(heading.splitlines()):
            page.wrapped(line, "label" if number else "heading", _PALE if number else _INK)
        page.space(6)
        for row in some:
            page.row(row, left, cell)
        page.space(10)
    return page.picture()


def _cell_width(rows: Sequence[TileRow], count: int) -> int:
    """Of the widest clip, enlarged by an integer factor if it is small."""
    widths = [tile.frames.shape[2] for row in rows for tile in row.tiles if tile.frames is not None]
    natural = max(widths, default=_LEAST)
    natural *= max(1, -(-_LEAST // natural))
    return max(64, min(natural, _MOST, (_WIDEST - (count - 1) * _GAP) // max(count, 1)))


class _Page:
    """A picture that grows downwards: what is drawn is kept until its height is known."""

    def __init__(self, width: int, fonts: dict[str, ImageFont.ImageFont | ImageFont.FreeTypeFont]) -> None:
        self.width, self._fonts = width, fonts
        self._top = _MARGIN
        self._ruler = ImageDraw.Draw(Image.new("RGB", (1, 1)))
        self._texts: list[tuple[str, int, int, str, tuple[int, int, int]]] = []
        self._pictures: list[tuple[Image.Image, int, int]] = []
        self._rules: list[int] = []

    def text(self, text: str, left: int, font: str, ink: tuple[int, int, int], *, advance: bool = True) -> None:
        """A line of text; the next one is below it if `advance`."""
        self._texts.append((text, left, self._top, font, ink))
        self._top += round(1.4 * _FONTS[font]) if advance else 0

    def wrapped(self, text: str, font: str, ink: tuple[int, int, int]) -> None:
        """Text in as many lines as it needs."""
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
        """The tiles of a row, and its label in the middle of their height."""
        pictures = [_picture(tile, cell) for tile in row.tiles]
        height = max(picture.height for picture in pictures)
        for place, picture in enumerate(pictures):
            self._pictures.append((picture, left + place * (cell + _GAP), self._top))
        for place, tile in enumerate(row.tiles):
            if tile.frames is None and tile.note:
                where = left + place * (cell + _GAP) + 8
                self._texts.append((tile.note, where, self._top + 8, "label", _BAD))
        self._texts.append((row.label, _MARGIN, self._top + height // 2 - _FONTS["label"], "label", _PALE))
        self._top += height + _GAP

    def picture(self) -> Image.Image:
        sheet = Image.new("RGB", (self.width, self._top + _MARGIN - _GAP), _PAPER)
        draw = ImageDraw.Draw(sheet)
        for top in self._rules:
            draw.line((_MARGIN, top, self.width - _MARGIN, top), fill=_LINE, width=2)
        for picture, left, top in self._pictures:
            sheet.paste(picture, (left, top))
            draw.rectangle((left - 1, top - 1, left + picture.width, top + picture.height), outline=_LINE)
        for text, left, top, font, ink in self._texts:
            draw.text((left, top), text, fill=ink, font=self._fonts[font])
        return sheet


def _picture(tile: Tile, width: int) -> Image.Image:
    """The middle frame, as wide as a cell, over a strip of all frames."""
    if tile.frames is None:
        return Image.new("RGB", (width, round(width * 0.4)), _EMPTY)
    count, height, clip_width, _ = tile.frames.shape
    main = (width, max(1, round(height * width / clip_width)))
    if main[1] > 1.25 * width:  # upright clips
        main = (max(1, round(1.25 * width * clip_width / height)), round(1.25 * width))
    if count == 1:
        return _scaled(tile.frames[0], main)
    small_width = (main[0] - (count - 1) * _STRIP_GAP) // count
    small = (max(1, small_width), max(1, round(height * small_width / clip_width)))
    made = Image.new("RGB", (main[0], main[1] + _STRIP_GAP + small[1]), _PAPER)
    made.paste(_scaled(tile.frames[count // 2], main), (0, 0))
    for place, frame in enumerate(tile.frames):
        made.paste(_scaled(frame, small), (round(place * (main[0] - small[0]) / (count - 1)), main[1] + _STRIP_GAP))
    return made


def _scaled(frame: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """A frame in a size in pixels: small clips keep their square pixels."""
    way = Image.Resampling.NEAREST if size[0] >= 3 * frame.shape[1] else Image.Resampling.LANCZOS
    return Image.fromarray(frame).resize(size, way)
