"""Bytes of a checkpoint's frozen networks, and of the VAE at work, for the memory estimate."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

import torch
from diffusers import ModelMixin

from .common import DTYPES
from .files.files import frozen_dtype


def frozen_bytes(spec: Any, part: str) -> float | None:
    """Bytes of a frozen network in the dtype that it is loaded in, by its config; None: that is not on this disk."""
    number = num_weights(spec, part)
    return None if number is None else float(number * DTYPES[frozen_dtype(spec.config, part)].itemsize)


def num_weights(spec: Any, part: str) -> int | None:
    """How many weights a network has, by its config; None: that is not on this disk."""
    config = spec.configs.get(part)
    return None if config is None else _count_parameters(spec.parts[part], json.dumps(config))


@lru_cache(maxsize=32)
def _count_parameters(cls: Any, config_json: str) -> int:
    """Count the parameters of a network of this class and config; many estimates of one process ask for the same."""
    config = json.loads(config_json)
    with torch.device("meta"):
        is_diffusers = issubclass(cls, ModelMixin)
        network = cls.from_config(config) if is_diffusers else cls(cls.config_class.from_dict(config))
    return sum(p.numel() for p in network.parameters())


def vae_working_bytes(
    spec: Any, size: tuple[int, int, int], *, batch: int = 1, gradient: bool = False, stored: bool = False
) -> float:
    """About what the VAE takes at its peak for `batch` clips of a size in pixels, as `ModelSpec.fit_vae` sets it up.

    Args:
        spec: of the model.
        size, batch: of the clips.
        gradient: whether decoding has a backward pass.
        stored: whether that stores all activations instead of recomputing the decoder.
    """
    frames, height, width = size
    bytes_per_number = max(2, DTYPES[spec.config.vae_dtype].itemsize)
    if stored:
        return batch * spec.vae_graph_bytes[2] * math.prod(size) * bytes_per_number / 2
    slicing, tiling = spec.vae_mode(size, batch=batch, gradient=gradient)
    whole = spec.vae_bytes(size, gradient=gradient)
    if tiling:
        tile = (frames, min(height, spec.vae_tile[0]), min(width, spec.vae_tile[1]))
        # Tiles are put together, and in backward their gradients are taken apart.
        put_together = 3 * math.prod(size) * bytes_per_number * (2 if gradient else 1)
        whole = min(whole, spec.vae_bytes(tile, gradient=gradient) + put_together)
    return whole * (1 if slicing else batch)
