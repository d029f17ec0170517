"""Records of `finetrainers watch` next to a run: scores and clips of its checkpoints, by preset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.draw.curves import Points, is_number
from finetrainers.rundir.best import best_checkpoint
from finetrainers.rundir.find import step_of
from finetrainers.rundir.run_records import RunRecords
from finetrainers.utils.reading import read_jsonl


@dataclass(frozen=True)
class Watched:
    """Clips of a preset.

    Attributes:
        run: the run that saved the checkpoints.
        preset: its name.
        folder: where the clips are.
        records: by step, prompt and seed; if a step was saved again, those of its newest checkpoint.
        best: step of the checkpoint that is marked as the best, or None if there is none.
    """

    run: RunRecords
    preset: str
    folder: Path
    records: Mapping[tuple[int, str, int], Mapping[str, Any]]
    best: int | None

    @property
    def labels(self) -> list[str]:
        """Rewards with scores."""
        return list(dict.fromkeys(label for record in self.records.values() for label in record["scores"]))

    def means(self, label: str) -> Points:
        """Return the mean score of each checkpoint by a reward."""
        values: dict[int, list[float]] = defaultdict(list)
        for (step, _, _), record in self.records.items():
            if is_number(score := record["scores"].get(label)):
                values[step].append(score)
        return [float(step) for step in sorted(values)], [sum(values[s]) / len(values[s]) for s in sorted(values)]


def read_watched(run: RunRecords) -> Iterator[Watched]:
    """Yield the presets of a run that have clips, including those of an earlier watch."""
    best = best_checkpoint(run.root)
    for file in sorted((run.root / "watch").glob("*/scores.jsonl")):
        by_manifest: dict[str, dict[tuple[int, str, int], dict[str, Any]]] = {}
        newest: dict[int, str] = {}  # manifest of each step
        for record in read_jsonl(file)[0]:
            step, seed, manifest = record.get("step"), record.get("seed"), str(record.get("manifest"))
            if not isinstance(step, int) or not isinstance(seed, int) or not isinstance(record.get("scores"), dict):
                continue
            key, records = (step, str(record.get("prompt")), seed), by_manifest.setdefault(manifest, {})
            scores = {**records.get(key, {}).get("scores", {}), **record["scores"]}  # a reward that was added later
            records[key] = {**record, "scores": scores}
            newest[step] = manifest
        clips = {
            key: record
            for step, manifest in newest.items()
            for key, record in by_manifest[manifest].items()
            if key[0] == step
        }
        if clips:
            yield Watched(run, file.parent.name, file.parent, clips, None if best is None else step_of(best))
