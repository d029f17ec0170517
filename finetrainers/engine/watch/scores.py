"""The ledger of a watch: a JSON line for each clip of a checkpoint with its scores, and what follows from it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.utils.files import append_jsonl, read_jsonl

from ..sample.plan import Sample, SamplePlan, Variant
from ..sample.weights import Weights

_FILE = "scores.jsonl"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint with its content.

    Attributes:
        step: the optimizer steps that it holds.
        path: its directory.
        manifest: SHA-256 of its manifest, which vouches for every byte.
    """

    step: int
    path: Path
    manifest: str


class Scores:
    """What a preset has of all checkpoints, those that are gone as well."""

    def __init__(self, folder: Path, labels: Sequence[str]) -> None:
        """Args:
        folder: of the preset.
        labels: of the rewards that are wanted.
        """
        self._path = folder / _FILE
        self.labels = list(labels)
        self._records: dict[tuple[str, str], dict[str, Any]] = {}  # by manifest and clip
        for record in read_jsonl(self._path)[0] if self._path.is_file() else []:
            if isinstance(record.get("key"), str) and isinstance(record.get("manifest"), str):
                self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        place = record["manifest"], record["key"]
        known = self._records.get(place, {}).get("scores", {})
        self._records[place] = {**record, "scores": {**known, **record.get("scores", {})}}

    def of_clip(self, key: str) -> dict[str, float | None]:
        """The scores of a clip, from whichever checkpoint it was recorded."""
        found: dict[str, float | None] = {}
        for (_, other), record in self._records.items():
            if other == key:
                found |= record["scores"]
        return found

    def count(self, checkpoint: Checkpoint) -> int:
        """How many clips of a checkpoint are recorded with all scores that are wanted."""
        wanted = set(self.labels)
        return sum(
            manifest == checkpoint.manifest and wanted <= record["scores"].keys()
            for (manifest, _), record in self._records.items()
        )

    def add(
        self, checkpoint: Checkpoint, preset: str, sample: Sample, file: Path, scores: Mapping[str, float | None]
    ) -> None:
        """Record a clip of a checkpoint."""
        weights = sample.variant.weights
        record = {
            "time": round(time.time(), 3), "step": checkpoint.step, "checkpoint": str(checkpoint.path),
            "manifest": checkpoint.manifest, "kind": weights.kind, "weights": weights.digest, "preset": preset,
            "prompt": sample.facts["prompt"], "seed": sample.seed, "size": sample.facts["size"], "file": file.name,
            "key": sample.key, "scores": dict(scores),
        }  # fmt: skip
        append_jsonl(self._path, record)
        self._take(record)

    def values(self, manifest: str, label: str) -> list[float]:
        """The scores of a checkpoint by one reward, without those that failed."""
        found = [record["scores"].get(label) for (of, _), record in self._records.items() if of == manifest]
        return [value for value in found if value is not None and math.isfinite(value)]

    def means(self, manifest: str) -> dict[str, float]:
        """The mean score of a checkpoint by each reward."""
        values = {label: self.values(manifest, label) for label in self.labels}
        return {label: sum(some) / len(some) for label, some in values.items() if some}

    def columns(self, plan: SamplePlan) -> dict[int, tuple[str, Variant]]:
        """By step, the manifest and the weights of each checkpoint that has clips; the last one of a step counts."""
        found: dict[int, tuple[str, Variant]] = {}
        for (manifest, _), record in self._records.items():
            step = int(record["step"])
            found[step] = manifest, variant_of(step, self._weights(record))
        return dict(sorted(found.items()))

    def _weights(self, record: Mapping[str, Any]) -> Weights:
        label, path = f"step {record['step']}", Path(record["checkpoint"])
        return Weights(label, record["kind"], path, digest=record["weights"], is_checkpoint=True)


def variant_of(step: int, weights: Weights) -> Variant:
    """The column of a checkpoint."""
    return Variant(weights, 1.0, f"step {step}", f"step-{step:06d}")
