"""What precomputed data costs a run: how long a step waits for it, and how long a start takes with a large cache.

    OMP_NUM_THREADS=1 python benchmarks/data_cache.py --wait
    OMP_NUM_THREADS=1 python benchmarks/data_cache.py --startup --entries 100000
    OMP_NUM_THREADS=1 python benchmarks/data_cache.py --fill

Each prints Markdown tables. The first trains the embedded model on clips of its world, with clips decoded and encoded while
training and with the cache, with and without worker processes, and measures the time within which the trainer waits for its
next batches; it fails if that is 2 % of a step or more with the cache. The second makes so many small entries and files, and
times, each in a process of its own, what a start asks of them, beside what it would be without the index. The third fills a
cache with clips of one video of 720p: decoding, encoding and writing each by itself, and together, with and without workers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.data import write_clip
from finetrainers import load_config, train
from finetrainers.config.sections import DataloaderSection, DataSection, ModelSection
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.cache.keys import CacheKeys, EncoderEntry
from finetrainers.data.cache.store import TensorCache
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.data.loading.precompute import precompute_video
from finetrainers.data.loading.training_data import TrainingData
from finetrainers.demo.data import training_scenes, write_clips
from finetrainers.models.registry import get_family
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
cache = TensorCache(directory / "tensors")
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
                directory, steps=steps, precompute_conditions=precompute, dataloader_num_workers=workers, batch_size=batch_size
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


def fill_table(directory: Path, *, clips: int, repeats: int) -> list[str]:
    """A row for each part of filling a cache, and for all of them together; each is done in turns."""
    spec = get_family("ltx_video").load(
        ModelSection(model_name="ltx_video", pretrained_model_name_or_path="demo://ltx", vae_dtype="fp32")
    )
    encoders = spec.load_clip_encoders()
    video = write_clip(directory / "clip.mp4")
    starts = range(0, 200, max(1, 200 // clips))
    todo = [
        Clip(k, video, "", "video", (49, 480, 832), 25.0, 250, 25.0, 1280, 720, start=starts[k]) for k in range(clips)
    ]

    def keys(name: str) -> CacheKeys:
        return CacheKeys(
            TensorCache(directory / name / "tensors"), FileFacts(directory / name / "digests"), "text", EncoderEntry("vae"),
            DataSection(), seed=0,
        )  # fmt: skip

    def encode(clip: torch.Tensor, _: object) -> dict[str, torch.Tensor]:
        return spec.encode_clip(encoders, clip, None)

    def together(workers: int, turn: int) -> None:
        name, loading = f"{workers} {turn}", DataloaderSection(dataloader_num_workers=workers)
        done = precompute_video(todo, encode, keys(name), OneProcess(), loading=loading)  # type: ignore[arg-type]
        assert done.encoded == clips
        shutil.rmtree(directory / name)

    pixels = keys("parts").pixels(todo[0])
    moments, one = encode(pixels[None], None), keys("one")
    ways: dict[str, Callable[[int], object]] = {
        "decoding and resizing": lambda _: [one.pixels(clip) for clip in todo],
        "the VAE": lambda _: [encode(pixels[None], None) for _ in todo],
        "writing": lambda _: [one.cache.put(one.video(clip), moments) for clip in todo],
        "all, without workers": partial(together, 0),
        "all, 1 worker": partial(together, 1),
        "all, 2 workers": partial(together, 2),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(repeats):
        for name, way in ways.items():
            wall, cpu = time.perf_counter(), sum(os.times()[:4])
            way(turn)
            taken[name].append((time.perf_counter() - wall, sum(os.times()[:4]) - cpu))
    rows = [f"| {clips} clips of 49x480x832 | wall s | CPU s |", "|---|---|---|"]
    for name, times in taken.items():
        wall, cpu = (statistics.median(one) for one in zip(*times, strict=True))
        rows.append(f"| {name} | {wall:.2f} | {cpu:.2f} |")
    return rows


class OneProcess:
    """The part of `Ranks` that filling a cache uses, for one process."""

    rank, world_size = 0, 1

    def raise_on_all_ranks(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def gather_objects(self, mine: list[Any]) -> list[Any]:
        return mine


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 if batches from the cache are waited for too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--wait", action="store_true", help="how long steps wait for their batches")
    parser.add_argument("--startup", action="store_true", help="what a start costs with a large cache")
    parser.add_argument("--fill", action="store_true", help="how long filling a cache takes, and its parts")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each way, for --fill [3]")
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
    if arguments.fill:
        with tempfile.TemporaryDirectory() as directory:
            print(*fill_table(Path(directory), clips=arguments.clips, repeats=arguments.repeats), sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
