"""Complete runs of each kind of Wan: it learns and resumes exactly, and rewards train it from first and last images.

SkyReels-V2, which has Wan's design, also learns and resumes here.
"""

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
from PIL import Image
from refusals import refused_options
from torch import Tensor

from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.models.families.wan import NEGATIVE_PROMPT
from finetrainers.models.registry import get_family
from finetrainers.models.spec import PromptEmbeds, VideoMeta
from finetrainers.models.wan import IMAGE_STATES, WanSpec
from finetrainers.plan.preflight import preflight

SIZE = (5, 32, 32)
KINDS = [
    *(("wan", version, None) for version in ("t2v", "i2v", "flf2v", "ti2v")),
    ("wan", "a14b", "high"), ("wan", "a14b_i2v", "low"),
    *(("skyreels_v2", version, None) for version in ("t2v", "i2v", "df")),
]  # fmt: skip


def in_fp32(version: str) -> dict[str, Any]:
    """Dtypes of a run whose network is given exactly what the stock pipeline gives."""
    dtypes = dict.fromkeys(("text_encoder_dtype", "vae_dtype", "transformer_dtype"), "fp32")
    return {**dtypes, "part": ["image_encoder=,fp32"] if version in ("i2v", "flf2v") else []}


# ---- clips -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(state: Any, network: Any) -> float:
    """Loss of a fixed batch at fixed noise, of low and high levels."""
    batch = next(iter(state.method.steps(0, state.transformer)))[0]
    return float(torch.stack([state.method.eval_loss(network.eval(), batch, level) for level in (0.3, 0.7)]).mean())


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version", "expert"), KINDS)
def test_it_learns_a_clip_and_resumes_exactly(
    family: str, version: str, expert: str | None, options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(
        family, version=version, expert=expert, training_type="full-finetune", train_steps=40, checkpointing_steps=36,
        lr=1e-2, precompute_conditions=version not in ("ti2v", "df"), precompute_dir=str(tmp_path / "cache"),
        video_resolution_buckets=["5x64x64"], **in_fp32(version),
    )  # fmt: skip
    done = run(**values)
    spec, trained = done.state.spec, done.state.parallel.unwrap(done.state.transformer)
    base = spec.load_transformer(torch.float32)
    # Measured: 0.85 for 5B, whose noise has as many channels as the tiny network is wide, and 0.39 to 0.72 for others.
    goal = 0.9 if spec.latent_channels(base) >= spec.width(base) else 0.78
    assert evaluate(done.state, trained) < goal * evaluate(done.state, base)

    again = tmp_path / "again"
    shutil.copytree(done.root / "checkpoints" / "step-36", again / "checkpoints" / "step-36")
    resumed = run(**{**values, "output_dir": str(again)}, resume_from_checkpoint="latest")
    assert resumed.steps_done == 4
    for ours, theirs in zip(
        resumed.state.parallel.unwrap(resumed.state.transformer).parameters(), trained.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def rewarded(tiny_repo: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Options of a step of GRPO from first images, and last ones."""
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (*SIZE[1:], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")

    def build(version: str, *keys: str, **changes: Any) -> dict[str, Any]:
        images = [{key: f"{number + place}.png" for place, key in enumerate(keys)} for number in range(2)]
        rows = [{"prompt": f"pattern {number}", **row} for number, row in enumerate(images)]
        (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {
            "method": "grpo", "model_name": "wan", "pretrained_model_name_or_path": str(tiny_repo("wan", version)),
            "prompts": str(tmp_path / "prompts.jsonl"), "reward": ["brightness"], "rollout_size": "5x32x32",
            "prompts_per_step": 2, "num_generations": 2, "batch_size": 2, "sampling_steps": 3, "window_size": 1,
            "rank": 4, "lora_alpha": 4, "train_steps": 1, "output_dir": str(tmp_path / "run"),
            **in_fp32(version), **changes,
        }  # fmt: skip

    return build


def condition_of_the_pipeline(spec: WanSpec, images: list[Image.Image]) -> tuple[Tensor, Tensor | None]:
    """The stock pipeline's mask and image latents, and CLIP's states."""
    parts = spec.load_clip_encoders().modules
    pipeline = diffusers.WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, scheduler=spec.load_scheduler(), transformer=None,
        **{"image_encoder": None, "image_processor": None, **parts},
    )  # fmt: skip
    pixels = [pipeline.video_processor.preprocess(image, height=SIZE[1], width=SIZE[2]) for image in images]
    _, condition = pipeline.prepare_latents(
        pixels[0], 1, 16, SIZE[1], SIZE[2], SIZE[0], torch.float32, torch.device("cpu"),
        torch.Generator().manual_seed(0), None, pixels[1] if len(images) > 1 else None,
    )  # fmt: skip
    if not spec.facts.sees_image:
        return condition, None
    return condition, pipeline.encode_image(images, torch.device("cpu"))


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("version", "keys", "changes"),
    [("flf2v", ("image", "last_image"), {}), ("i2v", ("image",), {"method": "nft", "init_same_noise": False}),
     ("a14b_i2v", ("image",), {"expert": "low", "method": "refl", "sampling_steps": 4})],
    ids=["flf2v", "i2v", "a14b_i2v"],
)  # fmt: skip
def test_clips_of_rewards_start_and_end_as_in_the_pipeline(
    version: str, keys: tuple[str, ...], changes: dict[str, Any], rewarded: Callable[..., dict[str, Any]],
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Bit for bit: the condition of all of the clip's frames, and CLIP's states."""
    calls: list[tuple[Any, float, VideoMeta]] = []
    predict = WanSpec.predict

    def record(spec: Any, network: Any, x: Tensor, t: Tensor, texts: PromptEmbeds, meta: VideoMeta) -> Tensor:
        calls.append((network, float(t.max()), meta))
        return predict(spec, network, x, t, texts, meta)

    monkeypatch.setattr(WanSpec, "predict", record)
    done = run(**rewarded(version, *keys, **changes))
    assert done.metrics[-1]["grad_norm"] > 0
    assert done.metrics[-1].get("ratio_error", 0.0) == 0.0  # densities of rollout and training agree
    images = [Image.open(tmp_path / f"{number}.png") for number in range(3)]
    conditions = [condition_of_the_pipeline(done.state.spec, images[n : n + len(keys)]) for n in range(2)]
    seen = set()
    for _, _, meta in calls:
        for row, given in enumerate(meta.extra["first_frame"]):
            [number] = [n for n, (condition, _) in enumerate(conditions) if torch.equal(given, condition[0])]
            states = conditions[number][1]
            assert states is None or torch.equal(meta.extra[IMAGE_STATES][row], states.flatten(0, 1))
            seen.add(number)
    assert seen == {0, 1}
    if version == "a14b_i2v":  # a loop through both experts, of which one is trained
        networks = {id(network): {t >= 0.9 for n, t, _ in calls if n is network} for network, _, _ in calls}
        assert sorted(networks.values(), key=str) == [{False}, {True}]
        assert networks[id(done.state.transformer)] == {False}


def test_last_images_of_rewards_are_given_to_first_and_last_frame_checkpoints_alone(
    rewarded: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    for version, keys, kind in (
        ("flf2v", ["image"], "required"), ("i2v", ["image", "last_image"], "unsupported"),
        ("ti2v", ["image", "last_image"], "unsupported"),
    ):  # fmt: skip
        with refused_options(("--prompts", kind)) as caught:
            preflight(load_config(**rewarded(version, *keys)))
        assert "line 1" in str(caught.value)
    values = rewarded("flf2v", "image", "last_image")
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:-999])  # the last image of line 1
    with refused_options(("data", "invalid")) as caught:
        preflight(load_config(**values))
    assert "line 1" in str(caught.value)


# ---- defaults of the checkpoint --------------------------------------------------------------------------------------


def choose(values: dict[str, Any]) -> TrainConfig:
    return preflight(load_config(**values)).config


@pytest.mark.parametrize(
    ("version", "expert", "shift", "guidance"),
    [("t2v", None, 3.0, (5.0, None)), ("flf2v", None, 16.0, (5.0, None)), ("a14b", "high", 12.0, (4.0, 3.0)),
     ("a14b_i2v", "low", 5.0, (3.5, 3.5))],
)  # fmt: skip
def test_open_options_have_the_published_values(
    version: str, expert: str | None, shift: float, guidance: tuple[float, ...], options: Callable[..., dict]
) -> None:
    values = options("wan", version=version, expert=expert)

    def numbers(config: TrainConfig) -> tuple[Any, ...]:
        section = config.validation
        return config.diffusion.flow_shift, section.validation_guidance_scale, section.validation_guidance_scale_2

    config = choose(values)
    assert numbers(config) == (shift, *guidance)
    negative_prompt = config.validation.validation_negative_prompt
    assert negative_prompt is not None
    assert negative_prompt.endswith(NEGATIVE_PROMPT)
    assert len(negative_prompt) - len(NEGATIVE_PROMPT) == {"i2v": 5, "flf2v": 10}.get(version, 0)
    assert {name for name, source in config.chosen.items() if source == "family"} >= {"flow_shift"}
    given = choose({**values, "flow_shift": 1.0, "validation_guidance_scale": 6.0, "validation_negative_prompt": ""})
    assert numbers(given) == (1.0, 6.0, None)
    assert given.validation.validation_negative_prompt == ""
    assert choose({**values, "flow_resolution_shifting": True}).diffusion.flow_shift == 1.0


def test_guidance_that_has_no_effect_is_refused(options: Callable[..., dict]) -> None:
    assert "validation_negative_prompt" in get_family("wan").facts.defaults
    with refused_options(
        ("--validation_guidance_scale_2", "unsupported"), ("--validation_negative_prompt", "conflict")
    ):
        choose(
            options(
                "wan", validation_guidance_scale=1.0, validation_guidance_scale_2=3.0, validation_negative_prompt="gray"
            )
        )
