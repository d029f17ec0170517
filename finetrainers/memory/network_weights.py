"""Weights of a network, listed once for many memory estimates: walking the modules takes most of an estimate's time."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from finetrainers.utils.device import page_locked_bytes

if TYPE_CHECKING:
    from torch import nn

    from finetrainers.models.spec import ModelSpec

T = TypeVar("T")


class NetworkWeights:
    """The weights of a network that does not change.

    Attributes:
        network: the network, which may lie on the meta device.
        all: its weights.
        blocks: the weights of each of its repeated blocks.
        frozen_adapters: `id` of each weight of frozen adapters, which are fp32 like trainable ones.
        in_fp32: `id` of each other frozen weight in fp32 whatever dtype the network is loaded in.
        total, trained: number of parameters, and of trainable ones.
        largest: parameters of the largest trainable weight.
    """

    def __init__(self, network: nn.Module, spec: ModelSpec) -> None:
        self.network = network
        self.all = list(network.parameters())
        self.blocks = [list(block.parameters()) for block in spec.block_modules(network)]
        frozen = [(name, p) for name, p in network.named_parameters() if not p.requires_grad]
        self.frozen_adapters = {id(p) for name, p in frozen if ".lora_" in name}
        self.in_fp32 = {id(p) for name, p in frozen if any(part in name for part in spec.fp32_weights)}
        self.total = sum(p.numel() for p in self.all)
        trainable = [p.numel() for p in self.all if p.requires_grad]
        self.trained, self.largest = sum(trainable), max(trainable, default=0)
        self._cache: dict[Hashable, Any] = {}

    def bytes_cast(self, skip: list[str]) -> Mapping[int, float]:
        """Return the bytes of the weights that layerwise upcasting stores in 8 bits, by their `id`."""
        from .casting import castable_layers  # needs torch, as the caller's network does

        def find() -> Mapping[int, float]:
            layers = castable_layers(self.network, skip_modules_pattern=skip)
            return {id(p): float(p.numel()) for _, layer in layers for p in layer.parameters()}

        return self.once(("cast", *skip), find)

    def bytes_saved(self, kind: str, *, skip: tuple[str, ...], width: int) -> Mapping[int, float]:
        """Return the bytes that quantization saves of each weight, by its `id`."""
        from .quantization import bytes_saved

        key = ("quantized", kind, skip, width)
        return self.once(key, lambda: bytes_saved(self.network, kind, skip=skip, width=width))

    def page_locked_bytes(self, width: float, *, shards: float = 1, trained: bool = False) -> float:
        """Return the bytes of page-locked copies of the weights, or of the trained ones, each allocated by torch.

        Args:
            width: bytes of a number.
            shards: processes that share each weight.
            trained: whether only trained weights are copied.
        """

        def find() -> float:
            weights = (p for p in self.all if p.requires_grad or not trained)
            return float(sum(page_locked_bytes(math.ceil(width * p.numel() / shards)) for p in weights))

        return self.once(("page-locked", width, shards, trained), find)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return the value for this key, computed once; only the network and the key may decide it."""
        if key not in self._cache:
            self._cache[key] = find()
        return self._cache[key]
