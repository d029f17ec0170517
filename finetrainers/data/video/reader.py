"""The interface of video backends, and the two optional ones, which are libraries that number frames themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_AT_ONCE = 8  # full-size frames held at a time


class VideoReader(Protocol):
    """One open video. Every backend gives the same pixels for the same numbers.

    What is wrong with the file is any exception that the library raises; see `decoding`.
    """

    @property
    def num_frames(self) -> int:
        """How many frames the file has, by the backend's own count."""
        ...

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Decode frames one by one, holding few of them at a time.

        Args:
            numbers: in display order, counted from 0 over the frames that a player shows; ascending and distinct.

        Yields:
            The number and the frame, upright RGB `[H, W, 3]` uint8, as large as it is stored. Ends early where the
            file does.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class LibraryReader:
    """A video that decord or torchcodec decodes."""

    def __init__(self, path: Path, backend: str) -> None:
        self._video, self._pictures = _OPENERS[backend](str(path))

    @property
    def num_frames(self) -> int:
        """See `VideoReader`."""
        return len(self._video)

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """See `VideoReader`."""
        there = [number for number in numbers if number < len(self._video)]
        for start in range(0, len(there), _AT_ONCE):
            some = there[start : start + _AT_ONCE]
            yield from zip(some, self._pictures(some), strict=True)

    def close(self) -> None:
        """See `VideoReader`."""
        del self._video, self._pictures


Opened = tuple[Any, Callable[[list[int]], np.ndarray]]


def _decord(path: str) -> Opened:
    """Return a video by decord, whose wheels carry an FFmpeg of their own (4.1): fast on small pictures."""
    import decord

    video = decord.VideoReader(path, num_threads=1)
    return video, lambda numbers: video.get_batch(numbers).asnumpy()


def _torchcodec(path: str) -> Opened:
    """Return a video by torchcodec, which uses the FFmpeg libraries that the machine has."""
    from torchcodec.decoders import VideoDecoder

    # "exact" reads the file once, so that numbers are right at variable frame rates too.
    video = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
    return video, lambda numbers: video.get_frames_at(numbers).data.numpy()


_OPENERS = {"decord": _decord, "torchcodec": _torchcodec}
