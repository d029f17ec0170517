"""Published memory figures of CogVideoX finetuning, beside what the estimate says and what counting gives.

    python benchmarks/memory_seed_table.py            # prints the table and the errors, in about a minute
    python benchmarks/memory_seed_table.py --write    # writes it into docs/reference/memory-estimate.md

The figures were published by an earlier version of finetrainers, for 49 frames of 480x720 on A100 GPUs of 80 GB, with
latents and text embeddings encoded beforehand. The runs are estimated and counted with the dtypes that they had: bf16
weights, adapters and gradients, and optimizer state of the weights' dtype. Nothing runs on a GPU here.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from published_networks import NETWORKS, published_repository  # noqa: E402

from finetrainers.config.load import load_config  # noqa: E402
from finetrainers.memory.count import StepShape, count_step  # noqa: E402
from finetrainers.memory.estimate import GIB, Workload, estimate  # noqa: E402
from finetrainers.models.registry import build_tiny, get_family  # noqa: E402
from finetrainers.parallel.sharding import WHOLE, ShardingSpec  # noqa: E402
from finetrainers.plan.trainable import make_trainable  # noqa: E402
from finetrainers.utils.logs import quiet_progress_bars  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "memory-estimate.md"
_MARKS = ("<!-- table -->", "<!-- end of table -->")

#: Kind of training and optimizer, checkpointing, clips of a batch, then for each model and rank the published figures
#: in GiB: before training, before validation, after validation, after testing. Of DeepSpeed's runs the rank was not
#: published.
_FIGURES = """
lora adamw no 1
2b 16: 12.945 43.764 46.918 24.234 | 2b 64: 13.035 44.314 47.469 24.469 | 2b 256: 13.095 45.826 48.990 25.543
lora adamw yes 1
2b 16: 12.945 12.945 21.121 24.234 | 2b 64: 13.036 13.035 21.564 24.500 | 2b 256: 13.094 13.095 22.344 25.537
5b 16: 19.742 19.742 28.746 38.123 | 5b 64: 20.006 20.818 30.338 38.738 | 5b 256: 20.771 22.119 31.939 41.537
lora adamw yes 4
2b 16: 12.945 21.803 21.814 24.322 | 2b 64: 13.035 22.254 22.254 24.572 | 2b 256: 13.094 22.020 22.033 25.574
5b 16: 19.742 46.492 46.492 38.197 | 5b 64: 20.006 47.805 47.805 39.365 | 5b 256: 20.771 47.268 47.332 41.008
lora 8-bit no 1
2b 16: 12.945 43.732 46.887 24.195 | 2b 64: 13.035 44.004 47.158 24.369 | 2b 256: 13.035 45.291 48.455 24.836
lora 8-bit yes 1
2b 16: 12.945 12.945 21.430 24.195 | 2b 64: 13.035 13.035 21.297 24.357 | 2b 256: 13.035 13.035 21.625 24.869
5b 16: 19.742 19.742 28.602 38.049 | 5b 64: 20.006 20.818 29.359 38.520 | 5b 256: 20.771 21.352 30.727 39.596
lora 8-bit yes 4
2b 16: 12.945 21.734 21.775 24.281 | 2b 64: 13.036 21.941 21.941 24.445 | 2b 256: 13.094 22.020 22.266 24.943
5b 16: 19.742 46.320 46.326 38.104 | 5b 64: 20.006 46.820 46.820 38.588 | 5b 256: 20.771 47.920 47.980 40.002
lora offload no 1
2b 16: 12.945 43.705 46.859 24.180 | 2b 64: 13.035 43.916 47.070 24.234 | 2b 256: 13.095 44.947 48.111 24.607
lora offload yes 1
2b 16: 12.945 12.945 21.395 24.180 | 2b 64: 13.035 13.035 20.887 24.266 | 2b 256: 13.095 13.095 21.391 24.635
5b 16: 19.742 19.742 28.533 38.002 | 5b 64: 20.006 20.006 29.107 38.785 | 5b 256: 20.771 20.771 30.078 39.559
lora offload yes 4
2b 16: 12.945 21.709 21.762 24.254 | 2b 64: 13.035 21.844 21.855 24.338 | 2b 256: 13.094 22.020 22.031 24.709
5b 16: 19.742 46.262 46.297 38.400 | 5b 64: 20.006 46.561 46.574 38.840 | 5b 256: 20.771 47.268 47.332 39.623
lora deepspeed yes 1
2b ?: 13.141 13.141 21.070 24.602 | 5b ?: 20.170 20.170 28.662 38.957
lora deepspeed yes 4
2b ?: 13.141 19.854 20.836 24.709 | 5b ?: 20.170 40.635 40.699 39.027
full adamw yes 1
2b -: 16.396 33.934 43.848 37.520 | 5b -: 30.061 OOM OOM OOM
full adamw yes 4
2b -: 16.396 38.281 48.341 37.544 | 5b -: 30.061 OOM OOM OOM
full 8-bit yes 1
2b -: 16.396 16.447 27.555 27.156 | 5b -: 30.061 52.826 58.570 49.541
full 8-bit yes 4
2b -: 16.396 27.930 27.990 27.326 | 5b -: 16.396 66.648 66.705 48.828
full offload yes 1
2b -: 16.396 16.396 26.100 23.832 | 5b -: 30.061 39.359 48.307 37.947
full offload yes 4
2b -: 16.396 27.916 27.975 23.936 | 5b -: 30.061 66.607 66.668 38.061
full deepspeed yes 1
2b -: 13.111 13.111 20.328 23.867 | 5b -: 19.762 19.998 27.697 38.018
full deepspeed yes 4
2b -: 13.111 21.188 21.254 23.869 | 5b -: 19.762 43.465 43.531 38.082
"""

#: Bytes of optimizer state on the GPU for each trained bf16 weight.
_STATE = {"adamw": 4.0, "8-bit": 2.0, "offload": 0.0, "deepspeed": 0.0}
#: Two GPUs, ZeRO-2 with the optimizer's state and fp32 weights in host memory.
_ZERO = ShardingSpec(gradients=2, optimizer=2, zero_stage=2, optimizer_on_host=True)
_RANK_OF_DEEPSPEED = 64
_LOADING, _CLOSE = 0.02, 0.05


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        kind: `lora` or `full`.
        optimizer: `adamw`, `8-bit` (bitsandbytes), `offload` (torchao, gradients too), `deepspeed`.
        model: `2b` or `5b`.
        rank: of the LoRA, as published.
        checkpointing, batch: options.
        figures: before training, before and after validation, after testing; None: it ran out of 80 GB.
    """

    kind: str
    optimizer: str
    model: str
    rank: str
    checkpointing: bool
    batch: int
    figures: tuple[float | None, ...]

    @property
    def peak(self) -> float | None:
        """The published peak of training: before validation."""
        return self.figures[1]

    @property
    def is_loading(self) -> bool:
        """Whether training took no more than loading before it."""
        before = self.figures[0]
        return self.peak is not None and before is not None and self.peak <= before * (1 + _LOADING)


