"""Videos by decord, whose wheels carry an FFmpeg of their own (4.1): fast on small pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import decord
import numpy as np

_AT_ONCE = 8  # full-size frames held at a time


class DecordReader:
    """A video that decord decodes."""

    def __init__(self, path: Path) -> None:
        """See `VideoReader`."""
        self._reader = decord.VideoReader(str(path), num_threads=1)

    @property
    def num_frames(self) -> int:
        """See `VideoReader`."""
        return len(self._reader)

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """See `VideoReader`."""
        there = [number for number in numbers if number < len(self._reader)]
        for start in range(0, len(there), _AT_ONCE):
            some = there[start : start + _AT_ONCE]
            yield from zip(some, self._reader.get_batch(some).asnumpy(), strict=True)

    def close(self) -> None:
        """See `VideoReader`."""
        del self._reader
