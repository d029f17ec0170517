"""Videos by decord, whose wheels carry an FFmpeg of their own (4.1): fast on small pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import decord
import numpy as np

from .reader import DecodeError

_AT_ONCE = 8  # full-size frames held at a time


class DecordReader:
    """A video that decord decodes."""

    def __init__(self, path: Path) -> None:
        """See `VideoReader`."""
        self.path = path
        try:
            self._reader = decord.VideoReader(str(path), num_threads=1)
        except (decord.DECORDError, RuntimeError) as error:
            raise _failed(path, error) from error

    @property
    def num_frames(self) -> int:
        """See `VideoReader`."""
        return len(self._reader)

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """See `VideoReader`."""
        there = [number for number in numbers if number < len(self._reader)]
        for start in range(0, len(there), _AT_ONCE):
            some = there[start : start + _AT_ONCE]
            try:
                pictures = self._reader.get_batch(some).asnumpy()
            except (decord.DECORDError, RuntimeError) as error:
                raise _failed(self.path, error) from error
            yield from zip(some, pictures, strict=True)

    def close(self) -> None:
        """See `VideoReader`."""
        del self._reader


def _failed(path: Path, error: Exception) -> DecodeError:
    lines = str(error).strip().splitlines()
    return DecodeError(f"cannot decode {path}: decord says: {lines[0] if lines else type(error).__name__}")
