"""Files of samples: a video and a contact sheet for each step, and a contact sheet of the same sample over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from finetrainers.draw.contact_sheet import Strip, contact_sheet
from finetrainers.utils.video import comment_of, evenly_spaced, read_mp4, write_mp4

_COLUMNS = 8  # frames of a row
_ROWS = 8  # steps that are shown together, at most
SHEET_VIDEOS = 12  # of one step that are shown together, at most


def write_sample(samples: Path, name: str, clip: np.ndarray, *, step: int, fps: float, heading: str) -> Path:
    """Write `samples/step-N/NAME.mp4` and its contact sheet, and `samples/NAME.png`, on which all steps lie below each other.

    Args:
        samples: the run's folder of samples.
        name: of the files; the same at every step.
        clip: frames `[T, H, W, 3]` uint8.
        step: of the weights.
        fps: frames per second.
        heading: what the sample is of, in one line or several.
    """
    video = samples / f"step-{step:06d}" / f"{name}.mp4"
    write_mp4(video, clip, fps=fps, comment=heading)
    strip = Strip.of(f"step {step}", clip, columns=_COLUMNS)
    contact_sheet([(heading, [strip])]).save(video.with_suffix(".png"))
    videos = sorted(samples.glob(f"step-*/{name}.mp4"))
    if len(videos) > 1:
        shown = [videos[place] for place in evenly_spaced(len(videos), _ROWS)]
        strips = [
            Strip(f"step {int(path.parent.name.removeprefix('step-'))}", *read_mp4(path, columns=_COLUMNS))
            for path in shown
        ]
        contact_sheet([(heading, strips)]).save(samples / f"{name}.png")
    return video


def sheet_of(videos: Sequence[Path]) -> Image.Image:
    """Videos that `write_mp4` wrote below each other, each under its comment; the first and the last of very many."""
    shown = [videos[place] for place in evenly_spaced(len(videos), SHEET_VIDEOS)]
    return contact_sheet(
        [(comment_of(path) or path.stem, [Strip("", *read_mp4(path, columns=_COLUMNS))]) for path in shown]
    )
