"""What DeepSpeed's processes share: the estimate against a count of its own engine under a fake process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from count_zero import CountedZero, count_zero
from published_networks import NETWORKS, published_repository

from finetrainers.config.load import load_config
from finetrainers.memory.count import StepShape
from finetrainers.memory.estimate import GIB, MemoryPlan, estimate_for
from finetrainers.memory.gathered import zero_host_bytes
from finetrainers.memory.network_weights import NetworkWeights
from finetrainers.models.registry import get_family
from finetrainers.parallel.sharding import expected_split
from finetrainers.parallel.zero import complete_settings, make_plugin, split_weights, whole_weights
from finetrainers.plan.trainable import make_trainable

pytest.importorskip("deepspeed")


@dataclass(frozen=True)
class Case:
    """A run under ZeRO: network, blocks of each list, what is trained, stage, processes, and their options."""

    network: str
    depths: tuple[int, ...]
    training_type: str
    stage: int
    number: int
    offload: bool = False
    micro_batches: int = 1
    checkpointing: bool = True


#: A tenth of DeepSpeed's, so that few blocks fill it several times.
BUCKET = 50_000_000
CASES = {
    "1": Case("LTX-Video", (2,), "full-finetune", 1, 8),
    "2, two processes": Case("LTX-Video", (2,), "full-finetune", 2, 2, micro_batches=2),
    "2, LoRA": Case("CogVideoX-5b", (1,), "lora", 2, 8),
    "2, host": Case("LTX-Video", (1,), "full-finetune", 2, 8, offload=True),
    "3": Case("LTX-Video", (2,), "full-finetune", 3, 8),
    "3, host": Case("LTX-Video", (2,), "full-finetune", 3, 8, offload=True),
}


def planned_and_counted(
    case: Case, tiny_repo: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[MemoryPlan, CountedZero, float, NetworkWeights]:
    network = NETWORKS[case.network]
    repo = published_repository(tiny_repo(network.family, **network.tiny), folder, network.config)
    config = load_config(
        model_name=network.family, pretrained_model_name_or_path=str(repo), rank=64,
        training_type=case.training_type, optimizer="adamw", mixed_precision="bf16",
        gradient_checkpointing=case.checkpointing, gradient_accumulation_steps=case.micro_batches,
        deepspeed=True, zero_stage=case.stage, zero_offload=case.offload,
    )  # fmt: skip
    family = get_family(network.family)
    geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
    meta = spec.transformer_on_meta()
    for blocks, depth in zip(spec.blocks, case.depths, strict=True):
        setattr(meta, blocks, getattr(meta, blocks)[:depth])
    make_trainable(meta, config.training)
    monkeypatch.setenv("WORLD_SIZE", str(case.number))
    split = expected_split(config.parallel)
    split = replace(split, buffer_numbers=BUCKET)
    weights = NetworkWeights(meta, spec)
    planned = estimate_for(config, geometry, meta, spec=spec, bucket=network.bucket, split=split, weights=weights)
    host = zero_host_bytes(
        split, total=weights.total, trained=weights.trained, width=2, state_bytes=8,
        largest=max(p.numel() for p in weights.all if p.requires_grad), accumulates=case.micro_batches > 1,
    )  # fmt: skip

    plugin = make_plugin(config.parallel)
    plugin.set_mixed_precision("bf16")
    plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = BUCKET
    complete_settings(
        plugin.deepspeed_config, batch_size=1, accumulation=case.micro_batches, processes=case.number,
        max_grad_norm=config.optimizer.max_grad_norm,
    )  # fmt: skip
    shape = StepShape(
        (spec.latent_channels(meta), *geometry.denoised_shape(*network.bucket)),
        stored="checkpoint" if case.checkpointing else "none", trained=torch.bfloat16, autocast=None,
    )  # fmt: skip
    third = case.stage == 3
    counted = count_zero(
        spec, meta, shape, plugin.deepspeed_config, processes=case.number,
        split=split_weights if third else None, gather=partial(whole_weights, gathers=third, wanted=lambda _: True),
    )  # fmt: skip
    return planned, counted, host, weights


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_estimate_agrees_with_counting(
    case: Case, tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 %, per process: the peak of a step with its update, and memory between steps, on device and host."""
    linear = torch.nn.functional.linear
    planned, counted, host, weights = planned_and_counted(case, tiny_repo, tmp_path, monkeypatch)
    assert planned.total == pytest.approx(counted.step / GIB, rel=0.05)
    assert planned.persistent_bytes == pytest.approx(counted.persistent_bytes / GIB, rel=0.02)
    assert host == pytest.approx(counted.host, rel=0.05, abs=0.05 * GIB)
    # Weights are taken for a file without a second copy of them on the device: one is gathered at a time.
    largest = 2 * max(p.numel() for p in weights.all if p.requires_grad)
    gathered = 1.01 * largest * (1 + case.offload / case.number)  # and from the host comes a part of it
    assert counted.saving - counted.persistent_bytes <= (gathered if case.stage == 3 else 0)
    if case.stage == 3:  # nor is there ever the whole network on the device before it is sharded
        assert counted.loading < planned.persistent_bytes * GIB + gathered
    assert torch.nn.functional.linear is linear
    assert not torch.distributed.is_initialized()