def rows() -> list[Row]:
    """All published runs."""
    found: list[Row] = []
    for line in _FIGURES.strip().splitlines():
        if ":" not in line:
            kind, optimizer, checkpointing, batch = line.split()
            continue
        for cell in line.split("|"):
            name, figures = cell.split(":")
            model, rank = name.split()
            numbers = tuple(None if text == "OOM" else float(text) for text in figures.split())
            found.append(Row(kind, optimizer, model, rank, checkpointing == "yes", int(batch), numbers))
    return found


@cache
def _network(model: str, kind: str, rank: int) -> tuple[Any, Any, Any, tuple[int, int, int]]:
    """The family's description, the network on the meta device with its adapter, the geometry and the clip."""
    network = NETWORKS[f"CogVideoX-{model}"]
    with tempfile.TemporaryDirectory() as folder:
        tiny, repository = Path(folder, "tiny"), Path(folder, "published")
        build_tiny(network.family, tiny, **network.tiny)
        published_repository(tiny, repository, network.config)
        config = load_config(
            model_name=network.family, pretrained_model_name_or_path=str(repository), rank=rank,
            training_type="full-finetune" if kind == "full" else "lora",
        )  # fmt: skip
        family = get_family(network.family)
        geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
        meta = spec.transformer_on_meta()
        make_trainable(meta, config.training)
        return spec, meta, geometry, network.bucket


def _of(row: Row) -> tuple[Any, Any, Any, tuple[int, int, int]]:
    rank = _RANK_OF_DEEPSPEED if row.rank == "?" else 1 if row.rank == "-" else int(row.rank)
    return _network(row.model, row.kind, rank)


