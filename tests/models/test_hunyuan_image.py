"""HunyuanVideo-I2V, of both kinds, against diffusers' own pipeline: text with image, single steps, whole samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from refusals import refused

from finetrainers.config.sections import ModelSection
from finetrainers.models.hunyuan_video import HunyuanVideoSpec
from finetrainers.models.registry import get_family
from finetrainers.models.spec import PromptEmbeds, SampleRequest, VideoMeta

KINDS = ("token_replace", "latent_concat")
PROMPT, LONG = "a red ball", "a blue square moves slowly to the left over the dark sea at night"
SIZE: dict[str, int] = {"num_frames": 9, "height": 64, "width": 48, "num_inference_steps": 2}


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE["height"], SIZE["width"], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module", params=KINDS)
def spec(request: pytest.FixtureRequest, tiny_repo: Callable[..., Path]) -> HunyuanVideoSpec:
    dtypes: dict[str, Any] = dict.fromkeys(("text_encoder_dtype", "text_encoder_2_dtype", "vae_dtype"), "fp32")
    repo = str(tiny_repo("hunyuan_video", version=request.param))
    return get_family("hunyuan_video").load(
        ModelSection(model_name="hunyuan_video", pretrained_model_name_or_path=repo, **dtypes)
    )


@pytest.mark.rotating
def test_text_image_steps_and_samples_are_the_pipelines(spec: HunyuanVideoSpec) -> None:
    facts, replaces = spec.facts, spec._kind == "token_replace"
    assert (facts.first_frame, facts.needs_image, facts.text_sees_image) == (
        "tokens" if replaces else "channels", True, True
    )  # fmt: skip
    pipe = DiffusionPipeline.from_pretrained(spec.config.pretrained_model_name_or_path, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe) is spec.pipeline_class is spec.image_pipeline_class
    calls: list[dict[str, Any]] = []
    pipe.transformer.register_forward_hook(
        lambda _, args, given, output: calls.append({**given, "output": output[0]}), with_kwargs=True
    )
    image, other = picture(0), picture(1)
    seed = torch.Generator().manual_seed
    expected = pipe(image, PROMPT, **SIZE, output_type="pt", generator=seed(3)).frames

    encoders = spec.load_text_encoders()
    found = spec.encode_with_images(encoders, [PROMPT, LONG, PROMPT], [image, image, other])
    row = found.rows([0])
    assert {name: tuple(t.shape[1:]) for name, t in found.tensors.items()} == spec.text_shapes()
    torch.testing.assert_close(row["prompt_embeds"], calls[0]["encoder_hidden_states"], rtol=0, atol=1e-6)
    torch.testing.assert_close(row["prompt_attention_mask"], calls[0]["encoder_attention_mask"].bool())
    torch.testing.assert_close(row["pooled_prompt_embeds"], calls[0]["pooled_projections"], rtol=0, atol=1e-6)
    assert not torch.allclose(found["prompt_embeds"][0], found["prompt_embeds"][2], atol=1e-4)  # another image
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    again = spec.encode_with_images(encoders, [PROMPT], [pixels])
    assert all(torch.equal(again[name], tensor) for name, tensor in row.tensors.items())
    lengths = found["prompt_attention_mask"].sum(1).tolist()
    ends = [int(mask.nonzero().max()) + 1 for mask in found["prompt_attention_mask"]]
    assert lengths == ends  # so the text can be cut there

    given = calls[0]["hidden_states"]
    assert given.shape[1] == (16 if replaces else 33)
    transformer, vae, meta = spec.load_transformer(torch.float32), spec.load_vae(), VideoMeta(fps=torch.tensor([24.0]))
    time = calls[0]["timestep"] / 1000
    frame = spec.vae_stats(vae).normalize(vae.encode(pixels[None, :, None] / 127.5 - 1).latent_dist.mode()).detach()
    if replaces:
        torch.testing.assert_close(given[:, :, :1], frame, rtol=0, atol=1e-5)
        time = torch.cat([torch.zeros(1, 1), time[:, None].expand(1, 2)], dim=1)
        x = given
    else:
        torch.testing.assert_close(given[:, 16:32, :1], frame, rtol=0, atol=1e-5)
        assert given[:, 32, 0].all()
        meta, x = VideoMeta(meta.fps, {"first_frame": frame}), given[:, :16]
    with torch.no_grad():
        ours = spec.predict(transformer, x, time, row, VideoMeta(meta.fps, meta.extra, facts.guidance))
    torch.testing.assert_close(ours, calls[0]["output"], rtol=0, atol=1e-5)

    built = spec.pipeline(transformer, vae, spec.load_scheduler(), image_to_video=True)
    built.set_progress_bar_config(disable=True)
    call = spec.pipeline_call(
        row, spec.encode_text(encoders, [""]), SampleRequest(**SIZE, frame_rate=24.0, image=image)
    )
    actual = built(**call, output_type="pt", generator=seed(3)).frames
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    guided = {"true_cfg_scale": 3.0}
    expected = pipe(image, PROMPT, negative_prompt="", **SIZE, **guided, output_type="pt", generator=seed(3)).frames
    torch.testing.assert_close(
        built(**call, **guided, output_type="pt", generator=seed(3)).frames, expected, rtol=0, atol=1e-4
    )


def test_an_image_is_asked_for(spec: HunyuanVideoSpec) -> None:
    conditions = PromptEmbeds({})
    with refused("required", "hunyuan_video", "validation_images"):
        spec.pipeline_call(conditions, conditions, SampleRequest(**SIZE, frame_rate=24.0))
    assert (spec.token_plan is None) == (spec._kind == "token_replace")
