"""How fast files are checked, and how fast a start is whose files were checked before.

    OMP_NUM_THREADS=1 python benchmarks/data_check.py
    OMP_NUM_THREADS=1 python benchmarks/data_check.py --items 1000 --clips 20

Throughput: small clips, checked by their headers, by decoding all of them, and once more with everything remembered.
Start: a .jsonl of many lines, each with a name of its own, all known as a check leaves them, planned in a fresh process
and written to a manifest. Seconds of the clock depend on what else runs; those of the processor do not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from finetrainers.config.load import load_config
from finetrainers.data.inspect.file_facts import Facts, FileFacts
from finetrainers.data.inspect.probe import probe
from finetrainers.data.inspect.probe_all import ProbeOptions
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.models.registry import get_family
from finetrainers.utils.video import write_mp4

_CONFIG = """model_name = "ltx_video"
pretrained_model_name_or_path = "some/model"
dataset_file = "{file}"
probe_dir = "{probes}"
video_resolution_buckets = ["9x32x64", "9x64x32", "9x32x32"]
"""
_START = """
import json, sys, time
started = time.perf_counter()
from pathlib import Path
from finetrainers.config.load import load_config
from finetrainers.data.inspect import probe_all
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.models.registry import get_family
opened = 0
def count(*arguments, probe=probe_all.probe, **keywords):
    global opened
    opened += 1
    return probe(*arguments, **keywords)
probe_all.probe = count
config = load_config(Path(sys.argv[1]))
plan = survey_dataset(config, get_family(config.model.model_name).facts.geometry).checked()
plan.write(Path(sys.argv[1]).with_name("manifest.jsonl"))
total = time.perf_counter() - started
status = Path("/proc/self/status").read_text()  # getrusage would tell of the parent, too
memory = int(status.partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps({"clips": plan.count, "opened": opened, "cpu": time.process_time(), "total": total, "mib": memory}))
"""


def make_clip(path: Path, *, frames: int, height: int, width: int) -> None:
    """A clip of a moving pattern."""
    y, x = np.mgrid[:height, :width]
    pictures = [np.stack([(x + 3 * t) % 256, (y + 5 * t) % 256, (x * y // 64 + t) % 256], -1) for t in range(frames)]
    write_mp4(path, np.stack(pictures).astype(np.uint8), fps=24)


def throughput(root: Path, *, clips: int) -> list[tuple[str, int, float]]:
    """Kind of check, items, and seconds, without the start of the command."""
    (root / "clips").mkdir(parents=True)
    make_clip(root / "first.mp4", frames=49, height=480, width=704)
    content = (root / "first.mp4").read_bytes()
    for k in range(clips):
        # A box that players skip gives each clip a content of its own.
        extra = k.to_bytes(4, "big")
        (root / "clips" / f"{k}.mp4").write_bytes(content + (8 + len(extra)).to_bytes(4, "big") + b"free" + extra)
        (root / "clips" / f"{k}.txt").write_text(f"pattern {k}")
    config = load_config(
        model_name="ltx_video",
        pretrained_model_name_or_path="some/model",
        data_root=str(root / "clips"),
        probe_dir=str(root / "probes"),
        video_resolution_buckets=["17x480x704"],
    )
    geometry = get_family(config.model.model_name).facts.geometry

    def timed(what: str, *, decode: bool) -> tuple[str, int, float]:
        started = time.perf_counter()
        survey = survey_dataset(config, geometry, options=ProbeOptions(decode=decode, duplicates=True))
        seconds = time.perf_counter() - started
        assert survey.problem is None
        assert not any(item.marks == ("same_content",) for item in survey.items)
        return what, clips, seconds

    return [
        timed("headers, and contents compared", decode=False),
        timed("the same, remembered", decode=False),
        timed("every frame decoded", decode=True),
        timed("the same, remembered", decode=True),
    ]


def start(root: Path, *, items: int, repeats: int) -> list[dict[str, float]]:
    """What a start takes whose files are known, each in a process of its own."""
    data = root / "many"
    data.mkdir(parents=True)
    make_clip(root / "one.mp4", frames=25, height=32, width=64)
    found = probe(root / "one.mp4")
    memory = FileFacts.for_dataset(root / "probes", data)
    lines, names = [], []
    for k in range(items):
        name = f"{k // 1000:03d}/{k}.mp4"
        if k % 1000 == 0:  # the others of its folder are names of the same file, as file systems bound those
            first = data / name
            first.parent.mkdir()
            shutil.copy(root / "one.mp4", first)
        else:
            (data / name).hardlink_to(first)
        names.append(name)
        lines.append(json.dumps({"video": name, "text": f"a pattern that moves, number {k}, " * 4}))
    for name in names:  # now that no further name of a file changes its times
        memory.store(data / name, (data / name).stat(), Facts(header=found))
    (data / "captions.jsonl").write_text("\n".join(lines) + "\n")
    config = root / "start.toml"
    config.write_text(_CONFIG.format(file=data / "captions.jsonl", probes=root / "probes"))
    command = [sys.executable, "-c", _START, str(config)]
    return [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        for _ in range(repeats)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables; 1 if a start takes too long, too much memory, or opens a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000, help="lines of the start's .jsonl")
    parser.add_argument("--clips", type=int, default=100, help="clips of the throughput")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as directory:
        print("| check of 49 frames of 704x480 | items | s | items/s |\n|---|---:|---:|---:|")
        for what, count, seconds in throughput(Path(directory) / "throughput", clips=arguments.clips):
            print(f"| {what} | {count} | {seconds:.2f} | {count / seconds:.0f} |")
        starts = start(Path(directory) / "start", items=arguments.items, repeats=arguments.repeats)
    print("\n| start | items | files opened | s | s of the processor | memory, MiB |\n|---|---:|---:|---:|---:|---:|")
    for number, row in enumerate(starts, start=1):
        print(
            f"| {number} | {row['clips']} | {row['opened']} | {row['total']:.2f} | {row['cpu']:.2f} | {row['mib']:.0f} "
            f"|"
        )
    fine = all(row["cpu"] < 5 and row["mib"] < 1024 and row["opened"] == 0 for row in starts)
    print("\nwithin 5 s of the processor and 1 GiB" if fine else "\nnot within 5 s of the processor and 1 GiB")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
