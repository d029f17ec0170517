"""The loss of each kind of Wan against a derivation from pixels in float64, through the stock network in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from derived import KEYS, SEED, Setting, normalize
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionModel

from finetrainers.models.spec import Batch, PromptEmbeds, VideoMeta
from finetrainers.models.wan import IMAGE_STATES
from finetrainers.utils.seeding import derive_seed

FRAMES, HEIGHT, WIDTH = 9, 64, 32


def draws(key: tuple[int, int], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Noise of the posterior, and the noise that is added."""
    generator = torch.Generator().manual_seed(derive_seed(SEED, "train", *key))
    return torch.randn(shape, generator=generator).double(), torch.randn(shape, generator=generator).double()


def given_on_channels(repo: Path, vae: Any, clip: Tensor, places: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The mask, with a channel for each frame of a latent frame, and the latents of the given frames among gray."""
    pixels = torch.zeros(1, *clip.shape, dtype=torch.float64)
    pixels[:, :, places] = clip[None][:, :, places].double() / 127.5 - 1
    with torch.no_grad():
        latents = normalize("wan", vae, vae.encode(pixels).latent_dist.mean[0])
    mask = torch.zeros(FRAMES, *shape[2:], dtype=torch.float64)
    mask[list(places)] = 1.0
    mask = torch.cat([mask[:1].repeat(4, 1, 1), mask[1:]]).view(shape[1], 4, *shape[2:]).transpose(0, 1)
    return torch.cat([mask, latents])


def image_states(repo: Path, clip: Tensor, places: tuple[int, ...]) -> Tensor:
    images = [Image.fromarray(np.asarray(clip[:, place].permute(1, 2, 0))) for place in places]
    pixels = CLIPImageProcessor.from_pretrained(repo / "image_processor")(images, return_tensors="pt").pixel_values
    encoder = CLIPVisionModel.from_pretrained(repo / "image_encoder").double()
    with torch.no_grad():
        return encoder(pixels.double(), output_hidden_states=True).hidden_states[-2]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("version", "expert", "places"),
    [("t2v", None, ()), ("i2v", None, (0,)), ("flf2v", None, (0, -1)), ("ti2v", None, (0,)), ("a14b", "low", ()),
     ("a14b_i2v", "high", (0,))],
)  # fmt: skip
def test_it_is_that_of_the_stock_network_in_float64(
    version: str, expert: str | None, places: tuple[int, ...], tiny_repo: Callable[..., Path]
) -> None:
    """With a shift, a loss weight, and masks; 5B is given the first frame of some clips, at time 0 of its tokens."""
    repo, is_token = tiny_repo("wan", version), version == "ti2v"
    setting = Setting(
        repo, "wan", given=f"first={0.5 if is_token else 1}" if places else "", expert=expert,
        part=["image_encoder=,fp32"], flow_weighting_scheme="sigma_sqrt", flow_shift=3.0,
    )  # fmt: skip
    spec, method, part = setting.spec, setting.method, setting.spec.facts.trained
    del spec.predict  # its own again
    times: list[Tensor] = []
    network = spec.load_transformer(torch.float32)
    network.register_forward_pre_hook(lambda _, args, given: times.append(given["timestep"]), with_kwargs=True)
    clips = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (3, 3, FRAMES, HEIGHT, WIDTH), dtype=np.uint8))
    encoded = spec.encode_clip(spec.load_clip_encoders(), clips, None)
    text = torch.randn(3, 512, 32, generator=torch.Generator().manual_seed(1))
    shape = spec.latent_shape(encoded["moments"])
    mask = torch.rand(3, 1, *shape[1:], generator=torch.Generator().manual_seed(5))
    batch = Batch(
        encoded["moments"], PromptEmbeds({"prompt_embeds": text}), VideoMeta(torch.full((3,), 16.0)), KEYS, encoded,
        mask=mask,
    )  # fmt: skip
    loss, _ = method.loss(network, batch)

    vae = AutoencoderKLWan.from_pretrained(repo / "vae").double()
    stock = WanTransformer3DModel.from_pretrained(repo / part).double()
    expected = 0.0
    for row, key in enumerate(KEYS):
        with torch.no_grad():
            posterior = vae.encode(clips[row : row + 1].double() / 127.5 - 1).latent_dist
        noise, eps = draws(key, shape)
        x0 = normalize("wan", vae, posterior.mean[0] + posterior.std[0] * noise)
        sigma = times[0][row].double().max() / 1000
        is_given = is_token and random.Random(derive_seed(SEED, "train", "first_frame", *key)).random() < 0.5
        levels = sigma.repeat(shape[1])
        if is_given:
            levels[0] = 0.0
        level = levels[:, None, None]
        inputs = x = (1 - level) * x0 + level * eps
        if places and not is_token:
            inputs = torch.cat([x, given_on_channels(repo, vae, clips[row], places, shape)])
        timestep = 1000 * (levels.repeat_interleave(shape[2] * shape[3] // 4) if is_token else sigma)
        with torch.no_grad():
            states = image_states(repo, clips[row], places) if IMAGE_STATES in encoded else None
            prediction = stock(
                hidden_states=inputs[None], timestep=timestep[None], encoder_hidden_states=text[row : row + 1].double(),
                encoder_hidden_states_image=states, return_dict=False,
            )[0][0]  # fmt: skip
        counted = mask[row].double() * (levels > 0).double()[:, None, None]
        error = (counted * (prediction - (eps - x0)) ** 2).sum() / (counted.sum() * shape[0])
        expected += float(min(sigma**-2, 10.0) * error) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=3e-6)