def estimated(row: Row) -> float:
    """The estimate's peak of a training step, in GiB."""
    spec, meta, geometry, bucket = _of(row)
    trained = sum(p.numel() for p in meta.parameters() if p.requires_grad)
    kind = "full-finetune" if row.kind == "full" else "lora"
    return estimate(
        Workload(
            frozen_bytes=2.0 * sum(p.numel() for p in meta.parameters() if not p.requires_grad),
            num_trainable=trained,
            num_blocks=tuple(len(getattr(meta, name)) for name in spec.blocks),
            hidden=spec.width(meta),
            num_tokens=geometry.num_tokens(*bucket),
            batch_size=row.batch,
            trainable_bytes=2,
            optimizer_bytes=_STATE[row.optimizer],
            stored="checkpoint" if row.checkpointing else "none",
            activations=spec.activations.get(f"{kind}-bf16", spec.activations[kind]),
            gradients_stay=row.optimizer != "offload",
            split=_ZERO if row.optimizer == "deepspeed" else WHOLE,
            casts=False,
        )
    ).total


def counted(row: Row) -> float | None:
    """The same, counted on fake tensors; None of several processes."""
    if row.optimizer == "deepspeed":
        return None
    _, meta, _, _ = _of(row)
    numbers = sum(p.numel() for p in meta.parameters())
    trained = sum(p.numel() for p in meta.parameters() if p.requires_grad)
    forward, backward = _counted(
        row.model, row.kind, row.rank, row.checkpointing, row.batch, row.optimizer != "offload"
    )
    return (2 * numbers + _STATE[row.optimizer] * trained + max(forward, backward)) / GIB


@cache
def _counted(
    model: str, kind: str, rank: str, checkpointing: bool, batch: int, gradients_stay: bool
) -> tuple[float, float]:
    spec, meta, geometry, bucket = _network(model, kind, 1 if rank == "-" else int(rank))
    latent = (meta.config.out_channels, *geometry.denoised_shape(*bucket))
    found = count_step(
        spec,
        meta,
        StepShape(
            latent,
            batch,
            "checkpoint" if checkpointing else "none",
            trained=torch.bfloat16,
            gradients_stay=gradients_stay,
        ),
    )
    return found.forward, found.backward


def why(row: Row, ratio: float | None) -> str:
    """Why the estimate is not the published figure, in a word that the page explains."""
    if ratio is None:
        return "copies"
    if row.is_loading:
        return "loading"
    if abs(ratio - 1) <= _CLOSE:
        return ""
    if row.kind == "full" and row.optimizer != "deepspeed":
        return "copies" if row.optimizer == "adamw" else "cached"
    return "reserved"


def table(*, counting: bool = True) -> Iterator[tuple[Row, list[str]]]:
    """Each run with the cells of its row; without counting, the column is empty."""
    for row in rows():
        planned, found = estimated(row), counted(row) if counting else None
        ratio = None if row.peak is None else planned / row.peak
        rank = {"?": "?", "-": "full"}.get(row.rank, f"r{row.rank}")
        cells = [
            row.model, rank, row.optimizer, "yes" if row.checkpointing else "no", str(row.batch),
            *("OOM" if figure is None else f"{figure:.1f}" for figure in row.figures),
            f"{planned:.1f}", "" if found is None else f"{found:.1f}", "" if ratio is None else f"{ratio:.2f}",
            why(row, ratio),
        ]  # fmt: skip
        yield row, cells


HEADINGS = (
    "CogVideoX", "trained", "optimizer", "checkpointing", "batch", "before training", "before validation",
    "after validation", "after testing", "estimate", "counted", "ratio", "why",
)  # fmt: skip


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """The table of the page."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the errors; with `--write`, put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args(argv)
    quiet_progress_bars()
    found = list(table())
    text = markdown([cells for _, cells in found])
    print(text)
    both = [(float(cells[9]) / float(cells[10]) - 1, cells) for _, cells in found if cells[10]]
    worst = max(both, key=lambda one: abs(one[0]))
    print(f"\nestimate against counting: {len(both)} runs, at most {100 * worst[0]:+.1f} % ({' '.join(worst[1][:5])})")
    ratios = [float(cells[11]) for row, cells in found if cells[11] and not row.is_loading]
    print(
        f"estimate / published, where training took more than loading: {len(ratios)} runs, {min(ratios)} to "
        f"{max(ratios)}"
    )
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            re.sub(f"{_MARKS[0]}.*{_MARKS[1]}", f"{_MARKS[0]}\n\n{text}\n\n{_MARKS[1]}", page, flags=re.S),
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
