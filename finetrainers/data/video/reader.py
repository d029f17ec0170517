"""The interface of video backends, and the two optional ones, which are libraries that number frames themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_BATCH_SIZE = 8  # full-size frames held at a time


class VideoReader(Protocol):
    """An open video. Every backend returns the same pixels for the same numbers.

    Any exception that the library raises is a problem of the file; see `decoding`.
    """

    @property
    def num_frames(self) -> int:
        """The number of frames in the file, as counted by the backend."""
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
        self._video, self._read_batch = _OPENERS[backend](str(path))

    @property
    def num_frames(self) -> int:
        """The number of frames; see `VideoReader`."""
        return len(self._video)

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Decode frames; see `VideoReader`."""
        existing = [number for number in numbers if number < len(self._video)]
        for start in range(0, len(existing), _BATCH_SIZE):
            batch = existing[start : start + _BATCH_SIZE]
            yield from zip(batch, self._read_batch(batch), strict=True)

    def close(self) -> None:
        """Close the file; see `VideoReader`."""
        del self._video, self._read_batch


Opened = tuple[Any, Callable[[list[int]], np.ndarray]]


def _decord(path: str) -> Opened:
    """Open a video by decord, whose wheels contain FFmpeg 4.1: fast on small frames."""
    import decord

    video = decord.VideoReader(path, num_threads=1)
    return video, lambda numbers: video.get_batch(numbers).asnumpy()


def _torchcodec(path: str) -> Opened:
    """Open a video by torchcodec, which uses the machine's FFmpeg libraries."""
    from torchcodec.decoders import VideoDecoder

    # "exact" reads the file once, so that numbers are also right at variable frame rates.
    video = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
    return video, lambda numbers: video.get_frames_at(numbers).data.numpy()


_OPENERS = {"decord": _decord, "torchcodec": _torchcodec}
