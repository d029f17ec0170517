"""Clips in a grid as one image: a column for each way to sample, and the compared rows below headings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from .sheet import Letters, Sheet

_MARGIN, _GAP, _STRIP_GAP = 24, 14, 3
_WIDEST, _LEAST, _MOST = 2000, 256, 640  # pixels of all cells of a row together, and of a cell
_PAPER, _LINE, _EMPTY = (251, 251, 250), (220, 223, 227), (233, 235, 238)
_HEADING, _COLUMN = Letters(24, (27, 31, 36)), Letters(22, (27, 31, 36))
_LABEL, _NOTE = Letters(18, (91, 100, 112)), Letters(18, (180, 35, 24))


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
    rows = [row for _, group_rows in groups for row in group_rows]
    label_width = max((_LABEL.length(row.label) for row in rows), default=0)
    left = _MARGIN + (label_width + _GAP if label_width else 0)
    column_text_width = max((_COLUMN.length(text) for text in columns), default=0)
    cell = max(_cell_width(rows, len(columns)), min(column_text_width + 2, _MOST))
    width = max(left + len(columns) * (cell + _GAP) - _GAP + _MARGIN, 900)
    sheet = Sheet(width, margin=_MARGIN, line_height=1.4)
    for index, text in enumerate(columns):
        sheet.write(text, left + index * (cell + _GAP), _COLUMN)
    if columns:
        sheet.advance(_COLUMN)
    rule = sheet.top
    sheet.top += 12
    for heading, group_rows in groups:
        for line_index, line in enumerate(heading.splitlines()):
            if line.strip():
                sheet.paragraph(line, _LABEL if line_index else _HEADING)
        sheet.top += 6
        for row in group_rows:
            _place_row(sheet, row, left, cell)
        sheet.top += 10
    sheet.top -= _GAP
    image = sheet.draw(_PAPER, outline=_LINE)
    ImageDraw.Draw(image).line((_MARGIN, rule, width - _MARGIN, rule), fill=_LINE, width=2)
    return image


def _cell_width(rows: Sequence[TileRow], count: int) -> int:
    """Return the width of the widest clip, enlarged by an integer factor if it is small."""
    widths = [tile.frames.shape[2] for row in rows for tile in row.tiles if tile.frames is not None]
    natural = max(widths, default=_LEAST)
    natural *= max(1, -(-_LEAST // natural))
    return max(64, min(natural, _MOST, (_WIDEST - (count - 1) * _GAP) // max(count, 1)))


def _place_row(sheet: Sheet, row: TileRow, left: int, cell: int) -> None:
    """Add the tiles of a row, and its label in the middle of their height."""
    images = [_tile_image(tile, cell) for tile in row.tiles]
    height = max(image.height for image in images)
    for index, (tile, image) in enumerate(zip(row.tiles, images, strict=True)):
        tile_left = left + index * (cell + _GAP)
        sheet.place(image, tile_left)
        if tile.frames is None and tile.note:
            sheet.write(tile.note, tile_left + 8, _NOTE, below=8)
    sheet.write(row.label, _MARGIN, _LABEL, below=height // 2 - _LABEL.size)
    sheet.top += height + _GAP


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
