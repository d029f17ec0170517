"""Index of a watch's scores: a JSON line for each clip of a checkpoint with its scores."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from finetrainers.config.prompts import ValidationPrompt
from finetrainers.data.reading.prior_prompts import without_triggers
from finetrainers.data.reading.sources.captions import has_word
from finetrainers.draw.curves import is_number
from finetrainers.utils.files import append_jsonl
from finetrainers.utils.reading import read_jsonl

from ..plan import Sample, Variant
from ..weights import Weights

#: Name of the file in a preset's folder.
FILE = "scores.jsonl"
#: Suffixes of a reward's mean over prompts with a trigger word, over the same prompts without it, and the difference.
WITH_TRIGGER, WITHOUT_TRIGGER, TRIGGER_GAP = "/with_trigger", "/without_trigger", "/trigger_gap"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint with its content.

    Attributes:
        step: the optimizer steps that it holds.
        path: its directory.
        manifest: SHA-256 of its manifest, which has the digests of all files.
        averages: SHA-256 of its EMA, if it has one.
    """

    step: int
    path: Path
    manifest: str
    averages: str | None = None


class Scores:
    """Scores of a preset for all checkpoints, including removed ones.

    A failed score is None, and only in the process that tried: another process tries again.
    """

    def __init__(self, folder: Path, labels: Sequence[str]) -> None:
        """Args:
        folder: of the preset.
        labels: of the requested rewards.
        """
        self._path = folder / FILE
        self.labels = list(labels)
        self._by_clip: dict[str, dict[str, float | None]] = {}
        self._recorded_keys: dict[str, set[str]] = {}  # keys of clips by manifest
        self._variants: dict[str, dict[str, Variant]] = {}  # by manifest and digest of the weights
        self._steps: dict[int, tuple[str, str]] = {}  # manifest and digest of the last record
        for record in read_jsonl(self._path)[0] if self._path.is_file() else []:
            if _is_complete(record):
                finished = {label: value for label, value in record["scores"].items() if isinstance(value, int | float)}
                self._index({**record, "scores": finished})

    def _index(self, record: Mapping[str, Any]) -> None:
        manifest, key, digest, step = record["manifest"], record["key"], record["weights"], int(record["step"])
        self._by_clip.setdefault(key, {}).update(record["scores"])
        self._recorded_keys.setdefault(manifest, set()).add(key)
        weights = Weights(f"step {step}", record["kind"], Path(record["checkpoint"]), digest=digest, is_checkpoint=True)
        self._variants.setdefault(manifest, {})[digest] = checkpoint_variant(step, weights)
        self._steps[step] = manifest, digest

    def of_clip(self, key: str) -> dict[str, float | None]:
        """Return the scores of a clip by all rewards, from any checkpoint that recorded it."""
        return dict(self._by_clip.get(key, {}))

    def has(self, manifest: str, key: str) -> bool:
        """Return whether a clip is recorded for a checkpoint, with all requested scores."""
        return key in self._recorded_keys.get(manifest, ()) and set(self.labels) <= self._by_clip[key].keys()

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
        self._index(record)

    def values(self, samples: Sequence[Sample], label: str) -> list[float]:
        """Return the scores of some clips by one reward, without missing and failed ones."""
        scores = [self._by_clip.get(sample.key, {}).get(label) for sample in samples]
        return [value for value in scores if value is not None and math.isfinite(value)]

    def means(self, samples: Sequence[Sample], pairs: Mapping[int, int]) -> dict[str, float]:
        """Return the mean score of some clips by each reward, and of `trigger_pairs` if each of their clips has one."""
        means = {label: fmean(values) for label in self.labels if (values := self.values(samples, label))}
        groups = [[s for s in samples if s.prompt in prompts] for prompts in (set(pairs), set(pairs.values()))]
        for label in list(means) if all(groups) else ():
            scores = [self.values(group, label) for group in groups]
            if list(map(len, scores)) == list(map(len, groups)):
                with_trigger, without_trigger = map(fmean, scores)
                means[label + WITH_TRIGGER], means[label + WITHOUT_TRIGGER] = with_trigger, without_trigger
                means[label + TRIGGER_GAP] = with_trigger - without_trigger
        return means

    def variants(self, manifest: str) -> dict[str, Variant]:
        """Return the weights of a checkpoint with recorded clips, by their digest: the trained ones, or their EMA."""
        return self._variants.get(manifest, {})

    def columns(self) -> Iterator[tuple[int, str, Variant]]:
        """Yield step, manifest and weights of each checkpoint that has clips, by step.

        The last record of a step counts.
        """
        for step, (manifest, digest) in sorted(self._steps.items()):
            yield step, manifest, self._variants[manifest][digest]


def _is_complete(record: Mapping[str, Any]) -> bool:
    """Return whether a record has all that is read, of the right types: the file may have been edited."""
    texts = all(isinstance(record.get(name), str) for name in ("key", "manifest", "weights", "kind", "checkpoint"))
    return texts and is_number(record.get("step")) and isinstance(record.get("scores"), Mapping)


def trigger_pairs(prompts: Sequence[ValidationPrompt], words: Sequence[str]) -> dict[int, int]:
    """Return the index of the same prompt without its trigger word, by the index of each prompt that has both."""
    plain = {
        prompt.model_copy(update={"prompt": without_triggers(prompt.prompt, ())}): index
        for index, prompt in enumerate(prompts)
    }
    bare = [prompt.model_copy(update={"prompt": without_triggers(prompt.prompt, words)}) for prompt in prompts]
    return {
        index: plain[bare[index]]
        for index, prompt in enumerate(prompts)
        if bare[index] in plain and any(has_word(prompt.prompt, word) for word in words)
    }


def checkpoint_variant(step: int, weights: Weights) -> Variant:
    """Return the column of a checkpoint."""
    return Variant(weights, 1.0, f"step {step}", f"step-{step:06d}")


def recorded_labels(folder: Path) -> set[str]:
    """Return the rewards that have scored clips of any preset below a folder."""
    records = [record for path in folder.glob(f"*/{FILE}") for record in read_jsonl(path)[0]]
    return {label for record in records if isinstance(record.get("scores"), Mapping) for label in record["scores"]}
