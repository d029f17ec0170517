"""Wan against diffusers' own pipelines, for each kind of checkpoint; and what only some kinds are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from refusals import refused

from finetrainers.config.sections import ModelSection
from finetrainers.models.batch import PromptEmbeds, SampleRequest
from finetrainers.models.decoding import decode_gradient
from finetrainers.models.registry import get_family, with_family
from finetrainers.models.wan import WanSpec


def spec_of(repo: Path, expert: Any = None) -> WanSpec:
    section = ModelSection(
        model_name="wan", pretrained_model_name_or_path=str(repo), expert=expert, text_encoder_dtype="fp32",
        transformer_dtype="fp32", vae_dtype="fp32", part=["image_encoder=,fp32"],
    )  # fmt: skip
    spec = get_family("wan").load(section)
    assert isinstance(spec, WanSpec)
    return spec


def test_5b_samples_with_a_last_frame_in_its_place(tiny_repo: Callable[..., Path]) -> None:
    """Clean at time 0 in every call of the network, as in training; and kept."""
    spec = spec_of(tiny_repo("wan", "ti2v"))
    network = spec.load_transformer(torch.float32)
    pipeline = spec.pipeline(network, spec.load_vae(), FlowMatchEulerDiscreteScheduler())
    pipeline.set_progress_bar_config(disable=True)
    rows = spec.encode_text(spec.load_text_encoders(), ["a red ball", ""])
    calls: list[dict[str, Any]] = []
    network.register_forward_pre_hook(lambda _, args, kwargs: calls.append(dict(kwargs)), with_kwargs=True)
    request = SampleRequest(9, 64, 32, 24.0, 3, 2.0, last_image=Image.new("RGB", (32, 64), (250, 10, 10)))
    for given in (request, replace(request, image=Image.new("RGB", (32, 64), (10, 10, 250)))):
        calls.clear()
        spec.sample(pipeline, rows.rows([0]), rows.rows([1]), given, torch.Generator().manual_seed(1))
        latents = torch.stack([call["hidden_states"][0] for call in calls])
        times = torch.stack([call["timestep"][0].view(3, -1) for call in calls])
        is_given = [given.image is not None, False, True]
        for frame, is_clean in enumerate(is_given):
            assert torch.equal(latents[:, :, frame], latents[:1, :, frame].expand_as(latents[:, :, frame])) == is_clean
            assert bool((times[:, frame] == 0).all()) == is_clean


def test_the_gradient_of_the_residual_vae_is_that_without_recomputation(tiny_repo: Callable[..., Path]) -> None:
    """Its decoder has a cache of features, of each frame before the next one."""
    spec = spec_of(tiny_repo("wan", "ti2v"))
    vae = spec.load_vae()
    latents = torch.randn(1, 48, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(1, 3, 5, 32, 32, generator=torch.Generator().manual_seed(1))
    gradients = [
        decode_gradient(
            spec, vae, latents, spec.vae_stats(vae), lambda video: ((video * weights).sum(), None), checkpointing=on
        )[0]
        for on in (False, True)
    ]
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_rollouts_take_the_levels_that_the_scheduler_rounds_down(tiny_repo: Callable[..., Path]) -> None:
    """UniPC tells the network whole timesteps; rollouts and training tell it the exact noise level of the latents."""
    spec = spec_of(tiny_repo("wan"))
    scheduler = spec.load_scheduler()
    times = spec.sampling_times(scheduler, 7, num_tokens=64)
    scheduler.set_timesteps(7)
    assert torch.equal(times, scheduler.sigmas[:-1])
    assert torch.equal((1000 * times).long(), scheduler.timesteps)


def test_first_and_last_frame_checkpoints_need_both_images(tiny_repo: Callable[..., Path]) -> None:
    spec = spec_of(tiny_repo("wan", "flf2v"))
    empty = PromptEmbeds({"prompt_embeds": torch.zeros(1, 512, 32)})
    request = SampleRequest(9, 64, 32, 16.0, 2, image=Image.new("RGB", (32, 64)))
    with refused("required"):
        spec.pipeline_call(empty, empty, request)
    assert spec.pipeline_call(empty, empty, replace(request, last_image=request.image))["last_image"] is request.image


def test_the_vae_is_in_fp32_unless_set(tiny_repo: Callable[..., Path]) -> None:
    section = ModelSection(pretrained_model_name_or_path=str(tiny_repo("wan")))
    assert with_family(section).vae_dtype == "fp32"
    assert with_family(section.model_copy(update={"model_name": "wan"})).vae_dtype == "fp32"
    chosen = ModelSection(pretrained_model_name_or_path=str(tiny_repo("wan")), vae_dtype="bf16")
    assert with_family(chosen).vae_dtype == "bf16"


def test_other_channels_are_refused() -> None:
    read = get_family("wan").read
    assert read({"transformer": {"in_channels": 36, "out_channels": 16}}).first_frame == "channels"
    with refused("unsupported", "48"):
        read({"transformer": {"in_channels": 48, "out_channels": 16}})
