"""Gradients taken while a rollout samples are those of replay, on every family; and an OOM there says what needs less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from torch import Tensor

from finetrainers.engine.checkpoints.find import scan_checkpoints
from finetrainers.methods.grpo.no_replay import NoMemoryForGradients, RolloutGradients
from finetrainers.parallel.strategy import Strategy


@pytest.fixture
def reward_run(options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`reward_run(family, **changes)`: a rollout of two prompts, and its update."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\na blue cube rolls\na cat\n")

    def start(family: str, **changes: Any) -> Any:
        values = options(family, **{
            "method": "grpo", "train_steps": 1, "batch_size": 2, "optimizer": "adamw", "prompts": str(prompts),
            "reward": ["brightness"], "rollout_size": "9x64x64", "prompts_per_step": 2, "num_generations": 4,
            "sampling_steps": 5, **changes,
        })  # fmt: skip
        return run(**{k: v for k, v in values.items() if k not in ("data_root", "video_resolution_buckets")})

    return start


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, Tensor]]:
    """Of every step the gradients before they are clipped, by the place of the weight."""
    seen: list[dict[int, Tensor]] = []
    clip = Strategy.clip_grad_norm

    def watched(parallel: Any) -> Any:
        weights = enumerate(parallel._parameters)
        seen.append({place: w.grad.double() for place, w in weights if w.grad is not None})
        return clip(parallel)

    monkeypatch.setattr(Strategy, "clip_grad_norm", watched)
    return seen


@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_replay(
    family: str, training_type: str, reward_run: Callable[..., Any], gradients: list[dict[int, Tensor]], tmp_path: Path
) -> None:
    records = [
        reward_run(
            family, training_type=training_type, rollout_gradients=how, output_dir=str(tmp_path / how),
            gradient_checkpointing=training_type == "lora", batch_size=1 if training_type == "lora" else 2,
        ).metrics[-1]
        for how in ("replay", "reweight")
    ]  # fmt: skip
    replayed, taken = gradients
    assert taken.keys() == replayed.keys()  # weights without a gradient still have none
    error, size = (
        torch.sqrt(sum((one**2).sum() for one in parts))
        for parts in ([taken[k] - replayed[k] for k in taken], replayed.values())
    )
    # Steps that are trained are sampled clip by clip, and matrix products of other sizes round differently.
    assert error <= (2e-6 if training_type == "lora" else 1e-4) * size > 0
    for name in ("reward/brightness", "grad_norm", "gradient/0.75-1.00"):
        assert records[1][name] == pytest.approx(records[0][name], rel=1e-4)


def test_a_resumed_run_is_bit_for_bit_the_one_that_went_on(reward_run: Callable[..., Any], tmp_path: Path) -> None:
    options = {"rollout_gradients": "reweight", "train_steps": 2, "checkpointing_steps": 1, "lr": 1e-2}
    whole = reward_run("ltx_video", output_dir=str(tmp_path / "whole"), **options)
    first = next(one.path for one in scan_checkpoints(tmp_path / "whole") if one.step == 1)
    resumed = reward_run(
        "ltx_video", output_dir=str(tmp_path / "resumed"), resume_from_checkpoint=str(first), **options
    )
    assert resumed.steps_done == 1
    assert whole.weights.keys() == resumed.weights.keys()
    assert all(torch.equal(value, resumed.weights[key]) for key, value in whole.weights.items())


def test_an_oom_says_what_needs_less(reward_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(RolloutGradients, "take", full)
    with pytest.raises(
        NoMemoryForGradients, match=r"to take gradients while it samples.* --gradient_checkpointing; .*replay"
    ):
        reward_run("ltx_video", rollout_gradients="reweight")


def test_weights_are_updated_as_gradients_arrive(reward_run: Callable[..., Any], tmp_path: Path) -> None:
    """The step has one micro-batch, so `--optimizer_in_backward` may be on."""
    plain, early = (
        reward_run(
            "ltx_video", training_type="full-finetune", rollout_gradients="reweight", max_grad_norm=0.0, lr=1e-4,
            output_dir=str(tmp_path / str(now)), optimizer_in_backward=now,
        ).weights
        for now in (False, True)
    )  # fmt: skip
    for key, value in plain.items():
        torch.testing.assert_close(early[key], value, rtol=1e-6, atol=1e-7)
