"""Whether memory stays flat while epochs go by.

    OMP_NUM_THREADS=1 python benchmarks/data_memory.py

Trains the embedded model for some epochs on clips of its world, decoded by worker processes and from the cache, and
notes after each epoch what the process and its workers hold. The first epochs fill what is filled once; from the third
on it may not grow by more than the limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

import psutil  # noqa: E402

from finetrainers import load_config, train  # noqa: E402
from finetrainers.data.loading.training_data import TrainingData  # noqa: E402
from finetrainers.demo.data import training_scenes, write_clips  # noqa: E402
from finetrainers.utils.logs import quiet_progress_bars  # noqa: E402

#: Memory may grow by this much, in MiB, from the third epoch to the last: allocators do not give everything back.
LIMIT_MIB = 16.0
_SETTLED = 2  # epochs before that


def held_mib() -> float:
    """Memory of this process and of its children, what they share counted once for each."""
    process = psutil.Process()
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) / 2**20


def memory_by_epoch(directory: Path, *, epochs: int, clips: int, batch_size: int, **options: Any) -> list[float]:
    """Train, and say what was held at the end of each epoch.

    Args:
        directory: has the clips in `clips`.
        epochs, clips, batch_size: how long an epoch is, and how many there are.
        options: of the run.
    """
    held: list[float] = []
    per_epoch = -(-clips // batch_size)
    original = TrainingData.steps

    def watched(self: TrainingData, start: int) -> Any:
        for number, batches in enumerate(original(self, start)):
            if number and number % per_epoch == 0:
                held.append(held_mib())
            yield batches

    TrainingData.steps = watched  # type: ignore[method-assign]
    try:
        train(
            load_config(
                model_name="ltx_video",
                pretrained_model_name_or_path="demo://ltx",
                dataset_file=str(directory / "clips" / "captions.jsonl"),
                text_encoder_dtype="fp32",
                transformer_dtype="fp32",
                vae_dtype="fp32",
                rank=16,
                lora_alpha=16,
                batch_size=batch_size,
                train_steps=epochs * per_epoch + 1,
                checkpointing_steps=0,
                **options,
            )
        )
    finally:
        TrainingData.steps = original  # type: ignore[method-assign]
    return held


def table(directory: Path, *, epochs: int, clips: int) -> tuple[list[str], float]:
    """A row for each way of getting batches, and the most that any grew by, in MiB."""
    write_clips(directory / "clips", training_scenes(clips, seed=0, look="plain", motions=None))
    rows = ["| batches | " + " | ".join(f"epoch {k}" for k in range(1, epochs + 1)) + " | grown by |"]
    rows.append("|---" * (epochs + 2) + "|")
    worst = 0.0
    for what, options in (
        ("decoded, 2 workers", {"dataloader_num_workers": 2}),
        ("from the cache", {"precompute_conditions": True}),
    ):
        held = memory_by_epoch(
            directory, epochs=epochs, clips=clips, batch_size=4, output_dir=str(directory / what.replace(" ", "-")),
            **options
        )  # fmt: skip
        grown = max(held[_SETTLED:]) - held[_SETTLED]
        worst = max(worst, grown)
        rows.append(f"| {what}, MiB | {' | '.join(f'{one:.0f}' for one in held)} | {grown:.1f} |")
    return rows, worst


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if memory grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--clips", type=int, default=48)
    arguments = parser.parse_args(argv)
    if arguments.epochs <= _SETTLED:
        parser.error(f"give more than {_SETTLED} epochs")
    quiet_progress_bars()
    with tempfile.TemporaryDirectory() as directory:
        rows, worst = table(Path(directory), epochs=arguments.epochs, clips=arguments.clips)
    print(*rows, sep="\n")
    print(f"\nmost grown from epoch {_SETTLED + 1} on: {worst:.1f} MiB (limit: {LIMIT_MIB:g})")
    return int(worst > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
