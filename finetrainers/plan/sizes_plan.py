"""A plan of work whose sizes alone are known, to estimate the memory of a run whose data is not on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.data.buckets.bucket_choice import choose_buckets
from finetrainers.data.buckets.buckets import LARGEST_CHOSEN
from finetrainers.data.reading.items import Kind
from finetrainers.methods.registry import method_spec
from finetrainers.methods.spec import TrainingSet

Size = tuple[int, int, int]


@dataclass(frozen=True)
class SizesPlan:
    """Sizes of clips, and nothing else; see `TrainingSet`."""

    buckets: tuple[Size, ...]
    encodes_clips: bool
    needs_empty_text: bool = True

    fingerprint = ""
    fingerprint_of = title = texts = example = ""
    warnings = notes = ()
    cut_in_batches = False
    count = 0
    noun = "clip"
    rates = images = ()

    @property
    def critical_options(self) -> dict[str, str | None]:
        """An empty mapping: nothing is resumed."""
        return {}

    @property
    def size(self) -> Size:
        """The largest size."""
        return max(self.buckets, key=lambda size: (math.prod(size), size))

    def heaviest(self, config: TrainConfig) -> tuple[Size, int]:
        """Return the size and number of clips of the largest micro-batch."""
        sizes, usual = dict(config.dataloader.bucket_batch_sizes), config.dataloader.batch_size
        batches = [(bucket, sizes.get(bucket, usual)) for bucket in self.buckets]
        return max(batches, key=lambda batch: (math.prod(batch[0]) * batch[1], batch))

    def all_captions(self) -> Sequence[Any]:
        """Return no captions, prompts or clips: they are unknown."""
        return ()

    shown_texts = encoded_clips = all_captions

    def step_of(self, config: TrainConfig) -> str:
        """Return an empty description."""
        return ""

    def table(self) -> list[tuple[str, ...]]:
        """Return the sizes."""
        return [("size",), *(("x".join(map(str, size)),) for size in self.buckets)]

    def write(self, path: Path) -> None:
        """Write nothing."""


def plan_sizes(config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> TrainingSet | None:
    """Return a plan of the configured sizes, or None if they are wrong.

    Where no size is configured, clips have the largest that a run chooses by itself.

    Raises:
        DataError: the model cannot be trained on the sizes.
    """
    if sizes_are_wrong:
        return None
    method = method_spec(config)
    clips: dict[Kind, list[Size]] = {"video": [LARGEST_CHOSEN], "image": []}
    buckets = method.sizes(config) if method.samples else choose_buckets(config.data, geometry, clips).all
    return SizesPlan(tuple(buckets), encodes_clips=not method.samples, needs_empty_text=method.needs_text(config))
