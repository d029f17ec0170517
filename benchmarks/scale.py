"""What grows with the number of processes, simulated: 8 to 1024 of them, of which this process is rank 0.

    python benchmarks/scale.py                              # LTX-Video, minutes
    python benchmarks/scale.py --processes 8 64 --depth 2   # of fewer blocks
    python benchmarks/scale.py --starts 1000 10000          # clips: what real processes of one machine read at a start

The network is the published one without weights, full finetuned in bf16 with AdamW and FSDP2, over all processes or
within groups of eight. The code that splits it, chooses clips, and shares out files is that of a run; PyTorch's own
hooks gather and reduce, under its backend that exchanges nothing, and their tensors are counted. No network and no GPU
is measured. For `--starts`, two processes check a run with one tiny clip under many names, before they join; and one
does it alone, as each did before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from count_sharded import Processes, count_sharded
from published_networks import NETWORKS, published_model

from finetrainers.config.load import load_config
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.loading.batch_sampler import BatchSampler
from finetrainers.data.loading.position import Segment
from finetrainers.memory.count import StepShape
from finetrainers.models.registry import build_tiny, get_family
from finetrainers.models.spec import ModelSpec, weight_files
from finetrainers.parallel.fsdp import shard
from finetrainers.plan.trainable import make_trainable
from finetrainers.rundir.manifest import share_of
from finetrainers.training.trained_weights import LEAST_FILE_BYTES
from finetrainers.utils.video import write_mp4

GIB = 2**30
NUM_CLIPS = 100_000
HEADINGS = (
    "processes", "groups of", "clips of a step, ms", "gathered, GiB", "reduced, GiB", "read at start, GiB",
    "before", "host memory of rank 0 at a save, GiB", "before",
)  # fmt: skip


@dataclass
class Exchanged:
    """Bytes that rank 0 gets of the others in a step: weights that it gathers, gradients that it reduces."""

    gathered: int = 0
    reduced: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the collectives of FSDP2 within the block; as a ring exchanges them."""

        def gather(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, **_: Any) -> None:
            self.gathered += output_tensor.nbytes - input_tensor.nbytes

        def scatter(output: Tensor, input: Tensor, group: Any = None, **_: Any) -> None:  # noqa: A002 - torch's name
            self.reduced += input.nbytes - output.nbytes

        def reduce(tensor: Tensor, group: Any = None, **_: Any) -> None:
            size = dist.get_world_size(group)
            self.reduced += 2 * tensor.nbytes * (size - 1) // size

        with (
            mock.patch.object(dist, "all_gather_single", gather),
            mock.patch.object(dist, "reduce_scatter_single", scatter),
            mock.patch.object(dist, "all_reduce", reduce),
        ):
            yield


def load(name: str, folder: Path, depth: int | None) -> tuple[ModelSpec, nn.Module, Any]:
    """A published network on the meta device, all of whose weights are trained, and its configuration."""
    network = NETWORKS[name]
    build_tiny(network.family, folder / "tiny")
    published_model(folder / "tiny", folder / "model", network)
    config = load_config(
        model_name=network.family, pretrained_model_name_or_path=str(folder / "model"), training_type="full-finetune",
        data_root="absent", output_dir="absent",
    )  # fmt: skip
    spec = get_family(network.family).load(config.model)
    meta = spec.transformer_on_meta()
    for blocks in spec.blocks:
        setattr(meta, blocks, getattr(meta, blocks)[:depth])
    make_trainable(meta, config.training)
    return spec, meta, network


def milliseconds(step: Callable[[int], object], number: int = 5) -> float:
    """CPU milliseconds of a step, the first one left out."""
    step(0)
    began = time.process_time()
    for k in range(number):
        step(k + 1)
    return 1e3 * (time.process_time() - began) / number


def of_clips(processes: int) -> float:
    """Milliseconds in which rank 0 finds out which clips its step has."""
    sizes = ((17, 512, 512), (17, 512, 768))
    clips = [Clip(k, Path(f"{k}.mp4"), "", "video", sizes[k % 2], 24.0, 17, 24.0, 768, 512) for k in range(NUM_CLIPS)]
    sampler = BatchSampler(clips, Segment(0, 1, processes), seed=0)
    return milliseconds(lambda step: sampler.step(step, data_rank=0, data_size=processes))


