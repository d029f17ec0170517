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


class Further(NamedTuple):
    """A further medium of a clip, with a frame for each of its source: a control video, say.

    Attributes:
        name: what it is to the model.
        path: the file.
        backend: what decodes it.
    """

    name: str
    path: Path
    backend: str = "pyav"


class Mask(NamedTuple):
    """A mask of a clip, which weighs its loss per pixel, and per latent by the mean over the pixels that the latent stands for.

    Attributes:
        path: the file.
        kind: a video has a frame for each of the clip's source; an image is that of all frames.
        grid: frames, and pixels of each side, that a latent of the VAE stands for.
        lowest: weight of black pixels; white ones have 1.
        backend: what decodes it.
    """

    path: Path
    kind: Kind
    grid: tuple[int, int]
    lowest: float = 0.0
    backend: str = "pyav"


@dataclass(slots=True, unsafe_hash=True)  # slots: sliding windows make many of one file
class Clip:
    """A training example, cut from one item; with sliding windows, one of several of its item.

    Never changed once it is made; not frozen, since making a frozen one takes four times as long, and there may be a
    million.

    Attributes:
        index: place of its item in the dataset, or `windows.example_index` of it; random numbers are derived from it.
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
        start: its first frame, counted at `fps`; None: `frame_selection` says.
        latents_of: first frame and number of frames of the segment whose latents its own are cut from; None: it is
            encoded by itself.
        lower: `(bucket, fps)` that it falls through to where it is not kept in its bucket, in order.
        repeats: how often it comes in an epoch, on average.
        dataset: number of the dataset it is of.
        is_variable: whether the frames of the source are shown at uneven times; `source_fps` is then their mean rate.
        backend: what decodes it.
        captions: all of its captions, if it has several; one is drawn each time that it is trained on.
        further: its further media, in order of their names.
        mask: its mask; None: the whole picture counts.
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
    latents_of: tuple[int, int] | None = None
    lower: tuple[tuple[Bucket, float], ...] = ()
    repeats: float = 1.0
    dataset: int = 0
    is_variable: bool = False
    backend: str = "pyav"
    captions: tuple[str, ...] = ()
    further: tuple[Further, ...] = ()
    mask: Mask | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it is cut from; its mask is none of them."""
        return self.path, *(one.path for one in self.further)

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


class Picture(NamedTuple):
    """An image in the size of the clips that start from it, height and width: resized until it covers that, and cropped."""

    path: Path
    size: tuple[int, int]


#: What a text encoder that sees images is given with a text: the first frame of a clip, or an image.
Shown: TypeAlias = Clip | Picture


def cut_to(clip: Clip, bucket: Bucket) -> Clip:
    """Return a clip in one of its buckets, and in no other."""
    if not clip.lower:
        return clip
    rates = dict([(clip.bucket, clip.fps), *clip.lower])
    return replace(clip, bucket=bucket, fps=rates[bucket], lower=())


def all_cuts(clips: Iterable[Clip]) -> list[Clip]:
    """Return every clip in each of its buckets: all that training may ask for."""
    return [cut_to(clip, bucket) for clip in clips for bucket in clip.buckets]
