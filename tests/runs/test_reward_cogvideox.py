"""A tiny CogVideoX of random weights follows a reward through DDIM, wherever the reward points."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finetrainers.config.load import load_config
from finetrainers.methods.grpo.prompts.source import PromptSource
from finetrainers.models.cogvideox import CogVideoXSpec
from finetrainers.runs.training import train


@pytest.mark.rotating
@pytest.mark.timeout(180)
@pytest.mark.parametrize("color", ["red", "cyan"])
def test_clips_turn_to_the_color_that_is_rewarded(color: str, tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """Red and cyan are opposites, and both start from the same weights: no drift could raise both."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a bright day\na dark night\n")
    config = load_config(
        method="grpo",
        model_name="cogvideox",
        pretrained_model_name_or_path=str(tiny_repo("cogvideox")),
        training_type="full-finetune",
        prompts=str(prompts),
        eval_prompts=str(prompts),
        reward=[f"color,target={color}"],
        rollout_size="9x32x32",
        prompts_per_step=2,
        num_generations=8,
        batch_size=16,
        sampling_steps=4,
        window_size=1,
        window_range=[0.5, 0.75],
        transformer_dtype="fp32",
        vae_dtype="fp32",
        text_encoder_dtype="fp32",
        optimizer="adamw",
        lr=5e-3,
        train_steps=8,
        eval_steps=8,
        checkpointing_steps=0,
        logging_steps=1,
        output_dir=str(tmp_path / "run"),
    )
    train(config)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = {r["step"]: r["eval_reward/color"] for r in records if "eval_reward/color" in r}
    spread = next(r["group_std/color"] for r in records if "group_std/color" in r)
    assert scores[8] - scores[0] > 10 * spread  # far more than clips of one prompt differ by


def test_patches_of_two_frames(tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three latent frames, 1.5 denoises four: all of them are the policy's, three are decoded."""
    seen: list[tuple[int, int]] = []
    decode = PromptSource.decode

    def watched(source: PromptSource, latents: torch.Tensor, stats: object) -> torch.Tensor:
        clips = decode(source, latents, stats)
        seen.append((latents.shape[2], clips.shape[1]))
        return clips

    replayed: list[int] = []
    predict = CogVideoXSpec.predict

    def counted(spec: CogVideoXSpec, transformer: object, x: torch.Tensor, *rest: object) -> torch.Tensor:
        replayed.append(x.shape[2])
        return predict(spec, transformer, x, *rest)

    monkeypatch.setattr(PromptSource, "decode", watched)
    monkeypatch.setattr(CogVideoXSpec, "predict", counted)
    (tmp_path / "prompts.txt").write_text("a bright day\na dark night\n")
    config = load_config(
        method="grpo", model_name="cogvideox", pretrained_model_name_or_path=str(tiny_repo("cogvideox", version="1.5")),
        prompts=str(tmp_path / "prompts.txt"), eval_prompts=str(tmp_path / "prompts.txt"), reward=["brightness"],
        rollout_size="9x32x32", prompts_per_step=2, num_generations=2, batch_size=2, sampling_steps=3,
        transformer_dtype="fp32", vae_dtype="fp32", text_encoder_dtype="fp32", rank=4, lora_alpha=8, lr=1e-2,
        train_steps=2, checkpointing_steps=0,
        logging_steps=1, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    train(config)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    errors = [record["ratio_error"] for record in records if "ratio_error" in record]
    assert errors == [0.0, 0.0]
    assert set(seen) == {(3, 9)}
    assert set(replayed) == {4}
