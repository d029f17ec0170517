"""What precomputed data costs a run: how long a step waits for it, and how long a start takes with a large cache.

    OMP_NUM_THREADS=1 python benchmarks/data_cache.py --wait
    OMP_NUM_THREADS=1 python benchmarks/data_cache.py --startup --entries 100000

Each prints Markdown tables. The first trains the embedded model on clips of its world, with clips decoded and encoded
while training and with the cache, with and without worker processes, and measures the time within which the trainer
waits for its next batches; it fails if that is 2 % of a step or more with the cache. The second makes so many small
entries and files, and times, each in a process of its own, what a start asks of them, beside what it would be without
the index.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from finetrainers import load_config, train
from finetrainers.data.cache.store import TensorCache
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.data.loading.training_data import TrainingData
from finetrainers.demo.data import training_scenes, write_clips
from finetrainers.utils.logs import quiet_progress_bars

TARGET = 0.02
_WARM_UP = 5  # steps that are not counted
#: Run in a process of its own; prints seconds and the memory in MiB that is in use afterwards.
_START = """
import json, os, sys, time
from pathlib import Path
from finetrainers.data.cache.store import TensorCache
from finetrainers.data.inspect.file_facts import FileFacts
from hashlib import sha256
what, directory, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
keys = [sha256(str(k).encode()).hexdigest() for k in range(count)]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
before, started = resident(), time.perf_counter()
cache = TensorCache(directory / "tensors", verified_bytes=0)
if what == "index":
    assert cache.missing(keys) == []
elif what == "headers":
    assert all(cache._opens(key) for key in keys)
elif what == "nothing there":
    assert len(cache.missing(key[::-1] for key in keys)) == count
else:
    digests = FileFacts(directory / "digests")
    assert all(digests.digest(cache.path(key)) for key in keys)
print(json.dumps([time.perf_counter() - started, resident() - before]))
"""


@dataclass(frozen=True)
class Waits:
    """Of a training run, step by step: seconds spent waiting for batches, and seconds in all."""

    waited: list[float]
    whole: list[float]

    @property
    def share(self) -> float:
        return sum(self.waited) / sum(self.whole)


def measure_waits(directory: Path, *, steps: int, **options: Any) -> Waits:
    """Train and watch the source of batches."""
    waited: list[float] = []
    ends: list[float] = []
    original = TrainingData.steps

    def watched(self: TrainingData, start: int) -> Iterator[Any]:
        batches = original(self, start)
        while True:
            started = time.perf_counter()
            batch = next(batches)
            ends.append(time.perf_counter())
            waited.append(ends[-1] - started)
            yield batch

    TrainingData.steps = watched  # type: ignore[method-assign, assignment]
    try:
        train(load_config(**run_options(directory, steps=steps + _WARM_UP + 1, **options)))
    finally:
        TrainingData.steps = original  # type: ignore[method-assign]
    # From one batch to the next: the step on the first, and the wait for the second.
    whole = [b - a for a, b in pairwise(ends)]
    return Waits(waited[_WARM_UP + 1 :], whole[_WARM_UP:])


def run_options(directory: Path, *, steps: int, **options: Any) -> dict[str, Any]:
    return {
        "model_name": "ltx_video",
        "pretrained_model_name_or_path": "demo://ltx",
        "dataset_file": str(directory / "clips" / "captions.jsonl"),
        "output_dir": str(directory / "-".join(f"{k}-{v}" for k, v in options.items())),
        **({"precompute_dir": str(directory / "cache")} if options["precompute_conditions"] else {}),
        "text_encoder_dtype": "fp32",
        "transformer_dtype": "fp32",
        "vae_dtype": "fp32",
        "rank": 16,
        "lora_alpha": 16,
        "train_steps": steps,
        "checkpointing_steps": 0,
        **options,
    }


def wait_table(*, steps: int, clips: int, batch_size: int, directory: Path) -> tuple[list[str], float]:
    """A row for each way of getting batches, and the largest share of waiting with the cache."""
    captions = write_clips(directory / "clips", training_scenes(clips, seed=0, look="plain", motions=None))
    assert captions.name == "captions.jsonl"
    rows = ["| batches | workers | step ms | waiting ms | longest ms | share |", "|---|---|---|---|---|---|"]
    worst = 0.0
    for precompute in (False, True):
        for workers in (0, 2):
            found = measure_waits(
                directory, steps=steps, precompute_conditions=precompute, dataloader_num_workers=workers,
                batch_size=batch_size
            )  # fmt: skip
            how = "from the cache" if precompute else "decoded and encoded"
            rows.append(
                f"| {how} | {workers} | {1e3 * statistics.mean(found.whole):.1f} | "
                f"{1e3 * statistics.mean(found.waited):.2f} | {1e3 * max(found.waited):.2f} | {found.share:.2%} |"
            )
            if precompute:
                worst = max(worst, found.share)
    return rows, worst


def fill(directory: Path, count: int) -> None:
    """A cache of so many small entries, whose files also serve as media files that are remembered."""
    cache = TensorCache(directory / "tensors")
    for k in range(count):
        cache.put(hashlib.sha256(str(k).encode()).hexdigest(), {"x": torch.zeros(64)}, {"kind": "text", "of": str(k)})
    digests = FileFacts(directory / "digests")
    time.sleep(3)  # what changed just now is not remembered
    digests.learn(cache.path(hashlib.sha256(str(k).encode()).hexdigest()) for k in range(count))


def startup_table(directory: Path, *, entries: int) -> list[str]:
    """A row for each thing that a start asks; files are in the system's memory, since they were written just now."""
    fill(directory, entries)
    rows = ["| what a start asks | seconds | memory MiB |", "|---|---|---|"]
    for what, title in (
        ("index", f"which of {entries} entries are there, from the index"),
        ("headers", "the same from each entry's header"),
        ("nothing there", f"which of {entries} others are there (none is)"),
        ("digests", f"the content of {entries} media files, remembered"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", _START, what, str(directory), str(entries)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        seconds, memory = json.loads(done.stdout)
        rows.append(f"| {title} | {seconds:.2f} | {memory:.0f} |")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 if batches from the cache are waited for too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--wait", action="store_true", help="how long steps wait for their batches")
    parser.add_argument("--startup", action="store_true", help="what a start costs with a large cache")
    parser.add_argument("--steps", type=int, default=60, help="steps measured each way")
    parser.add_argument("--clips", type=int, default=48, help="clips that are trained on")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--entries", type=int, default=100_000, help="entries of the large cache")
    arguments = parser.parse_args(argv)
    quiet_progress_bars()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    code = 0
    if arguments.wait:
        with tempfile.TemporaryDirectory() as directory:
            rows, worst = wait_table(
                steps=arguments.steps, clips=arguments.clips, batch_size=arguments.batch_size, directory=Path(directory)
            )
        print(*rows, sep="\n")
        print(f"\nlargest share with the cache: {worst:.2%} (target: less than {TARGET:.0%})\n")
        code = int(worst >= TARGET)
    if arguments.startup:
        with tempfile.TemporaryDirectory() as directory:
            print(*startup_table(Path(directory), entries=arguments.entries), sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
