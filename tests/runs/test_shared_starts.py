"""Clips of a prompt that are sampled and trained as one until they differ: the gradient is that of plain replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from every_family import FAMILIES, short_clip
from plain_replay import compare_with_plain_replay


@pytest.fixture
def reward_run(options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`reward_run(family, **changes)`: a rollout of two prompts, and its update."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\na blue cube rolls\na cat\n")

    def start(family: str, **changes: Any) -> Any:
        values = options(family, **{
            "method": "grpo", "train_steps": 1, "batch_size": 1, "optimizer": "adamw", "prompts": str(prompts),
            "reward": ["brightness"], "rollout_size": f"{short_clip(family)}x64x64", "prompts_per_step": 2,
            "num_generations": 4, "sampling_steps": 5, "eta": 0.3, "window_range": [0.2, 0.8],
            "window_strategy": "fixed", **changes,
        })  # fmt: skip
        return run(**{k: v for k, v in values.items() if k not in ("data_root", "video_resolution_buckets")})

    return start


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("family", "training_type"), [(family, ("lora", "full-finetune")[k % 2]) for k, family in enumerate(FAMILIES)]
)
def test_every_family_learns_as_by_plain_replay(
    family: str, training_type: str, reward_run: Callable[..., Any], tmp_path: Path
) -> None:
    def train(name: str) -> Any:
        changes = {"training_type": training_type, "best_of_n": 2, "lr": 1e-4, "logging_steps": 1}
        return reward_run(family, **changes, output_dir=str(tmp_path / name)).metrics

    [record], [expected] = compare_with_plain_replay(train)
    assert record["ratio_error"] == expected["ratio_error"] == 0.0
    for name in ("loss", *(name for name in expected if name.startswith("gradient/"))):
        assert record[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
