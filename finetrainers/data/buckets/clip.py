"""The clip, a training example cut from one media file. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from finetrainers.utils.seeding import derive_seed

from ..reading.items import Kind
from .buckets import Bucket
from .frames import Selection

ReshapeMode = Literal["center", "random", "none"]


class ControlInput(NamedTuple):
    """A further medium of a clip, such as a control video, with a frame for each frame of the clip's source.

    Attributes:
        name: its name in the model.
        path: the file.
        backend: the backend that decodes it.
    """

    name: str
    path: Path
    backend: str = "pyav"


class Mask(NamedTuple):
    """A mask of a clip, which weighs its loss per pixel, and per latent by the mean over the latent's pixels.

    Attributes:
        path: the file.
        kind: a video has a frame for each of the clip's source; an image applies to all frames.
        grid: frames, and pixels of each side, that a latent of the VAE stands for.
        lowest: weight of black pixels; white ones have 1.
        backend: the backend that decodes it.
    """

    path: Path
    kind: Kind
    grid: tuple[int, int]
    lowest: float = 0.0
    backend: str = "pyav"


@dataclass(slots=True, unsafe_hash=True)  # slots: sliding windows make many clips of one file
class Clip:
    """A training example, cut from one item; with sliding windows, one of several of its item.

    It never changes after creation. It is not frozen, since creating a frozen one takes four times as long, and there
    may be a million.

    Attributes:
        index: index of its item in the dataset, or `windows.example_index` of it; random numbers are derived from it.
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
        frame_selection: the selection of its frames; see `select_frames`.
        start: its first frame, counted at `fps`, or None if `frame_selection` determines it.
        latent_segment: first frame and number of frames of the segment whose latents the clip's are cut from, or None
            if the clip is encoded by itself.
        lower: `(bucket, fps)` that it falls through to where it is not kept in its bucket, in order.
        repeats: how often it comes in an epoch, on average.
        dataset: number of its dataset.
        is_variable: whether the frames of the source are shown at uneven times; `source_fps` is then their mean rate.
        has_row_rate: whether `source_fps` is that of its row, and does not follow from the content of its file.
        backend: the backend that decodes it.
        captions: all of its captions, if it has several; one is drawn each time that it is trained on.
        further: its further media, in order of their names.
        mask: its mask, or None if all pixels count.
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
    start: int | None = None
    latent_segment: tuple[int, int] | None = None
    lower: tuple[tuple[Bucket, float], ...] = ()
    repeats: float = 1.0
    dataset: int = 0
    is_variable: bool = False
    has_row_rate: bool = False
    backend: str = "pyav"
    captions: tuple[str, ...] = ()
    further: tuple[ControlInput, ...] = ()
    mask: Mask | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it is cut from, without its mask."""
        return self.path, *(medium.path for medium in self.further)

    @property
    def is_random(self) -> bool:
        """Whether its start or its crop is drawn."""
        return "random" in (self.frame_selection, self.reshape_mode)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets that it may be cut to, in order."""
        return self.bucket, *(bucket for bucket, _ in self.lower)

    @property
    def all_captions(self) -> tuple[str, ...]:
        """All captions that it may be trained with."""
        return self.captions or (self.caption,)

    def caption_for(self, sample_key: tuple[int, ...], *, seed: int) -> str:
        """Return the caption of a sample, drawn for every (epoch, item) where there are several."""
        if not self.captions:
            return self.caption
        return self.captions[derive_seed(seed, "caption", *sample_key) % len(self.captions)]


class ConditioningImage(NamedTuple):
    """An image and the height and width of the clips that start from it: it is resized to cover these, and cropped.

    `last` is the image that they end with, or None if their end is free.
    """

    path: Path
    size: tuple[int, int]
    last: Path | None = None

    @property
    def ending(self) -> ConditioningImage | None:
        """The last image by itself."""
        return None if self.last is None else ConditioningImage(self.last, self.size)


#: The source of the image that some text encoders see with a text: the first frame of a clip, or an image.
TextImageSource: TypeAlias = Clip | ConditioningImage


def cut_to(clip: Clip, bucket: Bucket) -> Clip:
    """Return a clip in one of its buckets, and in no other."""
    if not clip.lower:
        return clip
    rates = dict([(clip.bucket, clip.fps), *clip.lower])
    return replace(clip, bucket=bucket, fps=rates[bucket], lower=())


def all_cuts(clips: Iterable[Clip]) -> list[Clip]:
    """Return every clip in each of its buckets, as training may use them."""
    return [cut_to(clip, bucket) for clip in clips for bucket in clip.buckets]
