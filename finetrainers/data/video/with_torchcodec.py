"""Videos by torchcodec, which uses the FFmpeg libraries that the machine has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torchcodec.decoders import VideoDecoder

_AT_ONCE = 8  # full-size frames held at a time


class TorchcodecReader:
    """A video that torchcodec decodes."""

    def __init__(self, path: Path) -> None:
        """See `VideoReader`."""
        # "exact" reads the file once, so that numbers are right at variable frame rates too.
        self._decoder = VideoDecoder(str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")

    @property
    def num_frames(self) -> int:
        """See `VideoReader`."""
        return len(self._decoder)

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """See `VideoReader`."""
        there = [number for number in numbers if number < len(self._decoder)]
        for start in range(0, len(there), _AT_ONCE):
            some = there[start : start + _AT_ONCE]
            yield from zip(some, self._decoder.get_frames_at(some).data.numpy(), strict=True)

    def close(self) -> None:
        """See `VideoReader`."""
        del self._decoder
