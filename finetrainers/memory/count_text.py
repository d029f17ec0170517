"""Counted memory of encoding prompts: the real text encoder runs on fake tensors, with few of its layers."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from finetrainers.utils.device import meta_device
from finetrainers.utils.reading import parse_json

from .count import LiveStorages, StepShape, fake_weights

if TYPE_CHECKING:
    from finetrainers.models.spec import ModelSpec

_DEPTHS = ("num_layers", "num_hidden_layers", "num_decoder_layers")


def text_working_bytes(spec: ModelSpec, part: str, *, batch: int) -> float:
    """Return the bytes that a text encoder takes for a batch of prompts, beyond its weights.

    Args:
        spec: of the model.
        part: the text encoder; for other parts, such as diffusers' text connectors, and if its config is not on this
            disk, 0 is returned.
        batch: prompts that are encoded at once.
    """
    settings, cls = spec.configs.get(part), spec.parts[part]
    if settings is None or not issubclass(cls, PreTrainedModel):
        return 0.0
    try:
        longest = max((shape[0] for shape in spec.text_shapes().values() if len(shape) > 1), default=0)
    except NotImplementedError:
        longest = 0
    tokens, keeps_layers = spec.text_calls.get(part, (longest, False))
    if not tokens:
        return 0.0
    dtype = torch.float32 if getattr(spec.config, f"{part}_dtype", "bf16") == "fp32" else torch.bfloat16
    return _count(cls, json.dumps(settings, sort_keys=True), tokens, keeps_layers, batch, dtype)


@lru_cache(maxsize=64)
def _count(cls: Any, settings: str, tokens: int, keeps_layers: bool, batch: int, dtype: torch.dtype) -> float:
    """Count with two layers, and with three if the states of all layers are kept: each further layer adds as much."""
    config = parse_json(settings)
    depths = {name: depth for name in _DEPTHS if (depth := config.get(name)) is not None}  # a decoder's may be null
    depth = next(iter(depths.values()), 2)

    def count(layers: int) -> float:
        shallow = config | {name: min(layers, depth) for name, depth in depths.items()}
        if config.get("layer_types") is not None:
            shallow["layer_types"] = config["layer_types"][:layers]
        return count_encoder(cls, shallow, tokens, keeps_layers=keeps_layers, batch=batch, dtype=dtype)

    two = count(2)
    return two if not keeps_layers or depth <= 2 else two + (depth - 2) * (count(3) - two)


def count_encoder(
    cls: Any, settings: dict[str, Any], tokens: int, *, keeps_layers: bool, batch: int, dtype: torch.dtype
) -> float:
    """Return the bytes at the peak of a forward pass beyond the weights.

    Args:
        cls: class of the encoder, from transformers.
        settings: its config.
        tokens: of a prompt.
        keeps_layers: whether the states of all layers are requested.
        batch: prompts.
        dtype: of the weights.
    """
    with meta_device():
        network = cls(cls.config_class.from_dict(settings)).eval().requires_grad_(False)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake_weights(network, StepShape((1, 1, 1, 1), frozen=dtype))
        live = LiveStorages()
        live.add([*network.parameters(), *network.buffers()])
        weights = live.live
        with live:
            ids, mask = (torch.ones(batch, tokens, dtype=torch.long) for _ in range(2))
            outputs = network(input_ids=ids, attention_mask=mask, output_hidden_states=keeps_layers)
        del outputs
        return float(live.peak - weights)
