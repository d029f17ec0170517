"""What processes share: the estimate against a count of PyTorch's own FSDP2 under a fake process group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from published_networks import NETWORKS, published_repository

from finetrainers.config.load import load_config
from finetrainers.engine.trainable import attach
from finetrainers.memory.count import StepShape
from finetrainers.memory.count_sharded import Processes, count_sharded
from finetrainers.memory.estimate import GIB, estimate_for
from finetrainers.models.registry import get_family
from finetrainers.parallel.fsdp import shard
from finetrainers.parallel.sharding import Split

#: Network, blocks of each list, what is trained, checkpointing, processes, whether gradients stay whole between micro-batches.
CASES = [
    ("LTX-Video", (4,), "full-finetune", True, 8, False),
    ("LTX-Video", (4,), "lora", True, 2, False),
    ("HunyuanVideo", (4, 8), "full-finetune", True, 8, False),
    ("HunyuanVideo", (2, 2), "lora", True, 4, False),
    ("HunyuanVideo", (1, 2), "full-finetune", False, 8, False),
    ("CogVideoX-5b", (8,), "full-finetune", True, 2, True),
    ("CogVideoX-5b", (8,), "lora", False, 8, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_estimate_agrees_with_counting(case: tuple, tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """Within 5 %, per process."""
    name, depths, training_type, checkpointing, number, keeps = case
    network = NETWORKS[name]
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path, network.config)
    config = load_config(
        model_name=network.family, pretrained_model_name_or_path=str(repo), training_type=training_type, rank=64,
        optimizer="adamw", mixed_precision="bf16", gradient_checkpointing=checkpointing,
        gradient_accumulation_steps=2 if keeps else 1,
    )  # fmt: skip
    family = get_family(network.family)
    geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
    meta = spec.transformer_on_meta()
    for blocks, depth in zip(spec.blocks, depths, strict=True):
        setattr(meta, blocks, getattr(meta, blocks)[:depth])
    attach(meta, config.training)
    split = Split(number, number, number, gathers=True, keeps_gradients=keeps)
    planned = estimate_for(config, geometry, meta, spec=spec, bucket=network.bucket, split=split)

    shape = StepShape(
        (meta.config.out_channels, *geometry.denoised_shape(*network.bucket)),
        stored="checkpoint" if checkpointing else "none",
    )
    counted = count_sharded(spec, meta, shape, Processes(number, not keeps, 2 if keeps else 1), shard=shard) / GIB
    assert planned.total - planned.parts["optimizer state"] == pytest.approx(counted, rel=0.05)
    assert not torch.distributed.is_initialized()
