"""Counting memory on fake tensors: by hand, against what autograd keeps, and against the arithmetic of the estimate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from published_networks import FURTHER, NETWORKS, published_repository
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from finetrainers.config.load import load_config
from finetrainers.config.sections import ActivationMemory
from finetrainers.memory.casting import cast_adapter_for_each_use
from finetrainers.memory.count import (
    LiveStorages,
    StepShape,
    count_step,
    cuda_autocast,
    fake_group,
    shortened,
)
from finetrainers.memory.estimate import GIB, estimate_for
from finetrainers.models.registry import get_family
from finetrainers.parallel.exchange import GradientExchange
from finetrainers.plan.trainable import make_trainable


def test_live_storages_by_hand() -> None:
    live = LiveStorages()
    with live:
        one = torch.zeros(256)  # 1 KiB
        view = one[:10]
        two = torch.zeros(512)  # 2 KiB
        assert (live.live, live.peak) == (3072, 3072)
        del two
        assert (live.live, live.peak) == (1024, 3072)
        del one
        assert live.live == 1024  # a view keeps its storage
        del view
    assert live.live == 0


def test_what_cuda_runs_in_fp32() -> None:
    """Layer norms and sums; matrices are multiplied in bf16, as on a CPU. Afterwards autocast is what it was."""
    x, weight = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)

    def dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            found = (
                torch.nn.functional.layer_norm(x, (8,), weight), torch.nn.functional.rms_norm(x, (8,), weight),
                x.softmax(-1), x.sum(), torch.nn.functional.linear(x.float(), torch.ones(8, 8)),
            )  # fmt: skip
        return [one.dtype for one in found]

    with cuda_autocast():
        assert dtypes() == [torch.float32] * 4 + [torch.bfloat16]
        assert torch.nn.functional.layer_norm(x, (8,), weight).dtype == torch.bfloat16  # without autocast
    assert dtypes()[:3] == [torch.bfloat16] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchanging_gradients_during_backward_takes_one_copy_of_them(dtype: torch.dtype) -> None:
    """As `ShardingSpec.copies_gradients` says: the copies exist before the step, and sending and receiving takes no
    more."""
    peaks = []
    with fake_group(2), FakeTensorMode():
        for exchanges in (False, True):
            network, live = nn.Sequential(*(nn.Linear(256, 256, dtype=dtype) for _ in range(8))), LiveStorages()
            live.add(network.parameters())
            with live:
                exchange = GradientExchange([*network.parameters()], overlaps=True) if exchanges else None
                for _ in range(2):
                    with nullcontext() if exchange is None else exchange.during_backward():
                        network(torch.empty(4, 256, dtype=dtype)).sum().backward()
                    if exchange is not None:
                        exchange.receive()
                        exchange.begin()
            peaks.append(live.peak)
    gradients = sum(p.nbytes for p in network.parameters())
    assert peaks[1] - peaks[0] == pytest.approx(gradients, rel=1e-3)


#: Cases that count every block, and so a few: of two lists of blocks, of a share of the blocks, of offloading.
FEW = {"HunyuanVideo": (5, 9), "CogVideoX-2b": (10,)}


def counted_cases(name: str, training_type: str) -> list[tuple[ActivationMemory, float | None, int]]:
    """What blocks store, a share of them, and clips, of one network: all settings where they differ in code."""
    lora = training_type == "lora"
    if name in FURTHER:
        return [("none" if lora else "checkpoint", None, 1)]
    # Every network stores with one clip and with four; CogVideoX-5b has the class of 2b, and the other pairs.
    few = lora == (name in ("CogVideoX-5b", "LTX-Video"))
    cases: list[tuple[ActivationMemory, float | None, int]] = [
        ("none", None, 1 if few else 4), ("checkpoint", None, 4 if few else 1),
    ]  # fmt: skip
    if name == "CogVideoX-5b":
        return cases
    if lora or name == "CogVideoX-2b":
        cases.append(("keep_attention", None, 1))
    if lora and name in FEW:
        cases.append(("offload", None, 1))
    if lora and name == "CogVideoX-2b":
        cases.append(("keep_attention", 0.3, 1))
    return cases


@pytest.mark.rotating
@pytest.mark.parametrize("name", [*NETWORKS, *FURTHER])
def test_the_estimate_agrees_with_counting(name: str, tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """Within 5 % for LoRA and full finetuning, whatever blocks store, one clip and four."""
    network = (NETWORKS | FURTHER)[name]
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path, network.config)
    for training_type in ("lora", "full-finetune"):
        config = load_config(
            model_name=network.family, pretrained_model_name_or_path=str(repo), data_root=str(repo),
            video_resolution_buckets=["x".join(map(str, network.bucket))], training_type=training_type, rank=64,
            optimizer="adamw", target_modules=[*get_family(network.family).facts.lora_targets],
        )  # fmt: skip
        family = get_family(network.family)
        geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
        whole = spec.transformer_on_meta()
        assert sum(p.numel() for p in whole.parameters()) == network.num_parameters
        make_trainable(whole, config.training)
        few = shortened(whole, dict(zip(spec.blocks, FEW[name], strict=True))) if name in FEW else whole
        for stored, share, batch_size in counted_cases(name, training_type):
            two_lists = name == "HunyuanVideo" and training_type != "lora" and stored != "none"
            meta = few if two_lists or share is not None or stored == "offload" else whole
            sizes = {
                flag: sum(p.numel() for p in meta.parameters() if p.requires_grad is flag) for flag in (True, False)
            }
            in_fp32 = sum(
                p.numel() for n, p in meta.named_parameters()
                if not p.requires_grad and any(part in n for part in spec.fp32_weights)
            )  # fmt: skip
            weights = 2 * (sizes[False] + in_fp32) + (4 + 8) * sizes[True]  # with the state of AdamW
            latent = (spec.latent_channels(meta), *geometry.denoised_shape(*network.bucket))
            step = StepShape(latent, batch_size, stored, share, has_frame_times=network.has_frame_times)
            found = count_step(spec, meta, step)
            counted = (weights + max(found.forward, found.backward)) / GIB
            memory = config.memory.model_copy(update={"activation_memory": stored, "selective_checkpointing": share})
            planned = estimate_for(
                config.model_copy(update={"memory": memory}), geometry, meta, spec=spec, bucket=network.bucket,
                batch_size=batch_size,
            )  # fmt: skip
            assert planned.offloaded == pytest.approx(found.host / GIB, rel=0.05)
            assert planned.total == pytest.approx(counted, rel=0.05), (training_type, stored, share, batch_size)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["LTX-Video", "CogVideoX-2b"])
def test_processes_that_share_a_clip_store_activations_of_their_part(
    name: str, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """Exchanges take little beside it: within 5 % the estimate has a part of the activations, and all weights."""
    network, totals = NETWORKS[name], {}
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path, network.config)
    for sharing, stored, mode in (*product((1, 2), ("none", "checkpoint"), ("ulysses",)), (2, "checkpoint", "ring")):
        config = load_config(
            model_name=network.family, pretrained_model_name_or_path=str(repo), data_root=str(repo), rank=64,
            video_resolution_buckets=["x".join(map(str, network.bucket))], optimizer="adamw", sp_size=sharing,
            activation_memory=stored, sp_mode=mode,
        )  # fmt: skip
        if not totals:
            family = get_family(network.family)
            geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
            meta = spec.transformer_on_meta()
            make_trainable(meta, config.training)
            weights = sum((12 if p.requires_grad else 2) * p.numel() for p in meta.parameters())
            latent = (spec.latent_channels(meta), *geometry.denoised_shape(*network.bucket))
        planned = estimate_for(config, geometry, meta, spec=spec, bucket=network.bucket).total
        if sharing > 1:
            found = count_step(spec, meta, StepShape(latent, stored=stored, sharing=sharing, sp_mode=mode))
            assert planned == pytest.approx((weights + max(found.forward, found.backward)) / GIB, rel=0.05), stored
        if mode == "ulysses":
            totals[sharing, stored] = planned - weights / GIB
    assert totals[2, "none"] == pytest.approx(totals[1, "none"] / 2, rel=0.1)


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "saved"), [("LTX-Video", 0.14), ("HunyuanVideo", 0.17), ("CogVideoX-5b", 0.30)])
def test_a_lora_without_autocast_stores_less(
    name: str, saved: float, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """By the published share; and the estimate knows it, with checkpointing too."""
    network = NETWORKS[name]
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path, network.config)
    config = load_config(
        model_name=network.family, pretrained_model_name_or_path=str(repo), data_root=str(repo), rank=64,
        video_resolution_buckets=["x".join(map(str, network.bucket))], lora_autocast=False, optimizer="adamw",
    )  # fmt: skip
    family = get_family(network.family)
    geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
    meta = spec.transformer_on_meta()
    make_trainable(meta, config.training)
    weights = sum((12 if p.requires_grad else 2) * p.numel() for p in meta.parameters())
    shape = StepShape((spec.latent_channels(meta), *geometry.denoised_shape(*network.bucket)), stored="none")
    unit = geometry.num_tokens(*network.bucket) * spec.width(meta) * 2
    blocks = [len(getattr(meta, blocks)) for blocks in spec.blocks]
    under_autocast = unit * sum(a * b for a, b in zip(spec.activations["lora"].kept, blocks, strict=True))
    cast_adapter_for_each_use(meta)
    for stored, batch_size in (("none", 1), ("checkpoint", 4)):
        one = replace(shape, stored=stored, batch_size=batch_size, autocast=None)
        found = count_step(spec, meta, one)
        if stored == "none":
            assert 1 - found.kept / under_autocast == pytest.approx(saved, abs=0.02)
        memory = config.memory.model_copy(update={"activation_memory": stored})
        planned = estimate_for(
            config.model_copy(update={"memory": memory}), geometry, meta, spec=spec, bucket=network.bucket,
            batch_size=batch_size,
        ).total  # fmt: skip
        counted = (weights + max(found.forward, found.backward)) / GIB
        assert planned == pytest.approx(counted, rel=0.05), stored


@pytest.mark.rotating
def test_few_blocks_tell_what_all_take(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """Counted on 2 and 3 blocks, and on all of 12."""
    network = NETWORKS["CogVideoX-2b"]
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path, network.config)
    config = load_config(
        model_name=network.family, pretrained_model_name_or_path=str(repo), data_root=str(repo), training_type="lora",
        rank=64,
    )  # fmt: skip
    spec = get_family(network.family).load(config.model)
    meta = spec.transformer_on_meta()
    meta.transformer_blocks = meta.transformer_blocks[:12]
    make_trainable(meta, config.training)
    shape = StepShape((16, 3, 60, 90), stored="none")
    found = count_step(spec, meta, shape)
    blocks, spec.blocks = spec.blocks, ()
    whole = count_step(spec, meta, shape)
    spec.blocks = blocks
    assert (found.kept, found.forward, found.backward, found.gradients) == pytest.approx(
        (whole.kept, whole.forward, whole.backward, whole.gradients), rel=0.01
    )
    smaller = count_step(spec, meta, replace(shape, stored="checkpoint"))
    assert smaller.kept < whole.kept / 5
    assert smaller.gradients == whole.gradients == 4 * sum(p.numel() for p in meta.parameters() if p.requires_grad)
