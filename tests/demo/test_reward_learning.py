"""Reward finetuning of the embedded model: held-out captions come to show the preferred color, and the rest as before.

The reward's optimum is red for one half of the captions and cyan, its opposite, for the other, so that no drift raises
it. `benchmarks/grpo.py --learning` has every algorithm with LoRA and in full.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from finetrainers.demo.measure import measure
from finetrainers.demo.rewarded import reward_config, rewarded
from finetrainers.plan.preflight import preflight
from finetrainers.runs.run import run

pytestmark = pytest.mark.timeout(600)

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "window-full": (
        7, {"training_type": "full-finetune", "rank": None, "lora_alpha": None, "lr": 8e-4, "prompts_per_step": 2},
    ),
    "nft-lora": (
        4,
        {
            "method": "nft", "noise_levels": 1, "init_same_noise": False, "nft_kl": 1e-3, "kl_coef": None,
            "window_size": None, "window_range": None, "lr": 1.5e-2,
        },
    ),
    "awm-lora": (
        5,
        {
            "method": "awm", "noise_levels": 2, "init_same_noise": False, "old_policy_kl": 0.1, "kl_coef": 1e-3,
            "window_size": None, "window_range": None, "lr": 6e-3,
        },
    ),
}  # fmt: skip


def curve(run_dir: Path, name: str) -> dict[int, float]:
    """A number of the records, by step."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.rotating(name)) for name in RUNS])
def test_scores_of_held_out_captions_rise(name: str, tmp_path: Path) -> None:
    steps, changes = RUNS[name]
    run(preflight(reward_config(tmp_path, steps=steps, eval_steps=steps, checkpointing_steps=0, **changes)))
    shown = curve(tmp_path / "run", "eval_reward/preferred_color_shown")
    assert shown[steps] - shown[0] > 0.2  # of 16 captions
    for prompt_adherence in ("eval_reward/demo.shape", "eval_reward/demo.motion"):
        found = curve(tmp_path / "run", prompt_adherence)
        assert found[steps] >= found[0] - 0.15, prompt_adherence  # 16 captions: one is 0.06


@pytest.mark.rotating("refl")
def test_backpropagated_scores_of_held_out_captions_rise(tmp_path: Path) -> None:
    """Through the reward, the decoder and two of three denoising steps: every sign must be right."""
    changes: dict[str, Any] = {
        "method": "refl", "draft_k": 2, "sampling_steps": 3, "prompts_per_step": 8, "num_generations": 1,
        "batch_size": 8, "window_size": None, "window_range": None, "kl_coef": None, "lr": 8e-3,
        "eval_reward": ["preferred_color"], "eval_steps": 3, "checkpointing_steps": 0,
    }  # fmt: skip
    run(preflight(reward_config(tmp_path, steps=3, evaluated=8, **changes)))
    found = curve(tmp_path / "run", "eval_reward/preferred_color")
    assert found[3] - found[0] > 0.08


@pytest.mark.rotating
def test_the_demonstration_leaves_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("finetrainers.demo.rewarded._ASKED", 4)
    monkeypatch.setitem(measure.__kwdefaults__, "steps", 4)
    monkeypatch.setitem(reward_config.__kwdefaults__, "evaluated", 4)
    before, after = rewarded(tmp_path, steps=1)
    assert 0 <= before.preferred <= 0.5 < before.others <= 1
    assert 0 <= after.preferred <= 1
    said = capsys.readouterr().out
    for name in ("result.png", "reward.png", "run/pytorch_lora_weights.safetensors"):
        assert str(tmp_path / name) in said
        assert (tmp_path / name).is_file()
    assert Image.open(tmp_path / "result.png").width > 500
    assert set(curve(tmp_path / "run", "eval_reward/preferred_color")) == {0, 1}
    assert not set((tmp_path / "prompts" / "train.txt").read_text().splitlines()) & set(
        (tmp_path / "prompts" / "held_out.txt").read_text().splitlines()
    )
