"""Predictions of the families' tiny networks on random inputs, through their `predict`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.config.sections import ModelSection
from finetrainers.models.batch import PromptEmbeds
from finetrainers.models.registry import get_family


def spec_of(repo: Path, family: str, backend: str) -> Any:
    config = ModelSection(model_name=family, pretrained_model_name_or_path=str(repo), attn_backend=backend)
    return get_family(family).load(config)


def predict(
    spec: Any,
    network: nn.Module,
    *,
    batch: int = 1,
    text: int = 7,
    frames: int = 9,
    size: tuple[int, int] = (64, 64),
    times_per_frame: bool = False,
) -> Tensor:
    """A prediction with gradients, on random inputs that the arguments decide; `text`: tokens of each prompt."""
    generator = torch.Generator().manual_seed(batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    conditions, meta = spec.empty_inputs(batch)
    masks = {name for name in conditions.tensors if name.endswith("_mask")}
    tensors = {name: normal(*tensor.shape) for name, tensor in conditions.tensors.items()}
    for name in masks:
        tensors[name] = (torch.arange(tensors[name].shape[1]) < text).expand(batch, -1)
    x = spec.padded(normal(batch, spec.latent_channels(network), *spec.facts.geometry.denoised_shape(frames, *size)))
    meta = SimpleNamespace(**{**vars(meta), "extra": {name: torch.zeros_like(x) for name in spec.facts.media}})
    t = torch.full((batch,), 0.5) if spec.facts.is_flow else torch.full((batch,), 500)
    if times_per_frame:
        t = t[:, None] * torch.linspace(0, 1, x.shape[2])
    given = PromptEmbeds(tensors, (text,) * batch if masks else None)
    return spec.predict(network, x, t, given, meta)
