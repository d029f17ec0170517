"""Complete runs of HunyuanVideo-1.5: it learns and resumes exactly, images of rewards are those of the pipeline, and
its loss is that of the stock network in float64."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from PIL import Image
from torch import Tensor
from transformers import SiglipImageProcessor, SiglipVisionModel

from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import ModelSection
from finetrainers.methods.base import MethodParts
from finetrainers.methods.sft import SFT
from finetrainers.models.hunyuan_video_15 import IMAGE_STATES, HunyuanVideo15Spec
from finetrainers.models.registry import get_family
from finetrainers.models.spec import Batch, PromptEmbeds, VideoMeta
from finetrainers.utils.seeding import derive_seed

IN_FP32: dict[str, Any] = {
    **dict.fromkeys(("text_encoder_dtype", "vae_dtype", "transformer_dtype", "text_encoder_2_dtype"), "fp32"),
    "part": ["image_encoder=,fp32"],
}
SEED, KEYS = 7, ((0, 3), (2, 3))


# ---- loss ------------------------------------------------------------------------------------------------------------


def draws(key: tuple[int, int], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Noise of the posterior, and the noise that is added."""
    generator = torch.Generator().manual_seed(derive_seed(SEED, "train", *key))
    return torch.randn(shape, generator=generator).double(), torch.randn(shape, generator=generator).double()


@pytest.mark.rotating
@pytest.mark.parametrize("version", ["t2v", "i2v"])
def test_the_loss_is_that_of_the_stock_network_in_float64(version: str, tiny_repo: Callable[..., Path]) -> None:
    """From pixels, with masks, a shift and a loss weight; the first prompt quotes a text, the second does not."""
    repo, animates = tiny_repo("hunyuan_video_15", version), version == "i2v"
    section = ModelSection(model_name="hunyuan_video_15", pretrained_model_name_or_path=str(repo), **IN_FP32)
    spec = get_family("hunyuan_video_15").load(section)
    scheduler, encoders = spec.load_scheduler(), spec.load_clip_encoders()
    method = SFT(
        MethodParts(
            config=TrainConfig(
                model=section, training={"seed": SEED},  # type: ignore[arg-type]
                diffusion={"flow_weighting_scheme": "sigma_sqrt", "flow_shift": 3.0},  # type: ignore[arg-type]
                data={"frame_conditioning": "first=1" if animates else ""},  # type: ignore[arg-type]
            ),
            spec=spec, process=spec.process(scheduler), scheduler=scheduler, geometry=spec.facts.geometry,
            vae_stats=spec.vae_stats(encoders["vae"]), source=None, parallel=None,  # type: ignore[arg-type]
            network=torch.nn.Identity(), weights_dtype=torch.float32,
        )
    )  # fmt: skip
    times: list[Tensor] = []
    network = spec.load_transformer(torch.float32)
    network.register_forward_pre_hook(lambda _, args, given: times.append(given["timestep"]), with_kwargs=True)
    clips = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (2, 3, 9, 48, 32), dtype=np.uint8))
    encoded, texts = spec.encode_clip(encoders, clips, None), spec.load_text_encoders()
    conditions = spec.encode_text(texts, ['a sign "slow"', "a red ball"])
    shape = spec.latent_shape(encoded["moments"])
    mask = torch.rand(2, 1, *shape[1:], generator=torch.Generator().manual_seed(5))
    batch = Batch(encoded["moments"], conditions, VideoMeta(torch.full((2,), 24.0)), KEYS, encoded, mask=mask)
    loss, _ = method.loss(network, batch)

    vae = AutoencoderKLHunyuanVideo15.from_pretrained(repo / "vae").double()
    stock = diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(repo / "transformer").double()
    expected = 0.0
    for row, key in enumerate(KEYS):
        pixels = clips[row : row + 1].double() / 127.5 - 1
        channels, states = torch.zeros(33, *shape[1:], dtype=torch.float64), torch.zeros(1, 729, 12).double()
        with torch.no_grad():
            posterior = vae.encode(pixels).latent_dist
            if animates:
                channels[:32, :1] = vae.encode(pixels[:, :, :1]).latent_dist.mean[0] * vae.config.scaling_factor
                channels[32, 0] = 1.0
                image = Image.fromarray(clips[row, :, 0].permute(1, 2, 0).numpy())
                values = SiglipImageProcessor.from_pretrained(repo / "feature_extractor")(image, return_tensors="pt")
                encoder = SiglipVisionModel.from_pretrained(repo / "image_encoder").double()
                states = encoder(values.pixel_values.double()).last_hidden_state
        noise, eps = draws(key, shape)
        x0 = (posterior.mean[0] + posterior.std[0] * noise) * vae.config.scaling_factor
        sigma = times[0][row].double() / 1000
        x = (1 - sigma) * x0 + sigma * eps
        with torch.no_grad():
            prediction = stock(
                hidden_states=torch.cat([x, channels])[None], timestep=1000 * sigma[None],
                encoder_hidden_states=conditions["prompt_embeds"][row : row + 1].double(),
                encoder_attention_mask=conditions["prompt_attention_mask"][row : row + 1].double(),
                encoder_hidden_states_2=conditions["glyph_embeds"][row : row + 1].double(),
                encoder_attention_mask_2=conditions["glyph_attention_mask"][row : row + 1].double(),
                image_embeds=states, return_dict=False,
            )[0][0]  # fmt: skip
        counted = mask[row].double()
        error = (counted * (prediction - (eps - x0)) ** 2).sum() / (counted.sum() * shape[0])
        expected += float(min(sigma**-2, 10.0) * error) / 2
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


