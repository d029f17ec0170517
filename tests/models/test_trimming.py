"""Text without its padding: the networks that mask padding give the same with less of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from every_family import FAMILIES

from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec, PromptEmbeds, VideoMeta

PROMPTS = ["a red ball moves left", "a dog"]


def load(family: str, repo: Path) -> ModelSpec:
    dtypes = {"text_encoder_dtype": "fp32", "text_encoder_2_dtype": "fp32", "transformer_dtype": "fp32"}
    config = ModelSection(model_name=family, pretrained_model_name_or_path=str(repo), **dtypes)
    return get_family(family).load(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_networks_that_mask_padding_do_not_miss_it(family: str, tiny_repo: Callable[..., Path]) -> None:
    spec = load(family, tiny_repo(family))
    conditions = spec.encode_text(spec.load_text_encoders(), PROMPTS)
    trimmed = conditions.trimmed()
    if "prompt_attention_mask" not in conditions.tensors:  # padding is attended to
        assert trimmed is conditions
        return
    before, after = conditions["prompt_embeds"].shape[1], trimmed["prompt_embeds"].shape[1]
    assert after % 16 == 0
    assert after < before
    assert trimmed["prompt_attention_mask"].sum() == conditions["prompt_attention_mask"].sum()
    transformer = spec.load_transformer(torch.float32)
    x = torch.randn((2, spec.latent_channels(transformer), 3, 4, 4), generator=torch.Generator().manual_seed(0))
    t, meta = torch.tensor([0.3, 0.8]), VideoMeta(fps=torch.tensor([8.0, 8.0]))
    with torch.no_grad():
        expected = spec.predict(transformer, x, t, conditions, meta)
        found = spec.predict(transformer, x, t, trimmed, meta)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_longest_row_decides() -> None:
    mask = torch.zeros(2, 64, dtype=torch.bool)
    mask[0, :3] = mask[1, :17] = True
    trimmed = PromptEmbeds({"prompt_embeds": torch.randn(2, 64, 4), "prompt_attention_mask": mask}).trimmed()
    assert trimmed["prompt_embeds"].shape == (2, 32, 4)
    assert trimmed["prompt_attention_mask"].shape == (2, 32)


def test_the_host_knows_how_long_texts_are_once_it_has_seen_their_mask() -> None:
    """So that no forward pass waits for a device to ask it."""
    mask = torch.zeros(3, 64, dtype=torch.bool)
    mask[0, :3] = mask[1, :17] = mask[2, :9] = True
    conditions = PromptEmbeds({"prompt_embeds": torch.randn(3, 64, 4), "prompt_attention_mask": mask})
    assert conditions.lengths is None
    moved, trimmed = conditions.to("meta"), conditions.trimmed()
    assert moved.lengths == trimmed.lengths == (3, 17, 9)
    assert moved.to("meta").lengths == (3, 17, 9)
    assert moved.rows([2, 0]).lengths == (9, 3)
    assert moved.rows(slice(1, None)).lengths == (17, 9)
    assert moved.zeroed().lengths == (3, 17, 9)
    assert PromptEmbeds.cat([moved.rows([1]), PromptEmbeds(moved.tensors)]).lengths is None
    assert PromptEmbeds.cat([moved.rows([1]), moved]).lengths == (17, 3, 17, 9)


def test_text_without_a_mask_is_left_alone() -> None:
    """A network that was trained to read its padding needs all of it."""
    conditions = PromptEmbeds({"prompt_embeds": torch.randn(2, 64, 4)})
    assert conditions.trimmed() is conditions