def row(name: str, processes: int, group: int | None, *, depth: int | None, folder: Path) -> tuple[str, ...]:
    """One line of the table."""
    spec, meta, network = load(name, folder, depth)
    whole = {key: torch.empty(one.shape, device="meta") for key, one in meta.state_dict().items()}  # fp32
    geometry, exchanged = spec.facts.geometry, Exchanged()
    shape = StepShape((meta.config.out_channels, *geometry.denoised_shape(*network.bucket)), stored="checkpoint")
    with exchanged.counted():
        count_sharded(spec, meta, shape, Processes(processes, group_size=group), shard=shard)
    own = sum(parameter.to_local().numel() for parameter in meta.parameters())  # type: ignore[attr-defined]
    total = sum(tensor.numel() for tensor in whole.values())

    files = weight_files(whole, at_most=max(4 * -(-total // processes), LEAST_FILE_BYTES))
    sizes = {file: sum(whole[key].nbytes for key in keys) for file, keys in files.filename_to_tensors.items()}
    writes = sum(list(sizes.values())[::processes]) + 8 * own
    slices = {f"optimizer/{rank}": 8 * total // (group or processes) for rank in range(group or processes)}
    entries = {file: {"size": size} for file, size in {**sizes, **slices}.items()}
    read = max(sum(entries[file]["size"] for file in share_of(entries, rank, processes)) for rank in (0, processes - 1))
    numbers = (exchanged.gathered, exchanged.reduced, read, 12 * total, writes, 12 * total)
    return (
        str(processes), str(group or processes), f"{of_clips(processes):.3f}",
        *(f"{number / GIB:.3f}" for number in numbers)
    )  # fmt: skip


#: A process that is about to train: prints how often it opens (or lists) and examines what is below some folders.
_START = """
import json, os, sys

roots, counts = tuple(sys.argv[2:]), {"opened": 0, "examined": 0}

def seen(kind, path):
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(roots):
        counts[kind] += 1

opening = ("open", "os.scandir", "os.listdir")
sys.addaudithook(lambda event, values: seen("opened", values[0]) if event in opening else None)
stat = os.stat
os.stat = lambda path, *options, **named: (seen("examined", path), stat(path, *options, **named))[1]

from finetrainers.config.load import load_config
from finetrainers.plan.ready import examine_weights, get_ready

examine_weights(get_ready(load_config(**json.loads(sys.argv[1]))))
print(json.dumps(counts))
"""


def starts(processes: int, options: dict[str, Any], roots: Sequence[Path]) -> list[dict[str, int]]:
    """Files that each of so many processes of this machine opens and examines until it joins the others."""
    started = []
    for rank in range(processes):
        company = {
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "MASTER_PORT": os.getpid(),
        }
        environment = {**os.environ, **{name: str(value) for name, value in company.items()}}
        command = [sys.executable, "-c", _START, json.dumps(options), *map(str, roots)]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def table_of_starts(numbers: Sequence[int]) -> Iterator[str]:
    """A first start, when nothing is known of the clips, and a later one."""
    headings = "clips", "start", "opened by the first", "examined", "opened by another", "examined", "before: by each"
    yield f"| {' | '.join(headings)} | examined |"
    yield "|---" * 8 + "|"
    for clips in numbers:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            build_tiny("ltx_video", folder / "model")
            write_mp4(folder / "clip.mp4", np.zeros((9, 64, 64, 3), np.uint8), fps=8)
            data = folder / "data"
            data.mkdir()
            for k in range(clips):
                (data / f"{k}.mp4").hardlink_to(folder / "clip.mp4")
                (data / f"{k}.txt").write_text(f"clip {k}")
            options = {
                "model_name": "ltx_video", "pretrained_model_name_or_path": str(folder / "model"),
                "data_root": str(data),
                "video_resolution_buckets": ["9x64x64"], "output_dir": str(folder / "run"),
            }  # fmt: skip
            for start in ("first", "later"):
                pair, alone = (
                    starts(count, {**options, "probe_dir": str(folder / f"probes-{count}")}, [folder])
                    for count in (2, 1)
                )
                cells = [str(one[kind]) for one in (*pair, *alone) for kind in ("opened", "examined")]
                yield f"| {clips} | {start} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="LTX-Video", choices=sorted(NETWORKS))
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--depth", type=int, help="blocks of each kind; default: all")
    parser.add_argument("--starts", type=int, nargs="+", metavar="CLIPS", help="count files read at a start instead")
    options = parser.parse_args(arguments)
    if options.starts:
        for line in table_of_starts(options.starts):
            print(line, flush=True)
        return
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for group in (None, 8):
        for processes in options.processes:
            with tempfile.TemporaryDirectory() as folder:
                cells = row(options.model, processes, group, depth=options.depth, folder=Path(folder))
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
