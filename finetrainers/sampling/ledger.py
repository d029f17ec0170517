"""Ledger of a folder of samples: one JSON line for each clip, so that a second call samples only missing ones."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from finetrainers.training.sampling import sample_seed
from finetrainers.utils.files import append_jsonl
from finetrainers.utils.reading import read_jsonl

from .plan import Sample, SamplePlan

_NAME = "ledger"


class SampleIndex:
    """Index of the clips in a folder. Each process writes a separate file, and reads those of all."""

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        self.folder = folder
        self._file = folder / (f"{_NAME}.jsonl" if rank == 0 else f"{_NAME}.rank-{rank}.jsonl")
        self._names: dict[str, str] = {}  # key of the clip that has a name
        self._files: dict[str, str] = {}  # name of the clip that has a key
        for path in sorted(folder.glob(f"{_NAME}*.jsonl")):
            for record in read_jsonl(path)[0]:
                if isinstance(record.get("key"), str) and isinstance(record.get("file"), str):
                    self._index(record["key"], record["file"], record.get("bytes"))

    def _index(self, key: str, name: str, size: Any) -> None:
        self._names[name] = key
        file = self.folder / name
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have, in an edited ledger
            if file.is_file() and file.stat().st_size == size:
                self._files[key] = name

    def find(self, sample: Sample) -> Path | None:
        """Return the file of a clip, or None if it does not exist."""
        name = self._files.get(sample.key)
        return None if name is None else self.folder / name

    def names(self, plan: SamplePlan, samples: list[Sample]) -> dict[str, str]:
        """Return file names of clips by key; no name belongs to another clip."""
        names_by_key: dict[str, str] = {}
        for sample in samples:
            stem, number = plan.stem(sample), 1
            name = f"{stem}.mp4"
            while self._names.get(name, sample.key) != sample.key or (
                name not in self._names and (self.folder / name).exists()
            ):
                number += 1
                name = f"{stem}-{number}.mp4"
            self._names[name] = sample.key
            names_by_key[sample.key] = name
        return names_by_key

    def add(self, sample: Sample, name: str, *, seconds: float) -> None:
        """Record a clip whose file is written."""
        size = (self.folder / name).stat().st_size
        record = {
            "key": sample.key, "file": name, "bytes": size, "time": round(time.time(), 3), "seconds": round(seconds, 2),
            "generator_seed": sample_seed(sample.seed, str(sample.facts["prompt"])), **sample.facts,
        }  # fmt: skip
        append_jsonl(self._file, record)
        self._index(sample.key, name, size)
