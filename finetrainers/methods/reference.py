"""The reference model: the network at the start of the run, which losses hold the trained network close to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .base import MethodParts

#: Name of the frozen adapter that holds the LoRA of the start of a run.
REFERENCE_ADAPTER = "reference_model"
#: Function of the (wrapped) network in training; returns a context that yields the reference model.
Reference = Callable[[nn.Module], AbstractContextManager[nn.Module]]


def reference_model(parts: MethodParts[Any]) -> Reference:
    """Return a function whose context yields the reference model.

    A LoRA is switched off, or replaced by the frozen adapter if the run began with a LoRA. With full finetuning, a
    frozen copy of the network is loaded, which takes as much memory as its weights; a LoRA that the run began with is
    merged into it.
    """
    network: Any = parts.network
    if parts.config.training.training_type == "lora":
        if REFERENCE_ADAPTER in getattr(network, "peft_config", {}):
            return _with_adapter(network)

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
        if parts.initial_lora is not None:
            parts.spec.merge_lora(copy, parts.initial_lora)
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


def _with_adapter(network: nn.Module) -> Reference:
    """Return a function whose context makes the layers of a LoRA compute with the frozen adapter."""
    layers = [layer for layer in network.modules() if isinstance(layer, BaseTunerLayer)]

    @contextlib.contextmanager
    def initial_lora(transformer: nn.Module) -> Iterator[nn.Module]:
        active = [layer._active_adapter for layer in layers]
        # PEFT's own `set_adapter` would also change which weights require gradients, which strategies have recorded.
        for layer in layers:
            layer._active_adapter = [REFERENCE_ADAPTER]
        try:
            yield transformer
        finally:
            for layer, names in zip(layers, active, strict=True):
                layer._active_adapter = names

    return initial_lora
