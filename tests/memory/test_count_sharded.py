"""What processes share: the estimate against a count of PyTorch's own FSDP2 under a fake process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from count_sharded import Processes, count_sharded
from published_networks import NETWORKS, published_repository

from finetrainers.config.load import load_config
from finetrainers.memory.count import StepShape
from finetrainers.memory.estimate import GIB, estimate_for
from finetrainers.models.registry import get_family
from finetrainers.parallel.fsdp import shard
from finetrainers.parallel.sharding import expected_split
from finetrainers.plan.trainable import make_trainable


@dataclass(frozen=True)
class Case:
    """A sharded run: network, blocks of each list, what is trained, processes, and their options."""

    network: str
    depths: tuple[int, ...]
    training_type: str
    number: int
    checkpointing: bool = True
    keeps: bool = False
    group_size: int | None = None
    reshard: bool = True
    offload: bool = False


CASES = {
    "LTX-Video full": Case("LTX-Video", (4,), "full-finetune", 8),
    "LTX-Video LoRA": Case("LTX-Video", (4,), "lora", 2),
    "HunyuanVideo full": Case("HunyuanVideo", (4, 8), "full-finetune", 8),
    "HunyuanVideo LoRA": Case("HunyuanVideo", (2, 2), "lora", 4),
    "HunyuanVideo full, activations stored": Case("HunyuanVideo", (1, 2), "full-finetune", 8, checkpointing=False),
    "CogVideoX-5b full, whole gradients": Case("CogVideoX-5b", (8,), "full-finetune", 2, keeps=True),
    "CogVideoX-5b LoRA, activations stored": Case("CogVideoX-5b", (8,), "lora", 8, checkpointing=False),
    "groups": Case("LTX-Video", (4,), "full-finetune", 16, group_size=4),
    "groups, LoRA": Case("CogVideoX-5b", (8,), "lora", 16, group_size=4),
    "gathered until backward": Case("HunyuanVideo", (2, 4), "full-finetune", 8, reshard=False),
    "gathered until backward, LoRA": Case("LTX-Video", (6,), "lora", 4, reshard=False),
    "host": Case("HunyuanVideo", (2, 4), "full-finetune", 8, offload=True),
    "host, LoRA": Case("CogVideoX-5b", (8,), "lora", 4, offload=True),
    "host, whole gradients": Case("LTX-Video", (4,), "full-finetune", 4, keeps=True, offload=True),
    "host, groups, gathered until backward": Case(
        "CogVideoX-5b", (8,), "full-finetune", 8, group_size=4, reshard=False, offload=True
    ),
}


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_estimate_agrees_with_counting(
    case: Case,
    tiny_repo: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within 5 %, per process."""
    network = NETWORKS[case.network]
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path, network.config)
    config = load_config(
        model_name=network.family, pretrained_model_name_or_path=str(repo), rank=64,
        training_type=case.training_type, optimizer="adamw", mixed_precision="bf16",
        gradient_checkpointing=case.checkpointing, gradient_accumulation_steps=2 if case.keeps else 1,
        fsdp="hybrid" if case.group_size else "full", fsdp_group_size=case.group_size,
        fsdp_reshard_after_forward=case.reshard, fsdp_cpu_offload=case.offload, sync_each_batch=not case.keeps,
    )  # fmt: skip
    family = get_family(network.family)
    geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
    meta = spec.transformer_on_meta()
    for blocks, depth in zip(spec.blocks, case.depths, strict=True):
        setattr(meta, blocks, getattr(meta, blocks)[:depth])
    make_trainable(meta, config.training)
    monkeypatch.setenv("WORLD_SIZE", str(case.number))
    split = expected_split(config.parallel)
    planned = estimate_for(config, geometry, meta, spec=spec, bucket=network.bucket, split=split)

    shape = StepShape(
        (spec.latent_channels(meta), *geometry.denoised_shape(*network.bucket)),
        stored="checkpoint" if case.checkpointing else "none",
    )
    processes = Processes(
        case.number, not case.keeps, 2 if case.keeps else 1, group_size=case.group_size, reshard=case.reshard,
        offload=case.offload,
    )  # fmt: skip
    counted = count_sharded(spec, meta, shape, processes, shard=shard) / GIB
    assert planned.total - planned.parts["optimizer state"] == pytest.approx(counted, rel=0.05)
    assert not torch.distributed.is_initialized()
