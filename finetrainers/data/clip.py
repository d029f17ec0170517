"""What is cut from one media file and trained on. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .buckets import Bucket
from .frames import Selection
from .manifest import Kind

ReshapeMode = Literal["center", "random", "none"]


@dataclass(frozen=True, slots=True)
class Clip:
    """An item that will be trained on, and what is cut from it.

    Attributes:
        index: place in the data set, from which the clip's random numbers are derived.
        path: the media file.
        caption: cleaned caption.
        kind: video or image.
        bucket: `(frames, height, width)` it is cut to.
        fps: frame rate of the cut clip.
        num_frames: frames of the source.
        source_fps: frame rate of the source; 0 for images.
        width: displayed width of the source, in pixels.
        height: displayed height of the source, in pixels.
        reshape_mode: how it meets its bucket: `center` or `random` crop, or `none` (plain resize).
        frame_selection: which of its frames; see `select_frames`.
    """

    index: int
    path: Path
    caption: str
    kind: Kind
    bucket: Bucket
    fps: float
    num_frames: int
    source_fps: float
    width: int
    height: int
    reshape_mode: ReshapeMode = "center"
    frame_selection: Selection = "head"
