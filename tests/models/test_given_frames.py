"""Given frames on the channels of image-to-video checkpoints: what training tells the network, and samples, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CogVideoXImageToVideoPipeline, CogVideoXTransformer3DModel, DiffusionPipeline
from refusals import refused
from torch import Tensor

from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import get_family
from finetrainers.models.spec import Batch, PromptEmbeds, SampleRequest, VideoMeta

#: "1.5-i2v" is put together here: two latent frames a patch, and an inverted scale of images. Three latent frames get
#: one in front.
VERSIONS = [("cogvideox", "i2v", 0), ("cogvideox", "1.5-i2v", 1), ("hunyuan_video", "i2v", 0)]
REQUEST = SampleRequest(num_frames=9, height=64, width=64, frame_rate=8.0, num_inference_steps=2, guidance_scale=2.0)


class Checkpoint:
    """A tiny checkpoint, and the stock pipeline, which shares no module with ours."""

    def __init__(self, family: str, version: str, repository: Path, folder: Path) -> None:
        self.family, replaced = family, {}
        if version == "1.5-i2v":
            config = CogVideoXTransformer3DModel.load_config(repository, subfolder="transformer")
            with torch.random.fork_rng():
                torch.manual_seed(0)
                network = CogVideoXTransformer3DModel.from_config({**config, "in_channels": 32, "ofs_embed_dim": 32})
            network.save_pretrained(str(folder))
            replaced["transformer_id"] = str(folder)
        self.spec = get_family(family).load(
            ModelSection(
                model_name=family, pretrained_model_name_or_path=str(repository), text_encoder_dtype="fp32",
                text_encoder_2_dtype="fp32", transformer_dtype="fp32", vae_dtype="fp32", **replaced,
            )
        )  # fmt: skip
        self.vae, self.transformer = self.spec.load_vae(), self.spec.load_transformer(torch.float32).eval()
        rows = self.spec.encode_text(self.spec.load_text_encoders(), ["a red ball", ""])
        self.conditions, self.negative = rows.rows([0]), rows.rows([1])
        self.stock = DiffusionPipeline.from_pretrained(repository, dtype=torch.float32)
        if replaced:
            parts = {**self.stock.components, "transformer": CogVideoXTransformer3DModel.from_pretrained(folder)}
            self.stock = CogVideoXImageToVideoPipeline(**parts)
        self.stock.set_progress_bar_config(disable=True)
        scaling = self.stock.vae.config.scaling_factor
        self.scale = 1 / scaling if self.stock.vae.config.get("invert_scale_latents") else scaling  # of images
        self.frame_axis = 1 if family == "cogvideox" else 2  # of the network's input

    def sample(self, request: SampleRequest) -> np.ndarray:
        pipeline = self.spec.pipeline(
            self.transformer, self.vae, self.spec.load_scheduler(), image_to_video=request.starts_from_image
        )
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            found = self.spec.sample(pipeline, self.conditions, self.negative, request, generator)
        assert "prepare_latents" not in vars(pipeline)  # it is the class's again
        return found

    def by_stock(self, image: Tensor, edit: Callable[[Tensor], None] | None = None) -> np.ndarray:
        """What the stock pipeline samples; `edit` changes the latents `[1, C, T, H, W]` of its image in place."""
        generator, own = torch.Generator().manual_seed(1), type(self.stock).prepare_latents

        def prepare_latents(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            start, shown = own(self.stock, *args, **options)
            if edit is not None:
                edit(shown.transpose(1, 2) if self.frame_axis == 1 else shown)
            return start, shown

        self.stock.prepare_latents = prepare_latents
        texts = {**self.conditions.tensors, **{f"negative_{n}": t for n, t in self.negative.tensors.items()}}
        size = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 2.0}
        return self.stock(image=image, **texts, **size, generator=generator, output_type="np").frames[0]

    def encoded(self, pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return self.stock.vae.encode(pixels).latent_dist.mean * self.scale


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda one: "-".join(map(str, one[:2])))
def checkpoint(
    request: pytest.FixtureRequest, tiny_repo: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, int]:
    family, version, front = request.param
    repository = tiny_repo(family, version="1.5" if version == "1.5-i2v" else version)
    return Checkpoint(family, version, repository, tmp_path_factory.mktemp("transformer")), front


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_channels_hold_the_given_frames_and_nothing_else(checkpoint: tuple[Checkpoint, int]) -> None:
    made, front = checkpoint
    spec, vae_stats = made.spec, made.spec.vae_stats(made.vae)
    given = [(0,), (2,), (), range(2), [1], (0, 2)]
    moments, first = normal(6, 32, 3, 8, 8, seed=1), normal(6, 32, 1, 8, 8, seed=2)
    batch = Batch(
        moments, PromptEmbeds({}), VideoMeta(fps=torch.full((6,), 8.0)), [(0, row) for row in range(6)],
        {"first_frame_moments": first},
    )  # fmt: skip
    x = spec.padded(normal(6, 16, 3, 8, 8, seed=3))
    meta, trained = spec.condition(batch, x, given, vae_stats)
    assert trained is None  # all frames are noised and in the loss

    seen: list[Tensor] = []
    hook = made.transformer.register_forward_pre_hook(
        lambda _, args, options: seen.append(options["hidden_states"]), with_kwargs=True
    )
    texts = PromptEmbeds(
        {name: tensor.expand(6, *tensor.shape[1:]) for name, tensor in made.conditions.tensors.items()}
    )
    t = torch.full((6,), 400 if made.family == "cogvideox" else 0.4)

    def network_input(meta: VideoMeta) -> Tensor:
        with torch.no_grad():
            spec.predict(made.transformer, x, t, texts, meta)
        return seen[-1] if made.frame_axis == 2 else seen[-1].transpose(1, 2)

    found = network_input(meta)
    expected = torch.zeros(6, 16, 3 + front, 8, 8, dtype=torch.float64)
    for row, frames in enumerate(given):
        for frame in frames:
            mean = (moments[row, :16, frame] if frame else first[row, :16, 0]).double() * made.scale
            expected[row, :, front + frame if frame else 0] = (
                mean  # the pipeline has the image in front of the added frame
            )
    assert torch.equal(found[:, :16], x)
    torch.testing.assert_close(found[:, 16:].double(), expected, rtol=1e-6, atol=1e-6)

    # The first frame alone, without more than was needed for it.
    alone, _ = spec.condition(batch, x, [(0,), (), (0,), (), (0,), (0,)], vae_stats)
    assert set(alone.extra) == {"first_frame"}
    only = network_input(alone)
    assert torch.equal(only[[0, 5], 16:, 0], found[[0, 5], 16:, 0])
    assert not only[:, 16:, 1:].any()
    hook.remove()


@pytest.mark.rotating
def test_samples_are_the_stock_pipelines_whose_image_latents_are_edited(checkpoint: tuple[Checkpoint, int]) -> None:
    made, front = checkpoint
    first, last, other = (torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    steps = torch.randint(257, (1, 3, 5, 64, 64), generator=torch.Generator().manual_seed(4))
    beginning = steps / 128 - 1  # the way to [0, 1] and back is exact

    expected = made.by_stock(first)
    alone = made.sample(replace(REQUEST, image=first))
    np.testing.assert_allclose(alone, expected, rtol=0, atol=1e-5)
    one = made.sample(replace(REQUEST, prefix=beginning[:, :, :1]))
    np.testing.assert_allclose(one, made.by_stock(steps[:, :, 0] / 256), rtol=0, atol=1e-5)

    def end(shown: Tensor) -> None:
        still = (2 * last - 1)[:, :, None].expand(-1, -1, 5, -1, -1)  # a latent frame of one image, and one of four
        shown[:, :, -1] = made.encoded(still)[:, :, 1]

    def continuation(shown: Tensor) -> None:
        shown[:, :, front + 1] = made.encoded(beginning)[:, :, 1]

    both = made.sample(replace(REQUEST, image=first, last_image=last))
    np.testing.assert_allclose(both, made.by_stock(first, end), rtol=0, atol=1e-5)
    longer = made.sample(replace(REQUEST, prefix=beginning))
    np.testing.assert_allclose(longer, made.by_stock(steps[:, :, 0] / 256, continuation), rtol=0, atol=1e-5)

    # Every given frame matters.
    changed = made.sample(replace(REQUEST, image=first, last_image=other))
    for these, those in ((both, alone), (both, changed), (longer, one)):
        assert np.abs(these - those).max() > 1e-3

    with refused("required", "validation_images"):
        made.sample(replace(REQUEST, last_image=last))
