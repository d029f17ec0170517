"""Quantization of frozen weights, so that a LoRA is trained over a base in 8 or 4 bits (QLoRA).

A frozen linear layer becomes integer codes and scales: int8 and fp8 (e4m3) with a scale for each output row, nf4
(bitsandbytes) with one for each 64 weights. Its product dequantizes the weight, and dequantizes it again in backward,
so that autograd stores the codes and never a weight in 16 bits.

torchao's `quantize_` and bitsandbytes' `Linear4bit` are nearly this, and the tests compare with them. Autograd stores a
16-bit copy of every weight that torchao's tensors multiply, which takes the saving back until backward. `Linear4bit`
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
    """What quantization has done to a layer.

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

    It has no attribute `weight`: whoever would add to it (merging a LoRA) fails instead of adding to codes.
    """

    def __init__(self, layer: nn.Linear, kind: Kind) -> None:
        """Args:
        layer: of which the weight is quantized, where it is; not changed.
        kind: the format.
        """
        super().__init__()
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        codes, scale = quantize(layer.weight.detach(), kind)
        self.codes, self.scale = (nn.Parameter(tensor, requires_grad=False) for tensor in (codes, scale))
        self.bias = layer.bias

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight that the layer multiplies with."""
        return dequantize(self.codes, self.scale, self.kind, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`, under autocast too."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Product.apply(
            x.to(dtype), self.codes, self.scale, bias, self.kind, (self.out_features, self.in_features)
        )

    def __getattr__(self, name: str) -> Any:
        """As of `nn.Module`; PEFT asks for the weight when it adds a LoRA to it for good."""
        if name == "weight":
            raise AttributeError(
                f"the weights of this layer are quantized to {self.kind}, and a LoRA cannot be added to them for good; add it to "
                "the unquantized network: finetrainers export --format merged"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """As of `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


class QuantizedEncoderLinear(QuantizedLinear):
    """A layer of a text encoder, which says what dtype it takes: T5 asks its layers by the dtype of their weights."""

    def __init__(self, layer: nn.Linear, kind: Kind) -> None:
        super().__init__(layer, kind)
        self._dtype = layer.weight.dtype

    @property
    def weight(self) -> Tensor:
        """No numbers, in the dtype that the layer computes in."""
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
    """Codes and scales of a matrix; the codes are integers whatever the format.

    Scales are numbers of bf16, and the codes are rounded by them. So they are the same after a strategy has cast them to
    the dtype of computation, and cost no precision.

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
    """The matrix that codes and scales stand for."""
    if kind == "nf4":
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = QuantState(scale.float(), shape=torch.Size(shape), dtype=dtype, blocksize=_NF4_BLOCK, quant_type="nf4")
        return dequantize_4bit(codes.view(-1, 1), state)
    numbers = codes if kind == "int8" else codes.view(torch.float8_e4m3fn)
    return numbers.to(dtype).mul_(scale.to(dtype))


def quantizable_layers(transformer: nn.Module, *, skip: Sequence[str]) -> list[tuple[str, nn.Linear]]:
    """The frozen linear layers, by name, that `quantize_frozen` quantizes."""
    found = frozen_layers(transformer, [re.compile(pattern) for pattern in skip])
    return [(name, layer) for name, layer in found if isinstance(layer, nn.Linear)]


def quantize_frozen(
    transformer: nn.Module,
    kind: Kind,
    *,
    skip: Sequence[str],
    device: torch.device | None = None,
    layer_class: type[QuantizedLinear] = QuantizedLinear,
) -> list[QuantizedLayer]:
    """Quantize the frozen linear layers of a network in place, one after the other.

    Call it while the network is in host memory, after the adapter is added. Each layer alone goes to the device, and comes
    back as codes, so that a device never holds the network in 16 bits.

    Args:
        transformer: the network.
        kind: the format.
        skip: regular expressions, searched in module names, of what keeps its dtype.
        device: computes; default: where the weights are.
        layer_class: of the layers that take the place.

    Returns:
        The layers, with the error of each.
    """
    chosen = quantizable_layers(transformer, skip=skip)
    return [_replace(transformer, name, layer_class, layer, kind, device) for name, layer in chosen]


def _replace(
    transformer: nn.Module,
    name: str,
    layer_class: type[QuantizedLinear],
    layer: nn.Linear,
    kind: Kind,
    device: torch.device | None,
) -> QuantizedLayer:
    home = layer.weight.device
    layer.weight.data = layer.weight.data.to(device or home)
    quantized = layer_class(layer, kind)
    error = math.nan if layer.weight.is_meta else _error(quantized.dequantized(torch.float32), layer.weight.detach())
    parent, _, own = name.rpartition(".")
    setattr(transformer.get_submodule(parent), own, quantized.to(home))
    return QuantizedLayer(name, layer.weight.numel(), error)


def _error(found: Tensor, wanted: Tensor) -> float:
    return (found.sub_(wanted).norm() / wanted.float().norm().clamp(min=1e-30)).item()


def bytes_saved(transformer: nn.Module, kind: str, *, skip: Sequence[str], width: int) -> dict[int, float]:
    """Bytes by which quantization makes each frozen weight smaller, by its `id`, that has `width` bytes a number."""
    layers = quantizable_layers(transformer, skip=skip)
    return {id(layer.weight): _bytes_saved(layer, kind, width) for _, layer in layers}


def _bytes_saved(layer: nn.Linear, kind: str, width: int) -> float:
    weights = layer.weight.numel()
    codes, scales = (weights / 2, -(-weights // _NF4_BLOCK)) if kind == "nf4" else (weights, layer.out_features)
    return (weights - scales) * width - codes


def summary(layers: Sequence[QuantizedLayer], kind: str, *, of: int) -> Iterator[str]:
    """Lines for the user: how much is quantized, and how large the errors are.

    Args:
        layers: from `quantize_frozen`.
        kind: the format.
        of: weights of the network.
    """
    weights = sum(layer.num_weights for layer in layers)
    mean = sum(layer.error * layer.num_weights for layer in layers) / weights
    worst = max(layers, key=lambda layer: layer.error)
    yield f"quantized {weights / of:.0%} of the weights to {kind}: rounding error {mean:.2%} of their norm"
    yield f"  largest: {worst.error:.2%} in {worst.name.removesuffix('.base_layer')}"
