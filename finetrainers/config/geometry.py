"""Video sizes that a model accepts: plain arithmetic, so that a wrong size is refused before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Compression and size rules of one checkpoint.

    Attributes:
        temporal: frames per latent frame; the first latent frame holds one frame, so F = temporal * k + 1.
        spatial: pixels per latent cell, per side.
        patch: latent cells per transformer token, per side.
        patch_t: latent frames per transformer token; the network denoises a multiple of them (`denoised_shape`).
        fps: the frame rate the model was trained at.
        pixels: height and width must also be a multiple of this, since the family's pipeline demands it.
        sides: the only height and width in pixels that the network has positions for, or None if it takes several.
        largest: the largest height and width that it has positions for, or None if there is no limit.
        longest: the most frames that it has positions for, or None if there is no limit.
        shortest: the fewest frames of a clip: 2 if a single frame would be the image that every clip starts from.
        small_sides: length of a side below which clips are unlike those of the checkpoint, and the difference, or None.
    """

    temporal: int
    spatial: int
    patch: int
    patch_t: int
    fps: float
    pixels: int = 1
    sides: tuple[int, int] | None = None
    largest: tuple[int, int] | None = None
    longest: int | None = None
    small_sides: tuple[int, str] | None = None
    shortest: int = 1

    def __post_init__(self) -> None:
        """Refuse what configs may hold instead of a number.

        Raises:
            TypeError: a rule is something else.
        """
        for name in ("temporal", "spatial", "patch", "patch_t", "pixels"):
            if not isinstance(value := getattr(self, name), int):
                raise TypeError(f"{name} must be a whole number, got {value!r}")

    @property
    def size_multiple(self) -> int:
        """Number of pixels whose multiples height and width must be."""
        return math.lcm(self.spatial * self.patch, self.pixels)

    def fitted(self, height: float, width: float) -> tuple[int, int]:
        """Return the legal height and width nearest to these from below, or the smallest legal ones."""
        if self.sides is not None:
            return self.sides
        limits, multiple = self.largest or (height, width), self.size_multiple
        rows, columns = (int(min(side, limit)) // multiple for side, limit in zip((height, width), limits, strict=True))
        return max(rows, 1) * multiple, max(columns, 1) * multiple

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the latent `(T, H, W)` of a clip of `frames` x `height` x `width` pixels."""
        return (frames - 1) // self.temporal + 1, height // self.spatial, width // self.spatial

    def denoised_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the latent `(T, H, W)` with the frames that pad temporal patches; see `ModelSpec.padded`."""
        t, h, w = self.latent_shape(frames, height, width)
        return t + -t % self.patch_t, h, w

    def num_tokens(self, frames: int, height: int, width: int) -> int:
        """Return the number of video tokens that the transformer sees for one clip."""
        t, h, w = self.denoised_shape(frames, height, width)
        return t // self.patch_t * (h // self.patch) * (w // self.patch)

    def prefix_frames(self, frames: int | None, available: int) -> int:
        """Return how many of a video's last frames a sample begins with: `frames`, or all that fill latent frames."""
        return (available - 1) // self.temporal * self.temporal + 1 if frames is None else frames

    def prefix_problem(self, frames: int | None, available: int, sampled: int, *, ending: bool) -> str | None:
        """Return why a sample cannot begin with `frames` frames of a video, or None if it can.

        The reason is the end of a sentence on how many frames the video has.

        Args:
            frames: requested frames, or None for all.
            available: frames of the video.
            sampled: frames of the sample.
            ending: whether the last latent frame of the sample is also given.
        """
        longest = sampled - self.temporal * (2 if ending else 1)
        longest = (longest - 1) // self.temporal * self.temporal + 1
        if longest < 1:
            return ", which leaves nothing to sample; sample more frames"
        requested = self.prefix_frames(frames, available)
        if (requested - 1) % self.temporal:
            fitting = max(1, min(self.prefix_frames(None, min(requested, available)), longest))
            return f", and its last {requested} are not {self.temporal}*k+1; use FILE:{fitting}"
        if requested > available:
            fitting = self.prefix_frames(None, available)
            if fitting > longest:
                return f", not {requested}; use FILE:{longest}"
            return f", not {requested}; use FILE:{fitting}, or remove the number"
        if requested > longest:
            return (
                f"; a sample of {sampled} frames can begin with at most {longest}; use FILE:{longest}, or sample more"
            )
        return None

    def problems(self, frames: int, height: int, width: int) -> list[str]:
        """Return the reasons why a size is not legal, each with a legal one; empty if it is."""
        problems = self._size_problems(frames, height, width)
        if problems and width < min(frames, height):
            # Others write WIDTHxHEIGHTxFRAMES; clips are wider than high more often than not.
            size = (width, min(frames, height), max(frames, height))
            if not self._size_problems(*size):
                return [f"the order is FRAMESxHEIGHTxWIDTH; did you mean {'x'.join(map(str, size))}?"]
        return problems

    def size_notes(self, sizes: Iterable[tuple[int, int, int]]) -> list[str]:
        """Return a note on sizes that can be trained, and that the checkpoint was not made for; empty without any."""
        if self.small_sides is None:
            return []
        limit, difference = self.small_sides
        small = dict.fromkeys(f"{height}x{width}" for _, height, width in sizes if min(height, width) < limit)
        return [f"sizes with a side below {limit} pixels ({', '.join(small)}): {difference}"] if small else []

    def length_problems(self, frames: int) -> list[str]:
        """Return the reasons why a length is not legal, each with a legal one; empty if it is."""
        if self.longest is not None and frames > self.longest:
            return [f"this checkpoint has positions up to {self.longest} frames, got {frames}; use at most that"]
        if frames < self.shortest:
            fewest = self.temporal + 1
            return [f"this checkpoint animates an image, and 1 frame leaves nothing to generate; use {fewest} or more"]
        if (frames - 1) % self.temporal == 0:
            return []
        below = (frames - 1) // self.temporal * self.temporal + 1
        return [f"{frames} frames is not {self.temporal}*k+1; use {below} or {below + self.temporal}"]

    def _size_problems(self, frames: int, height: int, width: int) -> list[str]:
        problems = self.length_problems(frames)
        if self.sides is not None and (height, width) != self.sides:
            legal = "x".join(map(str, self.sides))
            return [
                *problems,
                f"this checkpoint's positions are learned only for {legal} (height x width); use {legal}",
            ]
        for name, pixels in (("height", height), ("width", width)):
            if pixels % self.size_multiple:
                below = max(pixels // self.size_multiple, 1) * self.size_multiple
                problems.append(
                    f"{name} {pixels} is not a multiple of {self.size_multiple}; "
                    f"use {below} or {below + self.size_multiple}"
                )
        if self.largest is not None and (height > self.largest[0] or width > self.largest[1]):
            largest = "x".join(map(str, self.largest))
            problems.append(f"this checkpoint has positions up to {largest} (height x width); use a smaller size")
        return problems
