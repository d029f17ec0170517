"""Every kind of checkpoint of every family against its own pipeline, and the comparison itself against wrong specs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import DiffusionPipeline
from every_family import CHECKPOINTS, in_fp32

from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec
from finetrainers.testing import same_calls

FP32 = dict.fromkeys(("text_encoder_dtype", "text_encoder_2_dtype", "transformer_dtype", "vae_dtype"), "fp32")


def spec_of(name: str, repo: Path, expert: Any = None) -> ModelSpec:
    section = ModelSection(model_name=name, pretrained_model_name_or_path=str(repo), expert=expert, **FP32)
    family = get_family(name)
    return family.load(section.model_copy(update={"part": in_fp32(family.facts_of(section))}))


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "version"), CHECKPOINTS)
def test_calls_videos_and_samples_are_the_pipelines(
    name: str, version: str | None, tiny_repo: Callable[..., Path]
) -> None:
    repo = tiny_repo(name, version)
    facts = spec_of(name, repo).facts
    if facts.media or facts.text_sees_image:
        # Pipelines with a control video take no number of frames; where text sees the image, it is in the noise, too.
        pytest.skip("compared in the family's own tests")
    for expert in (None,) if facts.boundary is None else ("high", "low"):
        spec = spec_of(name, repo, expert)
        equal = same_calls(spec, DiffusionPipeline.from_pretrained(repo, dtype=torch.float32))
        assert ("calls" in equal) == (not facts.needs_image)
        from_images = sum(called.startswith("calls") for called in equal) - ("calls" in equal)
        assert from_images == (spec.image_pipeline_class is not None)


@pytest.mark.rotating
@pytest.mark.parametrize("hook", ["predict", "sampling_times", "decode", "encode_text"])
def test_a_wrong_hook_is_noticed(hook: str, tiny_repo: Callable[..., Path]) -> None:
    repo = tiny_repo("wan")
    spec = spec_of("wan", repo)
    right = getattr(spec, hook)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        if hook == "encode_text":
            result["prompt_embeds"].mul_(1.01)
            return result
        return -result

    with patch.object(spec, hook, wrong), pytest.raises(AssertionError, match="differs by"):
        same_calls(spec, DiffusionPipeline.from_pretrained(repo, dtype=torch.float32))
