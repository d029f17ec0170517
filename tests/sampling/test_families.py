"""The samples of every family are those of diffusers' own pipeline with the same LoRA, scale and generator."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from every_family import CHECKPOINTS, in_fp32, required_options, sampled_frames
from PIL import Image
from refusals import refused_command

from finetrainers.config.sections import ModelSection, TrainingSection
from finetrainers.memory.quantization import quantize_frozen
from finetrainers.models.registry import get_family
from finetrainers.plan.trainable import make_trainable
from finetrainers.testing import forced_arguments
from finetrainers.training.sampling import load_video_segment, sample_seed
from finetrainers.utils.progress import Meter
from finetrainers.utils.video import write_mp4

PROMPT, SEED = "pattern number 0", 7
FP32 = ("--transformer_dtype", "fp32", "--vae_dtype", "fp32", "--text_encoder_dtype", "fp32")


def random_lora(family: str, repository: Path, folder: Path, seed: int = 0) -> Any:
    """Write a LoRA of rank 4 and alpha 8 whose effect can be seen; the family's spec."""
    section = ModelSection(model_name=family, pretrained_model_name_or_path=str(repository))
    options = required_options(get_family(family).facts_of(section))
    spec = get_family(family).load(section.model_copy(update=options))
    network = spec.load_transformer(torch.float32)
    make_trainable(network, TrainingSection(rank=4, lora_alpha=8, target_modules=[*spec.facts.lora_targets]))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name.replace(".default", ""): 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in network.state_dict().items()
        if ".lora_" in name
    }
    folder.mkdir()
    spec.save_lora(folder, weights, network.peft_config["default"].to_dict())
    return spec


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version"), CHECKPOINTS)
def test_samples_are_those_of_the_pipeline(
    family: str, version: str, tiny_repo: Callable[..., Path], sample: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    repository = tiny_repo(family, version)
    spec = random_lora(family, repository, tmp_path / "lora")
    flags: list[object] = []
    given: dict[str, Any] = {
        **spec.pipeline_arguments,
        "negative_prompt": spec.facts.defaults.get("validation_negative_prompt", ""),
    }
    steps = []
    monkeypatch.setattr(Meter, "__call__", lambda m, *count: steps.append(count) if m.noun == "steps" else None)
    takes_image = spec.facts.first_frame != "none"
    if takes_image:
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(
            tmp_path / "image.png"
        )
        flags += ["--image", tmp_path / "image.png"]
        given["image"] = Image.open(tmp_path / "image.png")
    if spec.facts.last_frame:
        flags += ["--last_image", tmp_path / "image.png"]
        given["last_image"] = given["image"]
    if parts := in_fp32(spec.facts):
        flags += ["--part", *parts]
    if spec.config.expert is not None:
        flags += ["--expert", spec.config.expert]
    if spec.facts.media:
        clip = np.random.default_rng(0).integers(0, 255, (20, 64, 64, 3), dtype=np.uint8)
        write_mp4(tmp_path / "control.mp4", clip, fps=spec.facts.geometry.fps)
        flags += ["--video", tmp_path / "control.mp4"]
        video = load_video_segment(tmp_path / "control.mp4", (9, 64, 64), frame_rate=spec.facts.geometry.fps)
        given["control_video"] = (video / 2 + 0.5).transpose(1, 2)
    code, frames = sample(
        tmp_path / "lora", "--model_name", family, "--pretrained_model_name_or_path", repository, "--prompts", PROMPT,
        "--size", f"{sampled_frames(spec.facts)}x64x64", "--seed", SEED, "--num_inference_steps", 2,
        "--guidance_scale", 2.5, "--lora_scale", 0.5,
        "--compare", "base", "--output_dir", tmp_path / "out", *FP32,
        *(["--text_encoder_2_dtype", "fp32"] if "text_encoder_2" in spec.facts.parts else []), *flags,
    )  # fmt: skip
    assert code == 0
    assert steps == [(done, 4) for done in range(5)]
    cls = spec.image_pipeline_class if takes_image else spec.pipeline_class
    pipeline = cls.from_pretrained(repository)
    pipeline.set_progress_bar_config(disable=True)
    size = {} if spec.facts.media else {"num_frames": sampled_frames(spec.facts)}
    # Attention without masks rounds otherwise.
    rounding = 1 if spec.text_varies else 0
    for scale in (0.0, 0.5):
        if scale:
            loader: Any = pipeline if hasattr(pipeline, "load_lora_weights") else pipeline.transformer
            if loader is pipeline:
                pipeline.load_lora_weights(str(tmp_path / "lora"), adapter_name="mine")
            else:
                file = {"weight_name": "pytorch_lora_weights.safetensors", "prefix": "transformer"}
                loader.load_lora_adapter(str(tmp_path / "lora"), adapter_name="mine", **file)
            loader.set_adapters(["mine"], [scale])
        call = {"height": 64, "width": 64, "guidance_scale": 2.5}
        missing = call.keys() - inspect.signature(pipeline.__call__).parameters.keys()
        if "guidance_scale" in missing:  # guidance is a component
            pipeline.guider = pipeline.guider.new(guidance_scale=call["guidance_scale"])
        if "height" in missing:  # the size is that of the image, to the model's area
            pipeline.video_processor.calculate_default_height_width = lambda **_: (64, 64)
        with forced_arguments([pipeline.transformer], spec.own_arguments):
            made = pipeline(
                prompt=PROMPT,
                num_inference_steps=2,
                output_type="np",
                **size,
                **given,
                **{name: value for name, value in call.items() if name not in missing},
                generator=torch.Generator().manual_seed(sample_seed(SEED, PROMPT)),
            ).frames[0]
        name = f"pattern-number-0_{f'lora_scale-{scale:g}' if scale else 'base'}_seed-7.mp4"
        off = np.abs(frames[name].astype(int) - (np.asarray(made) * 255).round()).max()
        assert off <= rounding, name
    stacked = np.stack(list(frames.values())).astype(int)
    assert len(stacked) == 2
    assert np.abs(stacked[0] - stacked[1]).max() > 8
    records = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    assert {record["file"] for record in records} == set(frames)
    assert {record["generator_seed"] for record in records} == {sample_seed(SEED, PROMPT)}


@pytest.mark.rotating
def test_samples_have_the_loras_of_both_experts(
    tiny_repo: Callable[..., Path], sample: Callable[..., Any], tmp_path: Path
) -> None:
    """As users load a pair; the base model has neither, and another LoRA in the other expert gives other samples."""
    repository = tiny_repo("wan", "a14b")
    for seed, name in enumerate(("a_high_noise", "a_low_noise")):
        spec = random_lora("wan", repository, tmp_path / name, seed)
    low, high = tmp_path / "a_low_noise", tmp_path / "a_high_noise"
    flags = ["--pretrained_model_name_or_path", repository, "--prompts", PROMPT, "--size", "9x64x64", "--seed", SEED,
             "--num_inference_steps", 3, "--guidance_scale", 1, "--expert", "low", "--output_dir", tmp_path / "out",
             *FP32]  # fmt: skip
    code, frames = sample(low, "--other_expert", high, "--compare", "base", *flags)
    assert (code, len(frames)) == (0, 2)
    assert sample(low, "--other_expert", high, "--compare", "base", *flags) == (0, {})
    pipeline = DiffusionPipeline.from_pretrained(repository)
    pipeline.set_progress_bar_config(disable=True)

    def stock() -> np.ndarray:
        noise = torch.Generator().manual_seed(sample_seed(SEED, PROMPT))
        made = pipeline(PROMPT, height=64, width=64, num_frames=9, num_inference_steps=3, guidance_scale=1.0,
                        output_type="np", generator=noise)  # fmt: skip
        return (np.asarray(made.frames[0]) * 255).round().astype(int)

    assert np.array_equal(frames["pattern-number-0_base_seed-7.mp4"], stock())
    pipeline.load_lora_weights(str(high))
    only_high = stock()
    pipeline.load_lora_weights(str(low), load_into_transformer_2=True)
    (clip,) = (clip for name, clip in frames.items() if "base" not in name)
    assert np.array_equal(clip, stock())
    assert np.abs(clip - only_high).max() > 2
    code, alone = sample(low, *flags)
    assert code == 0
    assert all(np.abs(other.astype(int) - clip).max() > 2 for other in alone.values())

    code, quantized = sample(low, "--other_expert", high, "--quantize_frozen", "int8", *flags)
    assert code == 0
    for network in (pipeline.transformer, pipeline.transformer_2):
        quantize_frozen(network, "int8", skip=spec.unquantized)
    assert np.array_equal(*quantized.values(), stock())
    assert np.abs(next(iter(quantized.values())).astype(int) - clip).max() > 0


def test_files_of_experts_cannot_be_swapped(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    repository, video = tiny_repo("wan", "a14b"), tiny_repo("wan")
    random_lora("wan", repository, tmp_path / "low")
    (tmp_path / "low/pytorch_lora_weights.safetensors").rename(tmp_path / "my_low_noise.safetensors")
    command = ["sample", tmp_path / "my_low_noise.safetensors", "--prompts", PROMPT, "--size", "9x64x64", "--dry_run",
               "--other_expert"]  # fmt: skip
    for other, model, kind in (
        ("my_low_noise.safetensors", repository, "mismatch"),
        ("nowhere", repository, "not_found"),
        ("my_low_noise.safetensors", video, "unsupported"),
    ):
        expert = ["--expert", "low"] if model == repository else []
        given = [*command, tmp_path / other, "--pretrained_model_name_or_path", model, *expert]
        assert refused_command(given) == (2, [("--other_expert", kind)])
