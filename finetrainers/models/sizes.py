"""Bytes of a checkpoint's frozen networks, and of the VAE at work, for the memory estimate."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

from diffusers import ModelMixin

from finetrainers.config.sections import ModelSection
from finetrainers.utils.device import meta_device
from finetrainers.utils.reading import parse_json

from .common import DTYPES
from .files.files import frozen_dtype


def frozen_bytes(spec: Any, part: str) -> float | None:
    """Return the bytes of a frozen network in its loading dtype, by its config, or None if that is not on this disk."""
    number = num_weights(spec, part)
    return None if number is None else float(number * DTYPES[frozen_dtype(spec.config, part)].itemsize)


def encoded_bytes(config: ModelSection, part: str, shape: tuple[int, ...]) -> float:
    """Return the bytes of a tensor that a frozen part makes; weights in 8 bits compute in 16."""
    return float(math.prod(shape) * max(2, DTYPES[frozen_dtype(config, part)].itemsize))


def num_weights(spec: Any, part: str) -> int | None:
    """Count a network's parameters by its config, or return None if that is not on this disk."""
    config = spec.configs.get(part)
    return None if config is None else _count_parameters(spec.parts[part], json.dumps(config))


@lru_cache(maxsize=32)
def _count_parameters(cls: Any, config_json: str) -> int:
    """Count the parameters of a network of this class and config; cached, since many estimates need the same."""
    config = parse_json(config_json)
    with meta_device():
        is_diffusers = issubclass(cls, ModelMixin)
        network = cls.from_config(config) if is_diffusers else cls(cls.config_class.from_dict(config))
    return sum(p.numel() for p in network.parameters())


def vae_working_bytes(
    spec: Any, size: tuple[int, int, int], *, batch: int = 1, gradient: bool = False, stored: bool = False
) -> float:
    """Estimate the VAE's peak memory for `batch` clips of a size in pixels, as `ModelSpec.fit_vae` sets it up.

    Args:
        spec: spec of the model.
        size, batch: size and number of the clips.
        gradient: whether decoding has a backward pass.
        stored: whether that stores all activations instead of recomputing the decoder.
    """
    frames, height, width = size
    bytes_per_number = max(2, DTYPES[spec.config.vae_dtype].itemsize)
    if stored:
        return batch * spec.vae_graph_bytes[2] * math.prod(size) * bytes_per_number / 2
    slicing, tiling = spec.vae_mode(size, batch=batch, gradient=gradient)
    clip_bytes = spec.vae_bytes(size, gradient=gradient)
    if tiling:
        tile = (frames, min(height, spec.vae_tile[0]), min(width, spec.vae_tile[1]))
        # Tiles are put together, and in backward their gradients are taken apart.
        joined_bytes = 3 * math.prod(size) * bytes_per_number * (2 if gradient else 1)
        clip_bytes = min(clip_bytes, spec.vae_bytes(tile, gradient=gradient) + joined_bytes)
    return clip_bytes * (1 if slicing else batch)
