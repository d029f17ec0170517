"""Weight dtypes: 8-bit storage of frozen weights, and fp32 adapters that compute in 16 bits without autocast."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.hooks import apply_layerwise_casting
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from finetrainers.utils.device import meta_device

_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def enable_layerwise_upcasting(
    transformer: nn.Module,
    *,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: Sequence[str],
) -> list[str]:
    """Store frozen layers in `storage_dtype` and cast each to `compute_dtype` while it computes.

    Call it after the adapter is added: adapter weights then start from unrounded values and keep their dtype. Diffusers
    casts layer by layer (`apply_layerwise_casting`); its own walk over a model, `enable_layerwise_casting`, is not
    used, since it also stops PEFT from casting activations to the adapter's dtype, so that fp32 adapters fail outside
    of autocast. A cast weight stays alive until backward has used it: memory is saved only together with gradient
    checkpointing, which casts again.

    Args:
        transformer: a network whose frozen weights are in `compute_dtype`.
        storage_dtype: a float8 dtype.
        compute_dtype: dtype of the computation.
        skip_modules_pattern: regular expressions, searched in module names, of modules that keep their dtype; patterns
            that the model class itself names are added.

    Returns:
        The names of the layers now stored in `storage_dtype`.

    Raises:
        ValueError: the patterns leave no layer to cast.
    """
    chosen = castable_layers(transformer, skip_modules_pattern=skip_modules_pattern)
    if not chosen:
        raise ValueError(
            "layerwise upcasting found no frozen layer to store in 8 bits: it works with training_type lora, and "
            f"layerwise_upcasting_skip_modules_pattern must leave some layer out; it is {list(skip_modules_pattern)}"
        )
    no_pattern: Any = None  # then the library casts exactly the layer
    for _, layer in chosen:
        apply_layerwise_casting(layer, storage_dtype, compute_dtype, skip_modules_pattern=no_pattern)
    return [name for name, _ in chosen]


def castable_layers(transformer: nn.Module, *, skip_modules_pattern: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the frozen layers, by name, that `enable_layerwise_upcasting` would store in 8 bits."""
    patterns = [
        *skip_modules_pattern,
        *(getattr(transformer, "_skip_layerwise_casting_patterns", None) or ()),
        *(getattr(transformer, "_keep_in_fp32_modules", None) or ()),
    ]
    return frozen_layers(transformer, [re.compile(p) for p in patterns])


def frozen_layers(module: nn.Module, skip: list[re.Pattern[str]], prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the frozen layers with weights below `module`, by name, that no pattern matches.

    A match leaves out all modules below it. Adapters are left out, including frozen ones: they are fp32.
    """
    if any(pattern.search(prefix) for pattern in skip):
        return []
    if isinstance(module, _LAYERS):
        return [] if any(p.requires_grad for p in module.parameters()) else [(prefix, module)]
    return [
        layer
        for name, child in module.named_children()
        if name == "base_layer" or not isinstance(module, LoraLayer)
        for layer in frozen_layers(child, skip, f"{prefix}.{name}" if prefix else name)
    ]


class CastLinear(nn.Linear):
    """Linear layer whose weight is cast to its input's dtype for each use, as autocast does, and trained in its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute what `nn.Linear` does."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def cast_adapter_for_each_use(transformer: nn.Module) -> None:
    """Let the LoRA of linear layers compute in the dtype of activations outside of autocast; weights keep their dtype.

    PEFT would cast the activations to the dtype of the weights instead, and autograd would store them in fp32.
    """
    for layer in transformer.modules():
        if isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear):
            layer.cast_input_dtype_enabled = False
            for factors in (layer.lora_A, layer.lora_B):
                for name, linear in factors.items():
                    factors[name] = _cast_linear(linear)


def _cast_linear(linear: nn.Linear) -> CastLinear:
    with meta_device():
        cast = CastLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    cast.weight, cast.bias = linear.weight, linear.bias
    return cast.train(linear.training)
