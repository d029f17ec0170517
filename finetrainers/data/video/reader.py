"""The seam behind which a video is decoded: what every backend offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class DecodeError(ValueError):
    """A media file whose frames cannot be decoded; the message names the file."""


class VideoReader(Protocol):
    """One open video. Every backend gives the same pixels for the same numbers."""

    def __init__(self, path: Path) -> None:
        """Open a video.

        Raises:
            DecodeError: the file cannot be opened, or has no video stream.
        """
        ...

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

        Raises:
            DecodeError: the file is damaged.
        """
        ...

    def close(self) -> None:
        """Let the file go."""
        ...
