"""Sampling needs a model's parts and encoded prompts, and no trainer."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ClassifierFreeGuidance, LTXPipeline
from every_family import FAMILIES, sampled_frames
from PIL import Image

from finetrainers.config.prompts import ValidationPrompt, parse_validation_prompts
from finetrainers.config.sections import ModelSection
from finetrainers.models.families.ltx_video import read as ltx_video
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelComponents, SampleRequest
from finetrainers.plan.trainable import make_trainable
from finetrainers.training.callbacks import validation
from finetrainers.training.callbacks.validation import Validation
from finetrainers.training.sampling import (
    EncodedPrompts,
    PromptRequest,
    SamplingComponents,
    SamplingSettings,
    encode_prompts,
    prompt_request,
    sample_prompts,
)
from finetrainers.training.state import TrainState
from finetrainers.training.trained_weights import load_lora_weights
from finetrainers.utils.video import write_mp4


def test_results_on_disk_give_the_frames_of_the_last_validation(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[np.ndarray] = []
    write = validation.write_sample

    def keep(samples: Any, name: str, frames: np.ndarray, **named: Any) -> Any:
        written.append(frames)
        return write(samples, name, frames, **named)

    monkeypatch.setattr(validation, "write_sample", keep)
    done = run(
        **options(
            train_steps=2,
            validation_prompts="a red ball@@@9x64x64",
            num_validation_videos=2,
            validation_inference_steps=2,
        )
    )  # fmt: skip
    config, spec = done.state.config, done.state.spec
    transformer = spec.load_transformer(torch.float32)
    make_trainable(transformer, config.training)
    load_lora_weights(done.root, transformer)
    encoded = encode_prompts(
        spec, spec.load_text_encoders(), parse_validation_prompts(config.validation), torch.float32
    )
    parts = SamplingComponents(transformer.eval(), spec.load_vae(), spec.load_scheduler(), torch.device("cpu"))
    settings = SamplingSettings(frame_rate=8.0, num_inference_steps=2)  # of the clips that are trained on
    requests = [
        prompt_request(spec, encoded, 0, size=(9, 64, 64), settings=settings, seed=config.training.seed + video)
        for video in range(2)
    ]
    assert torch.is_grad_enabled()
    clips = list(sample_prompts(spec, parts, requests))
    assert torch.is_grad_enabled()
    assert [clip.shape for clip in clips] == [(9, 64, 64, 3)] * 2
    assert [np.array_equal(ours, theirs) for ours, theirs in zip(clips, written, strict=True)] == [True, True]
    assert not np.array_equal(*clips)
    # The VAE is told the size of the clips that it decodes.
    assert not parts.vae.use_tiling
    monkeypatch.setattr("finetrainers.models.spec.VAE_BUDGET", 0.9 * spec.vae_bytes((9, 64, 64)))
    next(sample_prompts(spec, parts, requests))
    assert parts.vae.use_tiling


def test_a_video_gives_the_last_frame_too_where_a_checkpoint_always_has_one(
    tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    levels = np.linspace(20, 235, 9, dtype=np.uint8)
    write_mp4(tmp_path / "fade.mp4", np.broadcast_to(levels[:, None, None, None], (9, 64, 64, 3)).copy(), fps=16)
    prompts = [ValidationPrompt(prompt="a", video=str(tmp_path / "fade.mp4"))]
    for version, number in (("flf2v", 2), ("i2v", 1)):
        repo = str(tiny_repo("wan", version=version))
        spec = get_family("wan").load(ModelSection(pretrained_model_name_or_path=repo, model_name="wan"))
        encoded = encode_prompts(spec, spec.load_text_encoders(), prompts, None)
        given = [np.asarray(image).mean() for image in (*encoded.images, *encoded.last_images) if image is not None]
        assert given == pytest.approx([20, 235][:number], abs=3)


class GuidedPipeline(LTXPipeline):
    """A pipeline that takes its guidance from an attribute, and returns sound too."""

    def __init__(self, scheduler, vae, text_encoder, tokenizer, transformer, guider) -> None:
        super().__init__(scheduler, vae, text_encoder, tokenizer, transformer)
        self.register_modules(guider=guider)

    def __call__(self, **call: Any) -> Any:
        assert "guidance_scale" not in call
        frames = super().__call__(**call, guidance_scale=self.guider.guidance_scale).frames
        return SimpleNamespace(sound=torch.zeros(1), videos=frames)


class GuidedSpec(LTXVideoSpec):
    pipeline_class = GuidedPipeline

    @cached_property
    def companions(self) -> ModelComponents:
        return ModelComponents({"guider": ClassifierFreeGuidance()})

    def sample(self, pipeline: Any, conditions: Any, negative: Any, request: Any, generator: Any) -> Any:
        pipeline.guider.guidance_scale = request.guidance_scale
        call = self.pipeline_call(conditions, negative, replace(request, guidance_scale=None))
        return pipeline(**call, generator=generator, output_type="np").videos[0]


def test_a_pipeline_is_built_once_for_all_clips_of_a_kind(
    tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelSection(
        model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")),
        vae_dtype="fp32", text_encoder_dtype="fp32",
    )  # fmt: skip
    stock, guided = (cls(config, name="ltx_video", read=ltx_video) for cls in (LTXVideoSpec, GuidedSpec))
    parts = SamplingComponents(
        stock.load_transformer(torch.float32).eval(), stock.load_vae(), stock.load_scheduler(), torch.device("cpu")
    )
    conditions = stock.encode_text(stock.load_text_encoders(), ["a red ball", ""])
    text = SampleRequest(9, 32, 32, frame_rate=25.0, num_inference_steps=2, guidance_scale=3.0)
    image = replace(text, image=Image.new("RGB", (32, 32), (200, 30, 30)))

    def wanted(*requests: SampleRequest) -> list[PromptRequest]:
        rows = conditions.rows([0]), conditions.rows([1])
        return [PromptRequest(*rows, request, torch.Generator().manual_seed(i)) for i, request in enumerate(requests)]

    def frames(request: PromptRequest) -> np.ndarray:
        """Of a pipeline of its own."""
        own = stock.pipeline(
            parts.transformer, parts.vae, stock.load_scheduler(), image_to_video=request.request.image is not None
        )
        call = stock.pipeline_call(request.conditions, request.negative, request.request)
        return own(**call, generator=request.noise, output_type="np").frames[0]

    expected = [(frames(one) * 255).round().astype(np.uint8) for one in wanted(text, text, image)]
    built = []
    build = LTXVideoSpec.pipeline
    monkeypatch.setattr(LTXVideoSpec, "pipeline", lambda *a, **k: built.append(k["image_to_video"]) or build(*a, **k))
    found = list(sample_prompts(stock, parts, wanted(text, text, image)))
    assert [np.array_equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * 3
    assert built == [False, True]
    assert not np.array_equal(*found[:2])

    by_guider = list(sample_prompts(guided, parts, wanted(text, replace(text, guidance_scale=1.0))))
    assert np.array_equal(by_guider[0], expected[0])
    assert not np.array_equal(by_guider[1], expected[1])
    assert built == [False, True, False]


@pytest.mark.rotating
@pytest.mark.parametrize("name", FAMILIES)
def test_samples_are_decoded_in_the_dtype_of_the_vae(name: str, tiny_repo: Callable[..., Path]) -> None:
    """The family's own, by a network in bf16 or fp32, with autocast or without; fp32 stays fp32, as in rollouts."""
    family = get_family(name)
    repo = tiny_repo(name, "i2v" if "i2v" in family.tiny_versions else None)
    spec = family.load(family.with_dtypes(ModelSection(model_name=name, pretrained_model_name_or_path=str(repo))))
    facts, size = spec.facts, (64, 64)
    encoders, vae, decoded = spec.load_text_encoders(), spec.load_vae(), []
    decode = vae.decode

    def recorded(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        decoded.append((z, args, kwargs, decode(z, *args, **kwargs)))
        return decoded[-1][-1]

    vae.decode = recorded
    image = None if facts.first_frame == "none" else Image.new("RGB", size, (200, 30, 30))
    request = SampleRequest(sampled_frames(facts), *size, 24.0, max(2, facts.least_steps), 3.0, image=image)
    # Pipelines cast images to the dtype of the prompt.
    in_fp32 = [] if image is None else [(torch.float32, False)]
    for dtype, autocast in [(torch.bfloat16, False), (torch.bfloat16, True), *in_fp32]:
        network, scheduler = spec.load_transformer(dtype).eval(), spec.load_scheduler()
        rows = [spec.encode_text(encoders, [prompt]).to("cpu", dtype) for prompt in ("a red ball", "")]
        sampled = PromptRequest(*rows, request, torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            parts = SamplingComponents(network, vae, scheduler, torch.device("cpu"))
            (clip,) = sample_prompts(spec, parts, [sampled])
        assert clip.shape == (request.num_frames, *size, 3)
        z, args, kwargs, video = decoded.pop()
        assert z.dtype == vae.dtype
        if vae.dtype == torch.float32:
            with torch.no_grad():
                assert torch.equal(video[0], decode(z, *args, **kwargs)[0])
    assert (vae.dtype == torch.float32) == (family.dtypes.get("vae_dtype") == "fp32")


def test_a_stop_cuts_samples_short_and_the_line_counts_them(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the base model, which may take minutes: the signal is obeyed after a denoising step, not after all clips."""
    doing: list[str] = []
    count = Validation._count_step

    def counted(self: Validation, state: TrainState) -> None:
        if len(doing) == 5:
            state.requests.signals.received = signal.SIGINT
        count(self, state)
        doing.append(state.doing)

    monkeypatch.setattr(Validation, "_count_step", counted)
    prompts = {"validation_prompts": "a@@@9x64x64:::b@@@9x64x64", "validation_inference_steps": 3}
    stopped = run(**options(**prompts, validation_steps=2, validation_at_start=True, train_steps=4))
    assert doing == [
        f"sampling clip {clip}/2, step {step}/3" for clip, step in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2))
    ]
    assert (stopped.state.step, stopped.state.stopped_by) == (1, "SIGINT")
    assert [path.name[:2] for path in (stopped.root / "samples").glob("*/*.mp4")] == ["00"]
    assert "samples" not in [event["event"] for event in stopped.events]


def test_each_control_video_of_a_prompt_is_its_own(tmp_path: Path) -> None:
    names = {"depth": 20, "pose": 220}
    for name, value in names.items():
        write_mp4(tmp_path / f"{name}.mp4", np.full((9, 64, 64, 3), value, np.uint8), fps=8)
    video = ",".join(f"{name}={tmp_path / name}.mp4" for name in names)
    encoded = EncodedPrompts([ValidationPrompt(prompt="a", video=video)], [None], [None], [None], None)  # type: ignore
    spec: Any = SimpleNamespace(facts=SimpleNamespace(media=tuple(names), last_frame=False, any_frame=False))
    settings = SamplingSettings(frame_rate=8.0, num_inference_steps=2)
    media = prompt_request(spec, encoded, 0, size=(9, 64, 64), settings=settings, seed=0).request.media
    for name, value in names.items():
        assert abs(float(media[name].mean()) - (value / 127.5 - 1)) < 0.02
