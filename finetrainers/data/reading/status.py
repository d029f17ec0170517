"""The status and marks of an item, and the error of unusable files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from finetrainers.utils.failures import ExpectedError

Status = Literal[
    "used", "skipped", "too_short", "no_bucket", "caption_missing", "outside_root", "missing", "not_a_file", "empty",
    "unreadable", "no_video", "no_rate", "too_large", "cut_off", "damaged", "decoder_failed", "mismatch",
]  # fmt: skip
Mark = Literal[
    "resampled", "slower", "cropped", "distorted", "enlarged", "no_caption", "same_file", "same_content", "black",
    "still",
]  # fmt: skip

STATUSES: tuple[Status, ...] = get_args(Status)
MARKS: tuple[Mark, ...] = get_args(Mark)

MEANINGS: Mapping[Status | Mark, str] = {
    "used": "trained on, or held out",
    "skipped": "left out by an option, or a row or archive member that is not a clip",
    "too_short": "fewer frames, at its sampled rate, than the shortest bucket",
    "no_bucket": "there are no buckets for videos, or none for images, or the checkpoint does not train single images",
    "caption_missing": "no caption belongs to it",
    "outside_root": "its path leads out of the dataset's directory",
    "missing": "there is no such file, or the link leads nowhere",
    "not_a_file": "a directory, pipe, socket or device; never opened",
    "empty": "the file has no bytes",
    "unreadable": "not a media file, an unknown codec, a missing index, or it cannot be opened",
    "no_video": "sound only, or a cover image",
    "no_rate": "its frame rate is missing or invalid",
    "too_large": "too many pixels in a frame, or in all frames (`max_pixels`)",
    "cut_off": "it has fewer frames than it declares",
    "damaged": "decoding fails, or gives damaged frames",
    "decoder_failed": "the decoder crashed, hung, or allocated too much memory",
    "mismatch": "its control video or another further medium has not a frame of the same shape for each of its frames, "
    "or its mask does not fit it, has colors, or is black",
    "resampled": "frames are dropped to reach the target rate",
    "slower": "slower than the target rate; trained at its own rate",
    "cropped": "part of each frame is cropped",
    "distorted": "resized to another aspect ratio",
    "enlarged": "smaller than its bucket",
    "no_caption": "its caption is empty, or only the trigger word",
    "same_file": "the same path occurs earlier",
    "same_content": "the same bytes occur earlier, under another name",
    "black": "nearly every frame is black",
    "still": "nearly all frames are equal",
}


@dataclass(frozen=True, slots=True)
class InvalidSample:
    """The reason why an item cannot be used: its status, and a sentence without the item's name."""

    status: Status
    reason: str


#: The result of decoding all of a file: the reason why it cannot be used, or its marks (maybe none).
Decoded: TypeAlias = InvalidSample | tuple[Mark, ...]


class InvalidSampleError(ExpectedError, ValueError):
    """A file that cannot be used. The message is the reason; an error of decoding also names the file.

    Attributes:
        status: the kind of reason.
        lasting: whether the reason is the file's content, and not the disk, the network, permissions or this program.
    """

    def __init__(self, reason: str, status: Status = "damaged", *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.status = status
        self.lasting = lasting

    @property
    def unusable(self) -> InvalidSample:
        """Status and reason."""
        return InvalidSample(self.status, str(self))
