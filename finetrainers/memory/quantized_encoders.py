"""Text encoders whose linear layers are quantized (`--quantize_text_encoders`)."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from finetrainers.models.spec import DTYPES, ModelComponents, ModelSpec, network_on_meta
from finetrainers.utils.reading import parse_json

from .quantization import QuantizedEncoderLinear, bytes_saved, quantizable_layers, quantize_frozen


def load_text_encoders(spec: ModelSpec, device: torch.device) -> ModelComponents:
    """Load tokenizers and text encoders, quantized layer by layer: the device never holds more than the result."""
    encoders, kind = spec.load_text_encoders(), spec.config.quantize_text_encoders
    if kind != "none":
        for network in encoders.modules.values():
            if isinstance(network, nn.Module):
                quantize_frozen(network, kind, skip=(), device=device, layer_class=QuantizedEncoderLinear)
    return encoders.to(device)


def encoder_bytes_saved(spec: ModelSpec, part: str) -> float:
    """Return the bytes that quantization saves of a text encoder; 0 if not quantized, or its config is not here."""
    return _sizes(spec, part)[0]


def largest_layer_bytes(spec: ModelSpec, part: str) -> float:
    """Return the bytes of the largest weight as a layer multiplies with it, which is dequantized for each use."""
    return _sizes(spec, part)[1]


def _sizes(spec: ModelSpec, part: str) -> tuple[float, float]:
    """Return the bytes saved, and those of the largest layer; 0 if not quantized, or its config is not here."""
    kind, settings = spec.config.quantize_text_encoders, spec.configs.get(part)
    is_encoder = part in spec.facts.text_parts and issubclass(cls := spec.parts[part], nn.Module)
    if kind == "none" or settings is None or not is_encoder:
        return 0.0, 0.0
    width = DTYPES[str(getattr(spec.config, f"{part}_dtype", "bf16"))].itemsize
    return _count_sizes(cls, json.dumps(settings, sort_keys=True), kind, width)


@lru_cache(maxsize=64)
def _count_sizes(cls: Any, settings: str, kind: str, width: int) -> tuple[float, float]:
    network = network_on_meta(cls, parse_json(settings), "the config of a text encoder").requires_grad_(False)
    saved = bytes_saved(network, kind, skip=(), width=width)
    largest = max((layer.weight.numel() for _, layer in quantizable_layers(network, skip=())), default=0)
    return float(sum(saved.values())), float(largest * width)
