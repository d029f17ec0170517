"""Files of samples: a video and a contact sheet for each step, and a contact sheet of a sample over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from finetrainers.utils.video import evenly_spaced, read_comment, read_mp4, write_mp4

from .contact_sheet import Strip, contact_sheet

_COLUMNS = 8  # frames of a row
_ROWS = 8  # steps of a contact sheet, at most
SHEET_VIDEOS = 12  # videos of one step on a contact sheet, at most


def write_sample(samples: Path, name: str, clip: np.ndarray, *, step: int, fps: float, heading: str) -> Path:
    """Write `samples/step-N/NAME.mp4`, its contact sheet, and `samples/NAME.png`, which has all steps below each other.

    Args:
        samples: the run's directory of samples.
        name: of the files; the same at every step.
        clip: frames `[T, H, W, 3]` uint8.
        step: of the weights.
        fps: frames per second.
        heading: description of the sample, in one line or several.
    """
    video = samples / f"step-{step:06d}" / f"{name}.mp4"
    write_mp4(video, clip, fps=fps, comment=heading)
    strip = Strip.of(f"step {step}", clip, columns=_COLUMNS)
    contact_sheet([(heading, [strip])]).save(video.with_suffix(".png"))
    videos = sorted(samples.glob(f"step-*/{name}.mp4"))
    if len(videos) > 1:
        selected = [videos[index] for index in evenly_spaced(len(videos), _ROWS)]
        strips = [
            Strip(f"step {int(path.parent.name.removeprefix('step-'))}", *read_mp4(path, columns=_COLUMNS))
            for path in selected
        ]
        contact_sheet([(heading, strips)]).save(samples / f"{name}.png")
    return video


def video_sheet(videos: Sequence[Path]) -> Image.Image:
    """Return a sheet of videos that `write_mp4` wrote, each under its comment; if very many, evenly spaced ones."""
    selected = [videos[index] for index in evenly_spaced(len(videos), SHEET_VIDEOS)]
    return contact_sheet(
        [(read_comment(path) or path.stem, [Strip("", *read_mp4(path, columns=_COLUMNS))]) for path in selected]
    )
