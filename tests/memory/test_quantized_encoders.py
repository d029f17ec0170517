"""Quantized text encoders: the classes of T5, LLaMA and CLIP, their encodings, the cache's names, and the estimate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetrainers.config.sections import ModelSection
from finetrainers.data.cache.keys import describe_model, encoder_options
from finetrainers.data.cache.model_fingerprint import model_fingerprint
from finetrainers.memory.quantization import QuantizedLinear
from finetrainers.memory.quantized_encoders import encoder_bytes_saved, largest_layer_bytes, load_text_encoders
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec, frozen_bytes

PROMPTS = ["a red ball", "two cats on a sofa"]
CPU = torch.device("cpu")
#: Of the embeddings, relative to their norm. The networks are 8 to 32 numbers wide: errors of wide ones average out.
BOUNDS = {"int8": 0.05, "fp8": 0.2, "nf4": 0.6}


@pytest.fixture
def spec(tiny_repo: Callable[..., Path]) -> Callable[..., ModelSpec]:
    def make(family: str, **options: Any) -> ModelSpec:
        return get_family(family).load(
            ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)), **options)
        )

    return make


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("family", ["ltx_video", "hunyuan_video"])
def test_embeddings_are_close_and_those_of_rounded_weights(
    family: str, kind: str, spec: Callable[..., ModelSpec]
) -> None:
    quantizing, plain = spec(family, quantize_text_encoders=kind), spec(family)
    quantized, exact = load_text_encoders(quantizing, CPU), load_text_encoders(plain, CPU)
    found, wanted = quantizing.encode_text(quantized, PROMPTS), plain.encode_text(exact, PROMPTS)
    for name, tensor in wanted.tensors.items():
        if tensor.is_floating_point():
            assert found[name].dtype == tensor.dtype
            assert (found[name].float() - tensor.float()).norm() / tensor.float().norm() < BOUNDS[kind], name
    for part, network in exact.modules.items():
        if isinstance(network, nn.Module):
            assert not [n for n, m in quantized[part].named_modules() if type(m) is nn.Linear]
            for name, layer in quantized[part].named_modules():
                if isinstance(layer, QuantizedLinear):
                    network.get_submodule(name).weight.data = layer.dequantized(torch.bfloat16)
    rounded = plain.encode_text(exact, PROMPTS)
    assert all(torch.equal(found[name], tensor) for name, tensor in rounded.tensors.items())
    assert any(not torch.equal(wanted[name], tensor) for name, tensor in rounded.tensors.items())


def test_the_cache_knows_them_by_another_name(spec: Callable[..., ModelSpec]) -> None:
    """Embeddings of other weights are not reused, by the index of options nor by the fingerprint of what was loaded."""
    plain, int8, fp8 = (spec("ltx_video", quantize_text_encoders=kind) for kind in ("none", "int8", "fp8"))
    prints = [model_fingerprint(load_text_encoders(one, CPU).modules) for one in (plain, int8, fp8)]
    assert len(set(prints)) == 3
    options = [encoder_options(one.config, "text") for one in (plain, int8, fp8)]
    assert "quantize_text_encoders" not in options[0]  # names are what they were
    assert options[1] != options[2] != options[0]
    assert encoder_options(int8.config, "vae") == encoder_options(plain.config, "vae")
    assert describe_model(int8.config, "text").endswith("bf16, quantized to int8")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["ltx_video", "hunyuan_video"])
def test_the_estimate_knows_their_size(family: str, kind: str, spec: Callable[..., ModelSpec]) -> None:
    quantizing = spec(family, quantize_text_encoders=kind)
    for part, network in load_text_encoders(quantizing, CPU).modules.items():
        if isinstance(network, nn.Module):
            held = sum(p.numel() * p.element_size() for p in {id(p): p for p in network.parameters()}.values())
            assert frozen_bytes(quantizing, part) - encoder_bytes_saved(quantizing, part) == pytest.approx(
                held, rel=1e-3
            )
            assert largest_layer_bytes(quantizing, part) > 0
    assert encoder_bytes_saved(quantizing, "vae") == encoder_bytes_saved(spec(family), "text_encoder") == 0
