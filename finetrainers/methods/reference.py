"""The reference model: the network before training, which losses hold the trained one close to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .base import MethodParts

#: Gives, for the (wrapped) network in training, a context within which the returned network is the reference model.
Reference = Callable[[nn.Module], AbstractContextManager[nn.Module]]


def reference_model(parts: MethodParts[Any]) -> Reference:
    """A context within which the returned network is the model before training.

    A LoRA is switched off; of a fully trained network a frozen copy is loaded, which takes as much memory as its weights.
    """
    network: Any = parts.network
    if parts.config.training.training_type == "lora":

        @contextlib.contextmanager
        def without_adapter(transformer: nn.Module) -> Iterator[nn.Module]:
            network.disable_adapters()
            try:
                yield transformer
            finally:
                network.enable_adapters()

        return without_adapter

    def load() -> nn.Module:
        copy = parts.spec.load_transformer(parts.weights_dtype)
        parts.spec.split_tokens(copy, parts.parallel.sequence_group, parts.config.parallel.sp_mode)
        if parts.config.memory.compile == "regional":
            parts.spec.compile_blocks(copy)
        return copy

    frozen = parts.parallel.prepare_frozen(load, weights=parts.weights_dtype, blocks=parts.spec.blocks)

    @contextlib.contextmanager
    def frozen_copy(_: nn.Module) -> Iterator[nn.Module]:
        with torch.no_grad(), parts.parallel.autocast():
            yield frozen

    return frozen_copy
