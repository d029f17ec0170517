"""A tiny CogVideoX of random weights follows a reward through DDIM, wherever the reward points."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from finetrainers.config.load import load_config
from finetrainers.engine.training import train


@pytest.mark.timeout(180)
@pytest.mark.parametrize("colour", ["red", "cyan"])
def test_clips_turn_to_the_colour_that_is_rewarded(colour: str, tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
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
        reward=[f"colour,target={colour}"],
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
    scores = {r["step"]: r["eval_reward/colour"] for r in records if "eval_reward/colour" in r}
    spread = next(r["group_std/colour"] for r in records if "group_std/colour" in r)
    assert scores[8] - scores[0] > 10 * spread  # far more than clips of one prompt differ by
