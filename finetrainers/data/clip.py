"""What is cut from one media file and trained on. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetrainers.utils.seeding import derive_seed

from .buckets import Bucket
from .frames import Selection
from .manifest import Kind

ReshapeMode = Literal["center", "random", "none"]


@dataclass(frozen=True)
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
        captions: all of its captions, if it has several; one is drawn each time that it is trained on.
        repeats: how often it comes in an epoch.
        dataset: number of its data set.
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
    captions: tuple[str, ...] = ()
    repeats: float = 1.0
    dataset: int = 0

    @property
    def all_captions(self) -> tuple[str, ...]:
        """Every caption that it may be trained with."""
        return self.captions or (self.caption,)

    def caption_for(self, sample_key: tuple[int, ...], *, seed: int) -> str:
        """The caption of a sample, drawn anew for every (epoch, item) where there are several."""
        if not self.captions:
            return self.caption
        return self.captions[derive_seed(seed, "caption", *sample_key) % len(self.captions)]
