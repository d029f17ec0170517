"""Grids of clips: where tiles are, in which size, and what stands for a clip that is missing."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np

from finetrainers.draw.grid_sheet import Tile, TileRow, grid_sheet
from finetrainers.utils.video import web_video, write_mp4


def clip(color: tuple[int, int, int], *, height: int = 32, width: int = 64) -> Tile:
    frames = np.zeros((5, height, width, 3), dtype=np.uint8)
    frames[:] = color
    frames[2, :, : width // 2] = 255 - frames[2, :, : width // 2]  # the middle one, which is shown large
    return Tile(frames)


def test_tiles_are_in_their_columns() -> None:
    red, blue = clip((200, 0, 0)), clip((0, 0, 200))
    rows = [TileRow("seed 0", [red, blue]), TileRow("seed 1", [blue, Tile(None, "failed")])]
    sheet = np.asarray(grid_sheet(["base", "scale 1"], [("a prompt\nits size", rows)]))
    where = [np.argwhere((sheet == color).all(-1)) for color in ((200, 0, 0), (0, 0, 200), (55, 255, 255))]
    assert where[0][:, 1].max() < where[1][where[1][:, 0] < where[0][:, 0].max()][:, 1].min()  # red is left of blue
    assert where[0][:, 1].min() == where[1][:, 1].min()  # of the second row
    inverted = where[2]
    assert inverted[:, 1].max() - inverted[:, 1].min() + 1 == 128  # half of 64 pixels, enlarged four times
    assert sheet.shape[1] == 900
    assert (sheet == (233, 235, 238)).all(-1).sum() > 10_000  # the empty tile


def test_many_columns_stay_readable_and_upright_clips_fit() -> None:
    upright = clip((10, 200, 10), height=96, width=48)
    sheet = grid_sheet([f"step {k}" for k in range(8)], [("word " * 200, [TileRow("", [upright] * 8)])])
    assert 1800 < sheet.width < 2400
    assert sheet.height < 1200


def test_a_large_video_is_made_smaller_for_a_page(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (6, 96, 160, 3), dtype=np.uint8)
    write_mp4(tmp_path / "a.mp4", noise, fps=12)
    path = tmp_path / "a.mp4"
    assert web_video(path) == path.read_bytes()
    small = web_video(path, max_side=80, max_bytes=1000)
    assert len(small) < path.stat().st_size
    with av.open(io.BytesIO(small)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        assert (stream.width, stream.height, len(frames), stream.average_rate) == (80, 48, 6, 12)
