"""Training a LoRA over quantized frozen weights: exact against dequantized weights, rounded as the libraries round."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_network import distance, run, transformer
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from every_family import FAMILIES
from published_networks import NETWORKS, published_repository
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.memory.count import StepShape, count_step
from finetrainers.memory.estimate import GIB, estimate_for
from finetrainers.memory.quantization import (
    QuantizedLinear,
    bytes_saved,
    dequantize,
    quantizable_layers,
    quantize,
    quantize_frozen,
    summary,
)
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.models.registry import get_family
from finetrainers.models.spec import leave_out_unused
from finetrainers.parallel.sharding import ShardingSpec
from finetrainers.plan.trainable import make_trainable

KINDS = ("int8", "fp8", "nf4")
SKIP = LTXVideoSpec.unquantized
BF16 = torch.bfloat16


def weights(std: float = 0.02, *, rows: int = 96, columns: int = 256) -> torch.Tensor:
    """Normally distributed, with rows of different size."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-1, 1, rows).view(-1, 1)
    return (std * size * torch.randn(rows, columns, generator=generator)).to(BF16)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_through_the_dequantized_weights(kind: Any, autocast: bool, checkpointing: bool) -> None:
    """Bit for bit, on a network whose plain layers have the rounded weights."""
    quantized, rounded = transformer(BF16), transformer(BF16)
    layers = quantize_frozen(quantized, kind, skip=SKIP)
    for layer in layers:
        rounded.get_submodule(layer.name).weight.data = quantized.get_submodule(layer.name).dequantized(BF16)
    for network in (quantized, rounded):
        set_activation_memory(network, "checkpoint" if checkpointing else "none")
    output, gradients = run(quantized, BF16, autocast=autocast)
    wanted_output, wanted = run(rounded, BF16, autocast=autocast)
    assert torch.equal(output, wanted_output)
    assert len(gradients) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    exact, _ = run(transformer(torch.float32), torch.float32)
    assert 0 < distance([output], [exact]) < {"int8": 0.02, "fp8": 0.06, "nf4": 0.2}[kind]
    names = [layer.name for layer in layers]
    assert "transformer_blocks.1.attn1.to_q.base_layer" in names
    assert "transformer_blocks.0.ff.net.2" in names
    assert not any("norm" in n or "lora" in n or "time_embed" in n or n in ("proj_in", "proj_out") for n in names)
    assert all(p.dtype == torch.float32 for p in quantized.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_stores_codes_and_no_weight_in_16_bits(kind: Any) -> None:
    layer = nn.Linear(64, 32, dtype=BF16).requires_grad_(False)
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        QuantizedLinear(layer, kind)(torch.randn(4, 64, dtype=BF16, requires_grad=True))
    assert {tensor.dtype for tensor in held} == {BF16, torch.uint8 if kind == "nf4" else torch.int8}
    assert max(tensor.nbytes for tensor in held) <= 64 * 32  # codes; scales are small


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_strategy_may_cast_what_is_stored(kind: Any, dtype: torch.dtype) -> None:
    """FSDP2 gathers scales in the dtype of computation, DeepSpeed casts the network: neither changes a weight."""
    layer = nn.Linear(128, 8, dtype=dtype).requires_grad_(False)
    quantized = QuantizedLinear(layer, kind)
    before = quantized.dequantized(BF16)
    assert torch.equal(before, quantized.to(BF16).dequantized(BF16))
    assert not hasattr(quantized, "weight")


def test_int8_and_fp8_round_by_row_as_torchao_does() -> None:
    weight = weights()
    for kind, config, bound in (
        ("int8", Int8WeightOnlyConfig(version=2), 1.05), ("fp8", Float8WeightOnlyConfig(version=2), 1.05),
    ):  # fmt: skip
        codes, scale = quantize(weight, kind)
        ours = dequantize(codes, scale, kind, tuple(weight.shape), torch.float32)
        layer = nn.Linear(256, 96, bias=False, dtype=BF16).requires_grad_(False)
        layer.weight.data = weight.clone()
        quantize_(layer, config)
        theirs = layer.weight.dequantize().float()
        assert distance([ours], [weight]) < bound * distance([theirs], [weight])
        assert scale.shape == (96, 1)
    codes, scale = quantize(weight, "int8")
    steps = (dequantize(codes, scale, "int8", (96, 256), torch.float32) - weight.float()).abs() / scale.float()
    assert steps.max() <= 0.5
    assert torch.equal(
        dequantize(*quantize(torch.zeros(2, 4), "int8"), "int8", (2, 4), BF16), torch.zeros(2, 4, dtype=BF16)
    )


def test_nf4_rounds_as_bitsandbytes_does() -> None:
    weight = weights()
    ours = dequantize(*quantize(weight, "nf4"), "nf4", (96, 256), torch.float32)
    theirs = dequantize_4bit(*quantize_4bit(weight.float(), blocksize=64, quant_type="nf4"))
    assert distance([ours], [theirs]) < 2**-8  # scales are of bf16
    odd = weights(rows=3, columns=5)
    assert distance([dequantize(*quantize(odd, "nf4"), "nf4", (3, 5), BF16)], [odd]) < 0.15


@pytest.mark.parametrize("std", [0.02, 0.002])
def test_scales_save_the_small_weights_that_a_plain_cast_loses(std: float) -> None:
    """As in the table of docs/how-to/memory.md."""
    weight = std * torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))

    def error(kind: Any) -> float:
        return distance([dequantize(*quantize(weight, kind), kind, (64, 1024), torch.float32)], [weight])

    plain = distance([weight.to(torch.float8_e4m3fn).float()], [weight])
    assert error("int8") == pytest.approx(0.0087, rel=0.15)  # rows of 1024: smaller outliers than in rows of 4096
    assert error("fp8") == pytest.approx(0.0265, rel=0.05)
    assert error("nf4") == pytest.approx(0.092, rel=0.05)
    assert plain == pytest.approx({0.02: 0.033, 0.002: 0.28}[std], rel=0.05)


