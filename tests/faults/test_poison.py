"""Numbers that are not finite never become weights: from a loss, a gradient, or a reward, in whole runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetrainers.utils import exit_codes


def test_a_poisoned_loss_ends_the_run_and_a_poisoned_gradient_is_left_out(
    train: Callable[..., Any], files: Any
) -> None:
    poisoned = train("nan@loss:2", train_steps=3)
    assert poisoned.wait() == exit_codes.FAILED
    assert "error: step 2: loss nan" in poisoned.stderr
    assert files.checkpoints == [1]
    skipped = train("nan@backward:1", resume=True, train_steps=3, on_nonfinite="skip")
    assert skipped.wait() == 0, skipped.stderr
    assert re.search(r"step 2 \w+ \(1 .*: grad_norm nan", skipped.stderr)
    assert files.checkpoints == [2, 3]
    one, two, three = (
        load_file(path / "pytorch_lora_weights.safetensors")
        for path in (files.root / "checkpoints" / "step-2", files.root / "checkpoints" / "step-3", files.root)
    )
    assert all(tensor.isfinite().all() for weights in (one, two, three) for tensor in weights.values())
    assert any(not one[name].equal(two[name]) for name in one), "the step after it must train"


@pytest.mark.rotating
@pytest.mark.parametrize("policy", ["raise", "mask"])
def test_a_poisoned_reward_names_its_clip_or_is_left_out(
    policy: str, train: Callable[..., Any], files: Any, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a red ball\na cat\n")
    options = {
        "method": "grpo", "prompts": tmp_path / "prompts.txt", "reward": "brightness", "rollout_size": "9x64x64",
        "prompts_per_step": 2, "num_generations": 4, "batch_size": 4, "sampling_steps": 3, "updates_per_rollout": 1,
        "train_steps": 2, "reward_on_error": policy,
        "data_root": None, "video_resolution_buckets": None,
    }  # fmt: skip
    done = train("nan@reward:1", **options)
    if policy == "raise":
        assert done.wait() == exit_codes.FAILED
        assert re.search(r"brightness \w+ nan \w+ 'score'", done.stderr)
        assert files.checkpoints == []
    else:
        assert done.wait() == 0, done.stderr
        assert re.search(r"\b4 clips of 4 \D* 0;", done.stderr)
        assert files.checkpoints == [1, 2]
