"""Quantization of frozen weights, so that a LoRA is trained over a base in 8 or 4 bits (QLoRA).

A frozen linear layer becomes integer codes and scales: int8 and fp8 (e4m3) with a scale for each output row, nf4
(bitsandbytes) with one for each 64 weights. Its product dequantizes the weight, and dequantizes it again in backward,
so that autograd stores the codes and never a weight in 16 bits.

torchao's `quantize_` and bitsandbytes' `Linear4bit` are nearly this, and the tests compare with them. Autograd stores a
16-bit copy of all weights that torchao's tensors multiply, which undoes the saving until backward. `Linear4bit`
returns its input's dtype, so that autocast's fp32 norms are followed by fp32 activations. And codes that are plain
integer weights are broadcast by DDP, split by FSDP2, left alone by casts, moved to a device and counted like any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .casting import frozen_layers

Kind = Literal["int8", "fp8", "nf4"]

#: Largest code of each row.
_LARGEST = {"int8": 127.0, "fp8": 448.0}
#: Weights that share a scale in nf4.
_NF4_BLOCK = 64


@dataclass(frozen=True)
class QuantizedLayer:
    """Quantized layer of a network, with its error.

    Attributes:
        name: of the layer.
        num_weights: of its matrix.
        error: norm of the rounding error, divided by the norm of the weights; NaN without weights (meta device).
    """

    name: str
    num_weights: int
    error: float


class QuantizedLinear(nn.Module):
    """A frozen linear layer with its weight in codes; equal to `nn.Linear` with the dequantized weight, bit for bit.

    It has no attribute `weight`: code that would add to it (merging a LoRA) fails instead of adding to codes.
    """

    def __init__(self, layer: nn.Linear, kind: Kind, *, weight: Tensor | None = None) -> None:
        """Args:
        layer: the layer, which is not changed.
        kind: the format.
        weight: the layer's weight, on the device that quantizes it; default: as it is in the layer.
        """
        super().__init__()
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        codes, scale = quantize(layer.weight.detach() if weight is None else weight, kind)
        self.codes, self.scale = (nn.Parameter(tensor, requires_grad=False) for tensor in (codes, scale))
        self.bias = layer.bias

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that the layer multiplies with."""
        return dequantize(self.codes, self.scale, self.kind, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute what `nn.Linear` does, including under autocast."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Product.apply(
            x.to(dtype), self.codes, self.scale, bias, self.kind, (self.out_features, self.in_features)
        )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute as `nn.Module` does, or raise for the weight, which PEFT asks for to merge a LoRA."""
        if name == "weight":
            raise AttributeError(
                f"the weights of this layer are quantized to {self.kind}, and a LoRA cannot be added to them for good; "
                "add it to the unquantized network: finetrainers export --format merged"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`, as `nn.Linear` does, and the format."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


class QuantizedEncoderLinear(QuantizedLinear):
    """A layer of a text encoder that shows the dtype it takes: T5 reads that from the weights of its layers."""

    def __init__(self, layer: nn.Linear, kind: Kind, *, weight: Tensor | None = None) -> None:
        super().__init__(layer, kind, weight=weight)
        self._dtype = layer.weight.dtype

    @property
    def weight(self) -> Tensor:
        """An empty tensor, in the dtype that the layer computes in."""
        return torch.empty(0, dtype=self._dtype)


class _Product(torch.autograd.Function):
    """A linear layer whose weight is dequantized in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, kind: Kind, shape: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.kind, ctx.shape = kind, shape
        return F.linear(x, dequantize(codes, scale, kind, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        codes, scale = ctx.saved_tensors
        return gradient @ dequantize(codes, scale, ctx.kind, ctx.shape, gradient.dtype), None, None, None, None, None


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix; the codes are integers in every format.

    Scales are rounded to bf16 before they are used for the codes. So a cast to the dtype of computation by a strategy
    does not change them, and costs no precision.

    Args:
        weight: `[out, in]`.
        kind: the format.
    """
    if kind == "nf4":
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(weight.contiguous(), blocksize=_NF4_BLOCK, quant_type="nf4")
        rows = len(weight) if weight.shape[1] % 2 == 0 else 1
        return codes.view(rows, -1), state.absmax.bfloat16().to(weight.dtype)
    scale = (weight.abs().amax(dim=1, keepdim=True).float() / _LARGEST[kind]).bfloat16().to(weight.dtype)
    scale.masked_fill_(scale == 0, 1.0)
    steps = weight.float() / scale
    if kind == "int8":
        return steps.round_().clamp_(-_LARGEST[kind], _LARGEST[kind]).to(torch.int8), scale
    return steps.clamp_(-_LARGEST[kind], _LARGEST[kind]).to(torch.float8_e4m3fn).view(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor, kind: Kind, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the matrix that codes and scales represent."""
    if kind == "nf4":
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = QuantState(scale.float(), shape=torch.Size(shape), dtype=dtype, blocksize=_NF4_BLOCK, quant_type="nf4")
        return dequantize_4bit(codes.view(-1, 1), state)
    numbers = codes if kind == "int8" else codes.view(torch.float8_e4m3fn)
    return numbers.to(dtype).mul_(scale.to(dtype))


def quantizable_layers(transformer: nn.Module, *, skip: Sequence[str]) -> list[tuple[str, nn.Linear]]:
    """Return the frozen linear layers, by name, that `quantize_frozen` quantizes."""
    layers = frozen_layers(transformer, [re.compile(pattern) for pattern in skip])
    return [(name, layer) for name, layer in layers if isinstance(layer, nn.Linear)]


def quantize_frozen(
    transformer: nn.Module,
    kind: Kind,
    *,
    skip: Sequence[str],
    device: torch.device | None = None,
    layer_class: type[QuantizedLinear] = QuantizedLinear,
) -> list[QuantizedLayer]:
    """Quantize the frozen linear layers of a network in place, one after the other.

    Call it while the network is in host memory, after the adapter is added. Layers go to the device one at a time, and
    come back as codes, so that a device never holds the network in 16 bits.

    Args:
        transformer: the network.
        kind: the format.
        skip: regular expressions, searched in module names, of modules that keep their dtype.
        device: computes; default: the device of the weights.
        layer_class: class of the new layers.

    Returns:
        The layers, with the error of each.
    """
    layers = []
    waiting = quantizable_layers(transformer, skip=skip)[::-1]
    while waiting:
        name, layer = waiting.pop()  # the last reference to its weight
        home = layer.weight.device
        # A copy: what stays in the layer would stay on the device, and a tied weight belongs to other layers as well.
        weight = layer.weight.detach().to(device or home)
        quantized, error = layer_class(layer, kind, weight=weight), math.nan
        if not weight.is_meta:
            rounding = quantized.dequantized(torch.float32).sub_(weight)
            error = (rounding.norm() / weight.float().norm().clamp(min=1e-30)).item()
        transformer.set_submodule(name, quantized.to(home))
        layers.append(QuantizedLayer(name, weight.numel(), error))
    return layers


def bytes_saved(transformer: nn.Module, kind: str, *, skip: Sequence[str], width: int) -> dict[int, float]:
    """Return the bytes that quantization saves of each frozen weight of `width` bytes a number, by its `id`."""
    saved = {}
    for _, layer in quantizable_layers(transformer, skip=skip):
        weights = layer.weight.numel()
        codes, scales = (weights / 2, -(-weights // _NF4_BLOCK)) if kind == "nf4" else (weights, layer.out_features)
        saved[id(layer.weight)] = (weights - scales) * width - codes
    return saved


def summary(layers: Sequence[QuantizedLayer], kind: str, *, num_weights: int) -> Iterator[str]:
    """Yield lines for the user with the share of quantized weights, and the size of the errors.

    Args:
        layers: from `quantize_frozen`.
        kind: the format.
        num_weights: parameters of the network.
    """
    weights = sum(layer.num_weights for layer in layers)
    mean = sum(layer.error * layer.num_weights for layer in layers) / weights
    worst = max(layers, key=lambda layer: layer.error)
    yield f"quantized {weights / num_weights:.0%} of the weights to {kind}: rounding error {mean:.2%} of their norm"
    yield f"  largest: {worst.error:.2%} in {worst.name.removesuffix('.base_layer')}"