def test_no_weight_outlives_its_codes() -> None:
    """So that a device holds one weight at a time in 16 bits. A weight that other layers share stays theirs."""
    network = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).requires_grad_(False)
    network.tied = nn.Embedding(8, 8).requires_grad_(False)
    network.tied.weight = network[3].weight
    alive, layers = [], [weakref.ref(layer) for layer in network[:4]]

    class Watched(QuantizedLinear):
        def __init__(self, layer: nn.Linear, kind: Any, **rest: Any) -> None:
            alive.append(sum(ref() is not None for ref in layers))
            super().__init__(layer, kind, **rest)

    expected = network.tied.weight.clone()
    quantize_frozen(network, "int8", skip=(), layer_class=Watched)
    assert alive == [4, 3, 2, 1]
    assert network.tied.weight.equal(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_norms_embedders_and_modulation(family: str, tiny_repo: Callable[..., Path]) -> None:
    spec = get_family(family).load(
        ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)))
    )
    network = spec.transformer_on_meta().requires_grad_(False)
    leave_out_unused(network)
    names = {name for name, _ in quantizable_layers(network, skip=spec.unquantized)}
    linear = {name for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    in_blocks = tuple(f"{name}." for name in spec.blocks)
    assert names == {name for name in linear if name.startswith(in_blocks) and not re.search("norm|modulation", name)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_knows_what_quantization_saves(kind: Any) -> None:
    network = transformer(BF16)
    before = sum(p.nbytes for p in network.parameters())
    saved = sum(bytes_saved(network, kind, skip=SKIP, width=2).values())
    layers = quantize_frozen(network, kind, skip=SKIP)
    assert before - sum(p.nbytes for p in network.parameters()) == saved > 0
    said = list(summary(layers, kind, num_weights=65536))
    assert said[0].startswith("quantized 50% ")
    assert f" {kind}: " in said[0]
    assert said[1].startswith("  largest: ")
    assert "base_layer" not in said[1]


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "kind"), [("LTX-Video", "nf4"), ("CogVideoX-5b", "int8")])
def test_the_estimate_agrees_with_counting(
    name: str, kind: Any, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """Within 5 %, with and without checkpointing: no weight stays in 16 bits."""
    network = NETWORKS[name]
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path, network.config)
    config = load_config(
        model_name=network.family, pretrained_model_name_or_path=str(repo), data_root=str(repo),
        video_resolution_buckets=["x".join(map(str, network.bucket))], rank=64, optimizer="adamw", quantize_frozen=kind,
    )  # fmt: skip
    family = get_family(network.family)
    geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
    meta = spec.transformer_on_meta().to(BF16)
    make_trainable(meta, config.training)
    sizes = estimate_for(config, geometry, meta, spec=spec, bucket=network.bucket).parts
    plain = meta.state_dict().keys()
    layers = quantize_frozen(meta, kind, skip=spec.unquantized)
    assert meta.state_dict().keys() != plain
    assert all(math.isnan(layer.error) for layer in layers)
    frozen = sum(p.nbytes for p in meta.parameters() if not p.requires_grad)
    assert sizes["frozen weights"] == pytest.approx(frozen / GIB, rel=1e-6)
    trained = sum(p.numel() for p in meta.parameters() if p.requires_grad)
    unquantized = _unquantized(spec, config)
    for stored in ("checkpoint", "none"):
        shape = StepShape((spec.latent_channels(meta), *geometry.denoised_shape(*network.bucket)), 1, stored)
        found = count_step(spec, meta, shape)
        counted = (frozen + (4 + 8) * trained + max(found.forward, found.backward)) / GIB
        memory = config.memory.model_copy(update={"activation_memory": stored})
        planned = estimate_for(
            config.model_copy(update={"memory": memory}), geometry, unquantized, spec=spec, bucket=network.bucket,
        ).total  # fmt: skip
        assert planned == pytest.approx(counted, rel=0.05), stored

    def gathered(quantize: str) -> float:
        memory = config.memory.model_copy(update={"quantize_frozen": quantize})
        split = ShardingSpec(weights=2, gradients=2, optimizer=2, gathers=True)
        changed = config.model_copy(update={"memory": memory})
        plan = estimate_for(changed, geometry, unquantized, spec=spec, bucket=network.bucket, split=split)
        return plan.parts["gathered weights"]

    assert gathered(kind) < 0.95 * gathered("none")  # by FSDP2, for two blocks


def _unquantized(spec: Any, config: Any) -> nn.Module:
    meta = spec.transformer_on_meta()
    make_trainable(meta, config.training)
    return meta


@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_is_not_added_to_codes_for_good(kind: Any) -> None:
    network = transformer(BF16)
    quantize_frozen(network, kind, skip=SKIP)
    with pytest.raises(AttributeError, match=f"quantized to {kind}.*finetrainers export --format merged"):
        network.fuse_lora()