# ---- clips -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(state: Any, network: Any) -> float:
    """Loss of a fixed batch at fixed noise, of low and high levels."""
    batch = next(iter(state.method.steps(0, state.transformer)))[0]
    return float(torch.stack([state.method.eval_loss(network.eval(), batch, level) for level in (0.3, 0.7)]).mean())


@pytest.mark.rotating
@pytest.mark.parametrize(("version", "training_type"), [("t2v", "full-finetune"), ("i2v", "lora")])
def test_it_learns_a_clip_and_resumes_exactly(
    version: str, training_type: str, options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(
        "hunyuan_video_15", version=version, training_type=training_type, train_steps=40, checkpointing_steps=36,
        lr=1e-2, precompute_conditions=version == "i2v", precompute_dir=str(tmp_path / "cache"),
        video_resolution_buckets=["5x64x64"], rank=16, lora_alpha=16,
        target_modules=["to_q", "to_k", "to_v", "to_out.0", "proj", "ff.net.2", "proj_out"],
        **{**IN_FP32, "part": IN_FP32["part"] if version == "i2v" else []},
    )  # fmt: skip
    done = run(**values)
    spec, trained = done.state.spec, done.state.parallel.unwrap(done.state.transformer)
    base = spec.load_transformer(torch.float32)
    assert evaluate(done.state, trained) < 0.9 * evaluate(done.state, base)
    again = tmp_path / "again"
    shutil.copytree(done.root / "checkpoints" / "step-36", again / "checkpoints" / "step-36")
    resumed = run(**{**values, "output_dir": str(again)}, resume_from_checkpoint="latest")
    assert resumed.steps_done == 4
    for ours, theirs in zip(
        resumed.state.parallel.unwrap(resumed.state.transformer).parameters(), trained.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.rotating
@pytest.mark.parametrize(
    "changes", [{}, {"method": "nft", "init_same_noise": False}, {"method": "refl", "sampling_steps": 4}],
    ids=["grpo", "nft", "refl"],
)  # fmt: skip
def test_clips_of_rewards_start_from_the_image_as_in_the_pipeline(
    changes: dict[str, Any], tiny_repo: Callable[..., Path], run: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """SigLIP's states bit for bit, latents and mask of the first frame up to rounding."""
    images = []
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (48, 32, 3), dtype=np.uint8)
        images.append(Image.fromarray(pixels))
        images[-1].save(tmp_path / f"{number}.png")
    rows = [{"prompt": f"pattern {number}", "image": f"{number}.png"} for number in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    metas: list[VideoMeta] = []
    predict = HunyuanVideo15Spec.predict

    def record(
        spec: HunyuanVideo15Spec, network: Any, x: Tensor, t: Tensor, texts: PromptEmbeds, meta: VideoMeta
    ) -> Tensor:
        metas.append(meta)
        return predict(spec, network, x, t, texts, meta)

    monkeypatch.setattr(HunyuanVideo15Spec, "predict", record)
    values = {
        "method": "grpo", "model_name": "hunyuan_video_15", "reward": ["brightness"], "rollout_size": "5x48x32",
        "pretrained_model_name_or_path": str(tiny_repo("hunyuan_video_15", "i2v")), "batch_size": 2, "rank": 4,
        "prompts": str(tmp_path / "prompts.jsonl"), "prompts_per_step": 2, "num_generations": 2, "sampling_steps": 3,
        "window_size": 1, "lora_alpha": 4, "train_steps": 1, "output_dir": str(tmp_path / "run"), **IN_FP32, **changes,
    }  # fmt: skip
    done = run(**values)
    assert done.metrics[-1]["grad_norm"] > 0
    assert done.metrics[-1].get("ratio_error", 0.0) == 0.0  # densities of rollout and training agree
    pipeline = done.state.spec.pipeline_class.from_pretrained(
        values["pretrained_model_name_or_path"], dtype=torch.float32
    )
    latents, empty, device = [], torch.zeros(1, 32, 2, 3, 2), torch.device("cpu")
    for image in images:
        given, mask = pipeline.prepare_cond_latents_and_mask(empty, image, 1, 48, 32, torch.float32, device)
        states = pipeline.encode_image(image, 1, device, torch.float32)
        assert not given[:, :, 1:].any()
        latents.append((torch.cat([given, mask], dim=1)[0, :, :1], states[0]))
    seen = set()
    for meta in metas:
        for row, channels in enumerate(meta.extra["first_frame"]):
            [number] = [n for n, (expected, _) in enumerate(latents) if torch.allclose(channels, expected, atol=1e-5)]
            assert torch.equal(meta.extra[IMAGE_STATES][row], latents[number][1])
            seen.add(number)
    assert seen == {0, 1}
