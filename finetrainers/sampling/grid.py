"""Samples side by side: a contact sheet, and an HTML fragment with the videos."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup
from PIL import Image

from finetrainers.draw.grid_sheet import Tile, TileRow, grid_sheet
from finetrainers.draw.page import render_page
from finetrainers.utils.text import shortened
from finetrainers.utils.video import read_mp4, web_video

_STRIP = 5  # frames of a clip on the contact sheet
_TEMPLATES = Path(__file__).parent


@dataclass(frozen=True)
class Cell:
    """A clip, or the reason why there is none.

    Attributes:
        video: its file, or None without a clip.
        facts: shown when it is enlarged, by name.
        problem: reason why there is no video; empty if none was requested.
        caption: text below it.
    """

    video: Path | None
    facts: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Row:
    """Clips that are compared, a cell for each column; the label may be empty."""

    label: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Group:
    """Rows under a heading, such as a prompt; `note` is set smaller below it."""

    heading: str
    rows: Sequence[Row]
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """Groups of rows with the same columns.

    Attributes:
        columns: their headings.
        groups: of rows.
        missing: text in place of a missing clip.
        widest: initial maximum width of a clip, in pixels.
        open: number of groups that are initially unfolded.
    """

    columns: Sequence[str]
    groups: Sequence[Group]
    missing: str = "not sampled"
    widest: int = 420
    open: int = 1000

    @property
    def cells(self) -> list[Cell]:
        """All cells, by group and row."""
        return [cell for group in self.groups for row in group.rows for cell in row.cells]


def sheet(grid: Grid) -> Image.Image:
    """Return the contact sheet of a grid: the middle frame of each clip, over a strip of its frames."""
    groups = [
        (
            f"{shortened(' '.join(group.heading.split()), 400)}\n{group.note}",
            [TileRow(row.label, [_tile(cell) for cell in row.cells]) for row in group.rows],
        )
        for group in grid.groups
    ]
    return grid_sheet(grid.columns, groups)


def _tile(cell: Cell) -> Tile:
    if cell.video is None:
        return Tile(None, "failed" if cell.problem else "not sampled")
    return Tile(read_mp4(cell.video, columns=_STRIP)[0])


def grid_html(grid: Grid) -> Markup:
    """Return an HTML fragment: the grid with its videos and their player. The page has to include `head.html`."""
    return Markup(render_page(_TEMPLATES / "grid.html", filters={"data_url": _data_url}, grid=grid))


def page(
    grid: Grid, *, title: str, facts: Sequence[tuple[str, str]], problems: Sequence[str] = (),
    table: Sequence[Sequence[str]] = (),
) -> str:  # fmt: skip
    """Return a page that needs no other file and no network.

    Args:
        grid: the clips.
        title: of the page.
        facts: of all clips, by name.
        problems: of clips.
        table: numbers below the grid; its first row and its first column are headings.
    """
    return render_page(
        _TEMPLATES / "page.html",
        grid=grid_html(grid),
        title=title,
        facts=facts,
        problems=problems,
        count=len(grid.cells),
        table=table,
    )


def _data_url(video: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(web_video(video)).decode("ascii")
