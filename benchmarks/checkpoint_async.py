"""How long a checkpoint holds training up: written at once, and in the background; and what the steps meanwhile take.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_async.py
    python benchmarks/checkpoint_async.py --layers 8 --width 512 --rounds 1

A stack of linear layers is trained with AdamW, and after every few steps its state is saved twice through the toolkit's
`save_checkpoint`: first while training waits, then with `--async_checkpointing`. Both have to give the same bytes, or
nothing is reported. The memory of the copy is got from the system after the first step, as in a run, and is used again
by each save; what the first save waited is a column of its own.

What steps take meanwhile is given on the clock and in CPU time of the training thread. On the clock it also says how
busy the processor was with the writing thread and with other programs. CPU time leaves that out: it says how much the
writer slows a step that has a core of its own, by shared caches and memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

from benchmarks.checkpoint_kills import make_background, make_state
from finetrainers.rundir.manifest import read_manifest
from finetrainers.training.checkpoints.save import reserve_memory, save_checkpoint


def timed(action: Any, *arguments: Any) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - started


def take_step(state: Any, *, width: int, batch: int) -> float:
    """One optimizer step; the seconds that it waited for the copy of the state."""
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(state.step))
    state.transformer(x).square().mean().backward()
    waited = state.staging.wait()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1
    return waited


class Saves:
    """One training, saved in two ways into two directories."""

    def __init__(self, root: Path, *, layers: int, width: int, batch: int) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.width, self.batch = width, batch
        self.at_once = make_state(root / "at once", network=network)
        self.at_once.optimizer.param_groups[0]["lr"] = 1e-6  # a stack this deep diverges easily, and is then refused
        in_background = make_state(root / "background", network=network, background=True)
        more = {"optimizer": self.at_once.optimizer, "is_last_step": False}
        self.background: Any = SimpleNamespace(**{**vars(in_background), **more})
        self.saves = make_background(root)
        self.blocked: dict[str, list[float]] = {"at once": [], "background": []}
        self.written: list[float] = []
        self.cpu: dict[str, list[float]] = {"at once": [], "background": []}
        self.steps: dict[str, list[tuple[float, float]]] = {"alone": [], "copying": [], "beside": []}

    def step(self, when: str) -> float:
        """Take a step, and note what it takes without waiting, on the clock and of a processor; the seconds of
        waiting."""
        started, cpu = time.perf_counter(), time.thread_time()
        waited = take_step(self.background, width=self.width, batch=self.batch)
        self.at_once.step = self.background.step
        self.steps[when].append((time.perf_counter() - started - waited, time.thread_time() - cpu))
        return waited

    def train_alone(self, steps: int) -> None:
        """Steps beside which nothing is written."""
        for _ in range(steps):
            self.step("alone")

    def save_at_once(self) -> None:
        """Training waits for all of it."""
        cpu = time.process_time()
        self.blocked["at once"].append(timed(save_checkpoint, self.at_once, self.saves))
        self.cpu["at once"].append(time.process_time() - cpu)

    def save_in_background(self) -> None:
        """Training waits where the next update would change what is still being copied, and goes on until all is
        written."""
        started, cpu = time.perf_counter(), time.process_time()
        blocked = timed(save_checkpoint, self.background, self.saves)
        main = time.thread_time()
        self.blocked["background"].append(blocked + self.step("copying"))
        self.saves.poll(self.saves.is_writing)
        while self.saves.in_flight:
            self.step("beside")
            self.saves.poll(self.saves.is_writing)
        self.written.append(time.perf_counter() - started)
        self.cpu["background"].append(time.process_time() - cpu - (time.thread_time() - main))

    def check(self) -> int:
        """Bytes of the newest checkpoint.

        Raises:
            RuntimeError: the two ways gave different bytes.
        """
        files = []
        for state in (self.at_once, self.background):
            newest = max((state.run_dir.root / "checkpoints").iterdir(), key=lambda path: int(path.name[5:]))
            files.append((newest.name, read_manifest(newest)["files"]))
        if files[0] != files[1]:
            raise RuntimeError(f"the two checkpoints differ: {files[0]} and {files[1]}")
        return sum(entry["size"] for entry in files[0][1].values())


def measure(saves: Saves, *, rounds: int, steps: int) -> int:
    """Save both ways after every few steps; bytes of a checkpoint."""
    saves.train_alone(1)  # makes the optimizer's state
    saves.steps["alone"].clear()
    reserve_memory(saves.background, saves.saves)
    size = 0
    for _ in range(rounds):
        saves.train_alone(steps)
        saves.save_at_once()
        saves.save_in_background()
        size = saves.check()
    return size


def report(saves: Saves, *, size: int, parameters: int) -> None:
    """Print the table."""
    first, *later = saves.blocked["background"]
    at_once, background = statistics.median(saves.blocked["at once"]), statistics.median(later or [first])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {parameters / 1e6:.0f} M weights with AdamW,")
    print(f"{size / 2**20:.0f} MiB a checkpoint, {len(saves.blocked['at once'])} saves of each kind\n")
    print("| save | training waits, s | least | most | the first | written after, s | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for way, wait, after in (
        ("at once", at_once, at_once),
        ("background", background, statistics.median(saves.written)),
    ):
        first, *later = saves.blocked[way]
        times = later or [first]
        cpu = statistics.median(saves.cpu[way])
        print(f"| {way} | {wait:.3f} | {min(times):.3f} | {max(times):.3f} | {first:.3f} | {after:.3f} | {cpu:.2f} |")
    print(f"\na save in the background holds training up for {background / at_once:.1%} of what one at once takes")
    print("\n| steps | count | median, s | longest, s | speed on the clock | CPU s of the step | speed by CPU time |")
    print("|---|---|---|---|---|---|---|")
    alone = [statistics.median(times) for times in zip(*saves.steps["alone"], strict=True)]
    names = {"alone": "alone", "copying": "while the state is copied", "beside": "while it is written"}
    for when, name in names.items():
        if steps := saves.steps[when]:
            clock, cpu = (statistics.median(one) for one in zip(*steps, strict=True))
            speeds = alone[0] / clock, alone[1] / cpu
            print(
                f"| {name} | {len(steps)} | {clock:.3f} | {max(steps)[0]:.3f} | {speeds[0]:.0%} | {cpu:.3f} | "
                f"{speeds[1]:.0%} |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step")
    parser.add_argument("--rounds", type=int, default=4, help="saves of each kind")
    parser.add_argument("--steps", type=int, default=5, help="steps between the saves")
    parser.add_argument("--directory", type=Path, default=None, help="where to save [a temporary one]")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        saves = Saves(Path(directory), layers=given.layers, width=given.width, batch=given.batch)
        size = measure(saves, rounds=given.rounds, steps=given.steps)
        report(saves, size=size, parameters=sum(p.numel() for p in saves.at_once.transformer.parameters()))


if __name__ == "__main__":
    main()
