"""Samples of LTX-Video with given frames, against diffusers' image-to-video and condition pipelines, and a loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTXConditionPipeline, LTXImageToVideoPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from finetrainers.config.sections import ModelSection
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.models.registry import get_family
from finetrainers.models.spec import PromptEmbeds, SampleRequest

STEPS = 3
REQUEST = SampleRequest(
    num_frames=33, height=64, width=64, frame_rate=24.0, num_inference_steps=STEPS, guidance_scale=2.5
)


class ModelComponents:
    """A tiny checkpoint, loaded once."""

    def __init__(self, repository: Path) -> None:
        self.spec = get_family("ltx_video").load(
            ModelSection(
                model_name="ltx_video", pretrained_model_name_or_path=str(repository), text_encoder_dtype="fp32",
                transformer_dtype="fp32", vae_dtype="fp32",
            )
        )  # fmt: skip
        assert isinstance(self.spec, LTXVideoSpec)
        self.vae, self.transformer = self.spec.load_vae(), self.spec.load_transformer(torch.float32).eval()
        rows = self.spec.encode_text(self.spec.load_text_encoders(), ["a red ball", ""])
        self.conditions, self.negative = rows.rows([0]), rows.rows([1])
        self.scheduler = FlowMatchEulerDiscreteScheduler()  # its steps are those of every pipeline

    def built(self, cls: type | None = None) -> Any:
        pipeline = self.spec.pipeline(self.transformer, self.vae, self.scheduler)
        if cls is not None:
            pipeline = cls(**pipeline.components)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def sample(self, request: SampleRequest, seed: int = 1) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        return self.spec.sample(self.built(), self.conditions, self.negative, request, generator)

    def call(self, request: SampleRequest) -> dict[str, Any]:
        call = self.spec.pipeline_call(self.conditions, self.negative, request)
        return {**call, "generator": torch.Generator().manual_seed(1), "output_type": "np"}


@pytest.fixture(scope="module")
def parts(tiny_repo: Callable[..., Path]) -> ModelComponents:
    return ModelComponents(tiny_repo("ltx_video"))


def clip(frames: int) -> torch.Tensor:
    """Pixels `[1, 3, T, H, W]` in [-1, 1]."""
    return 2 * torch.rand(1, 3, frames, 64, 64, generator=torch.Generator().manual_seed(frames)) - 1


def image(seed: int) -> torch.Tensor:
    return torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))


def test_a_prefix_of_one_frame_is_what_the_image_to_video_pipeline_samples(parts: ModelComponents) -> None:
    first = clip(1)
    expected = parts.built(LTXImageToVideoPipeline)(**parts.call(replace(REQUEST, image=(first[:, :, 0] + 1) / 2)))
    steps: list[int] = []
    count = {"callback_on_step_end": lambda pipeline, step, t, values: steps.append(step) or {}}
    found = parts.sample(replace(REQUEST, prefix=first, extra=count))
    np.testing.assert_allclose(found, expected.frames[0], atol=1e-5)
    assert steps == [*range(STEPS)]  # whoever counts steps is told


def test_a_longer_prefix_is_what_the_condition_pipeline_samples(
    parts: ModelComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart from its later convention for latent frame times, its own schedule, and its noise on given frames."""

    def coordinates(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return (
            ids
            * torch.tensor([options["scale_factor_t"], options["scale_factor"], options["scale_factor"]])[None, :, None]
        )

    monkeypatch.setattr(LTXConditionPipeline, "_scale_video_ids", staticmethod(coordinates))
    # It draws the noise before the posterior.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    prefix = clip(17)
    pipeline = parts.built(LTXConditionPipeline)
    monkeypatch.setattr(pipeline.video_processor, "preprocess_video", lambda video, *_: video)
    times = [1000 * (1 - step / STEPS) for step in range(STEPS)]
    call = parts.call(REQUEST) | {"timesteps": times, "image_cond_noise_scale": 0.0}
    expected = pipeline(video=prefix, **call).frames[0]
    found = parts.sample(replace(REQUEST, prefix=prefix))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - parts.sample(REQUEST)).max() > 0.01


def by_hand(parts: ModelComponents, latents: torch.Tensor, given: torch.Tensor) -> np.ndarray:
    """Take Euler steps with guidance by the network itself; noise `[1, C, T, H, W]` is drawn after the posteriors'."""
    spec, meta = parts.spec, spec_meta(REQUEST)
    x = latents
    for step in range(STEPS):
        t = 1 - step / STEPS
        times = torch.where(given, 0.0, t)[None]
        with torch.no_grad():
            both = [spec.predict(parts.transformer, x, times, one, meta) for one in (parts.negative, parts.conditions)]
        velocity = both[0] + 2.5 * (both[1] - both[0])
        x = torch.where(given.view(1, 1, -1, 1, 1), x, x - velocity / STEPS)
    return spec.decode(parts.vae, x, spec.vae_stats(parts.vae))[0].permute(1, 2, 3, 0).numpy()


def spec_meta(request: SampleRequest) -> Any:
    from finetrainers.models.spec import VideoMeta

    return VideoMeta(fps=torch.tensor([request.frame_rate]))


def test_first_and_last_frame_are_in_their_places(parts: ModelComponents) -> None:
    spec, generator = parts.spec, torch.Generator().manual_seed(1)

    def encoded(pixels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = parts.vae.encode(pixels).latent_dist.sample(generator)
        return spec.vae_stats(parts.vae).normalize(found)

    first, last = image(1), image(2)
    head = encoded(2 * first[:, :, None] - 1)
    tail = encoded(2 * last[:, :, None].expand(-1, -1, 9, -1, -1) - 1)[:, :, -1:]
    noise = torch.randn(1, 128, 5, 2, 2, generator=generator)
    start = torch.cat([head, noise[:, :, 1:-1], tail], dim=2)
    given = torch.tensor([True, False, False, False, True])
    found = parts.sample(replace(REQUEST, image=first, last_image=last))
    np.testing.assert_allclose(found, by_hand(parts, start, given), atol=1e-4)

    # Every given frame matters, also to the frames between, and the hook leaves the network as it was.
    assert not parts.transformer._forward_pre_hooks
    for other in (replace(REQUEST, image=first, last_image=image(3)), replace(REQUEST, last_image=last)):
        assert np.abs(parts.sample(other)[9:25] - found[9:25]).max() > 1e-3


def test_other_families_are_given_no_frames_but_the_first(tiny_repo: Callable[..., Path]) -> None:
    from finetrainers.config.prompts import ValidationPrompt
    from finetrainers.training.sampling import EncodedPrompts, SamplingSettings, prompt_request

    section = ModelSection(model_name="cogvideox", pretrained_model_name_or_path=str(tiny_repo("cogvideox")))
    encoded = EncodedPrompts(
        [ValidationPrompt(prompt="a", last_image="x.png")], [PromptEmbeds({})], [None], [None], PromptEmbeds({})
    )
    with pytest.raises(ValueError, match=r"cogvideox .*last_image.*video_prefix"):
        prompt_request(
            get_family("cogvideox").load(section), encoded, 0, size=(9, 64, 64), settings=SamplingSettings(8, 2), seed=0
        )
