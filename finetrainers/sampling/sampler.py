"""Sample clips with several weights of one model: the base, LoRAs at several scales, full networks.

Each component is loaded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from finetrainers.config.prompts import ValidationPrompt
from finetrainers.config.root import TrainConfig
from finetrainers.memory.quantized_encoders import load_text_encoders
from finetrainers.models.registry import Family
from finetrainers.models.spec import DTYPES, are_mapped, leave_out_unused
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.trainable import trainable_dtype
from finetrainers.training.sampling import (
    EncodedPrompts,
    PromptRequest,
    SamplingComponents,
    encode_prompts,
    sample_prompts,
)
from finetrainers.training.trained_weights import (
    attach_lora,
    load_ema_weights,
    replace_lora,
    store_expert,
    store_frozen_weights,
)
from finetrainers.utils.process_state import free_memory

from .weights import Weights


class Sampler:
    """Sampler with the pipeline, dtypes and memory options of validation, which give the same frames.

    Text encoders are loaded to encode prompts, and freed. The VAE and one network stay loaded. A LoRA with the shape of
    the previous one, and a scale, are set without loading the network again.
    """

    def __init__(self, config: TrainConfig, family: Family, parallel: Strategy, *, offload: bool = False) -> None:
        """Args:
        config: the model, and the dtypes and memory options of sampling.
        family: of the model.
        parallel: device and mixed precision; for processes that do not share weights.
        offload: keep idle components of the pipeline in host memory.
        """
        self.config = config
        self.spec = family.load(config.model)
        self.parallel = parallel
        self.offload = offload
        #: Quantizes networks, or None for the CPU, where idle ones wait.
        self._storing_device = None if offload else parallel.device
        self.spec.store_expert = partial(store_expert, config=config, spec=self.spec, device=self._storing_device)
        self.scheduler = self.spec.load_scheduler()
        self._vae: nn.Module | None = None
        self._network: nn.Module | None = None
        self._loaded_weights: Weights | None = None  # weights of the loaded network

    def encode(
        self, prompts: Sequence[ValidationPrompt], *, negative: str = "", failed: dict[int, Exception] | None = None
    ) -> EncodedPrompts:
        """Encode prompts, with the text encoders loaded for it; see `encode_prompts`."""
        load = lambda: load_text_encoders(self.spec, self.parallel.device)  # noqa: E731
        mapped = are_mapped(self.config.model, self.spec.facts.text_parts)
        encoders = self.parallel.one_at_a_time("loading the text encoders", load, together=mapped)
        encoded = encode_prompts(self.spec, encoders, prompts, None, negative=negative, failed=failed)
        del encoders
        free_memory()
        return encoded

    def sample(
        self, weights: Weights, scale: float, requests: Sequence[PromptRequest]
    ) -> Iterator[np.ndarray | Exception]:
        """Yield the frames `[T, H, W, 3]` uint8 of each request, or the error that it failed with.

        Args:
            weights: to sample with.
            scale: of a LoRA; 0 is the network without it.
            requests: with conditions in any dtype.

        Raises:
            ValueError: the weights do not belong to this model.
        """
        network = self._prepare_network(weights, scale)
        dtype = self.parallel.compute_dtype(self._dtype(weights))
        device = self.parallel.device
        if self._vae is None:
            self._vae = self.spec.load_vae()
        if not self.offload:
            network.to(device)
            self._vae.to(device)
        parts = SamplingComponents(network, self._vae, self.scheduler, device, offload=self.offload)
        waiting = [
            replace(request, conditions=request.conditions.to("cpu", dtype), negative=request.negative.to("cpu", dtype))
            for request in requests
        ]
        while waiting:
            clips = sample_prompts(self.spec, parts, waiting)
            while waiting:
                try:
                    with self.parallel.autocast() if self.parallel.uses_autocast else nullcontext():
                        frames: Any = next(clips)
                except Exception as error:  # it concerns one clip; the others are still sampled
                    frames = error
                waiting = waiting[1:]
                yield frames
                if isinstance(frames, Exception):
                    frames.__traceback__ = None  # its stack frames hold tensors
                    del clips
                    free_memory()
                    break

    def free(self) -> None:
        """Free the network and the VAE."""
        self._network = self._loaded_weights = self._vae = None
        free_memory()

    def _dtype(self, weights: Weights) -> torch.dtype:
        """Return the dtype to load a network in: for a checkpoint of all weights, that of training."""
        is_trained = weights.kind == "full" and weights.is_checkpoint
        return trainable_dtype(self.config) if is_trained else DTYPES[self.config.model.transformer_dtype]

    def _prepare_network(self, weights: Weights, scale: float) -> nn.Module:
        """Return the network with these weights."""
        if self._network is None or not self._set_weights(weights):
            if self._network is not None:
                self._network = self._loaded_weights = None
                free_memory()
            self._network = self.parallel.one_at_a_time("loading the transformer", lambda: self._load(weights))
        if weights.kind != "base":
            self._loaded_weights = weights
        networks = [self._network]
        if self.config.model.other_expert is not None:
            networks += self.spec.experts.modules.values()
        for network in networks:
            _set_scale(network, 0.0 if weights.kind == "base" else scale)
        return self._network

    def _set_weights(self, weights: Weights) -> bool:
        """Set these weights on the loaded network, and return whether that was possible."""
        assert self._network is not None
        loaded = self._loaded_weights
        if weights == loaded:
            return True
        if weights.kind == "base":
            return loaded is None or loaded.kind == "lora"  # without its adapter
        if weights.kind == "full" or loaded is None or loaded.kind == "full":
            return False
        assert weights.path is not None
        if not replace_lora(weights.path, self._network, spec=self.spec):
            return False
        if weights.averages is not None:
            load_ema_weights(weights.averages, self._network)
        return True

    def _load(self, weights: Weights) -> nn.Module:
        dtype, folder = self._dtype(weights), weights.path if weights.kind == "full" else None
        network = self.spec.load_transformer(dtype, folder=folder).requires_grad_(False)
        if weights.kind == "lora":
            assert weights.path is not None
            attach_lora(weights.path, network, spec=self.spec)
        if weights.averages is not None:
            load_ema_weights(weights.averages, network)
        leave_out_unused(network)
        if weights.kind != "full":
            store_frozen_weights(network, self.config, self.spec, dtype=dtype, device=self._storing_device)
        if self.parallel.uses_autocast and self.parallel.accelerator.native_amp:
            # As accelerate wraps the trained network: some pipelines compute in the dtype of its outputs.
            network.forward = convert_outputs_to_fp32(network.forward)
        return network.eval().requires_grad_(False)


def _set_scale(network: nn.Module, scale: float) -> None:
    """Set the scale of an attached adapter relative to its own alpha; 0 disables it."""
    for module in network.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(enabled=scale != 0)
            if scale != 0:
                module.set_scale("default", scale)  # type: ignore[operator]
