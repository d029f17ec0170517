"""Parts that are right by themselves, where they meet: scaling with dry batches, going back with resets and records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from finetrainers.config.load import load_config
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.data.video import decode as decoding
from finetrainers.methods.base import Step
from finetrainers.methods.grpo.method import GRPO
from finetrainers.methods.sft import SFT
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.preflight import preflight
from finetrainers.rewards.reward_set import RewardSet
from finetrainers.runs import run as runs
from finetrainers.training import rollback
from finetrainers.training.callbacks.validation import Validation
from finetrainers.training.guards.nonfinite import NonFiniteError
from finetrainers.training.watchdog import Watchdog


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> list[torch.amp.GradScaler]:
    """Gradients are scaled as on a GPU under fp16, which accelerate leaves out on CPUs; the scalers, by run."""
    join, made = Strategy._join, []

    def join_with_a_scaler(self: Strategy, *values: Any, **named: Any) -> Accelerator:
        accelerator = join(self, *values, **named)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
        made.append(scaler)
        accelerator.scaler = scaler
        accelerator.unscale_gradients = lambda: [scaler.unscale_(o.optimizer) for o in accelerator._optimizers]
        return accelerator

    monkeypatch.setattr(Strategy, "_join", join_with_a_scaler)
    return made


@pytest.fixture
def rewarded(tiny_repo: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    """Options of a run of reward finetuning, with one step for each rollout."""
    (tmp_path / "prompts.txt").write_text("a red ball\na cat\n")
    return {
        "method": "grpo", "model_name": "ltx_video", "pretrained_model_name_or_path": str(tiny_repo("ltx_video")),
        "prompts": str(tmp_path / "prompts.txt"), "reward": ["brightness"], "rollout_size": "9x64x64",
        "prompts_per_step": 1, "num_generations": 4, "batch_size": 4, "sampling_steps": 3, "updates_per_rollout": 1,
        "transformer_dtype": "fp32", "vae_dtype": "fp32", "text_encoder_dtype": "fp32", "optimizer": "adamw",
        "lr": 1e-2, "rank": 4, "lora_alpha": 8, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip


def test_dry_batches_leave_a_gradient_scaler_as_it_was(
    scaled: list[torch.amp.GradScaler], options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(clips=2, train_steps=2, gradient_accumulation_steps=2)
    plain = run(**values)
    dry = run(**{**values, "output_dir": str(tmp_path / "dry")}, dry_batches="on")
    assert len([event for event in dry.events if event["event"] == "dry_batch"]) == 2
    assert dry.curve("loss", "grad_norm") == plain.curve("loss", "grad_norm")
    assert scaled[0].state_dict() == scaled[1].state_dict()


def test_a_scaled_step_whose_loss_alone_is_not_finite_is_left_out_too(
    scaled: list[torch.amp.GradScaler], options: Callable[..., dict], run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    values = options(train_steps=3, on_nonfinite="skip", optimizer="adamw")
    with monkeypatch.context() as patch:
        loss, count = SFT.loss, iter(range(1, 10))

        def overflowing(method: SFT, transformer: Any, batch: Any) -> Any:
            value, metrics = loss(method, transformer, batch)
            return value, metrics if next(count) != 2 else {"loss": metrics["loss"] * math.inf}

        patch.setattr(SFT, "loss", overflowing)
        skipped = run(**values)
    steps = SFT.steps
    monkeypatch.setattr(
        SFT, "steps",
        lambda m, start, net: (Step([]) if n == 1 else s for n, s in enumerate(steps(m, start, net))),
    )  # fmt: skip
    reference = run(**{**values, "output_dir": str(tmp_path / "reference")})
    assert [record.get("nonfinite_steps") for record in skipped.metrics] == [None, 1.0, None]
    assert all(skipped.weights[name].equal(tensor) for name, tensor in reference.weights.items())


def test_a_run_does_not_go_back_behind_a_reset(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That checkpoint lacks the average that the run has, and has the moments that it was not to have."""
    values = options(train_steps=2, checkpointing_steps=2, weight_decay=0.0)
    run(**values)
    loss, count = SFT.loss, iter(range(1, 10))

    def failing(method: SFT, transformer: Any, batch: Any) -> Any:
        value, metrics = loss(method, transformer, batch)
        return (value, metrics) if next(count) != 1 else (value * math.nan, {"loss": value.detach() * math.nan})

    monkeypatch.setattr(SFT, "loss", failing)
    more = {**values, "train_steps": 4, "resume_from_checkpoint": "latest", "on_nonfinite": "rollback"}
    with pytest.raises(NonFiniteError, match=r"step 3 .*step-2 .*--reset "):
        run(**more, reset=["ema"], use_ema=True)


def test_settings_of_the_optimizer_are_those_of_the_command(
    options: Callable[..., dict], run: Callable[..., Any]
) -> None:
    values = options(train_steps=1, weight_decay=0.0, optimizer="adamw")
    run(**values)
    again = {**values, "train_steps": 2, "weight_decay": 0.5, "beta2": 0.9, "resume_from_checkpoint": "latest"}
    done = run(**again)
    [group] = done.state.optimizer.param_groups
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.9, 0.9))
    state = done.state.optimizer.state_dict()["state"]
    assert {int(values["step"]) for values in state.values()} == {2}


def test_going_back_takes_rewards_along_and_has_the_time_of_a_checkpoint(
    rewarded: dict[str, Any], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, count = GRPO.loss, iter(range(100))
    failing: list[int] = []

    def spoilt(method: GRPO, transformer: Any, batch: Any) -> Any:
        value, metrics = loss(method, transformer, batch)
        number = next(count)
        if batch.is_first:
            failing.append(number)
        if len(failing) != 4:
            return value, metrics
        return value * math.nan, {name: one * math.nan for name, one in metrics.items()}

    told: list[str] = []
    enter, find = Watchdog.enter, rollback.find_checkpoint
    monkeypatch.setattr(GRPO, "loss", spoilt)
    monkeypatch.setattr(
        Watchdog, "enter", lambda dog, section, *kind: (told.append(section), enter(dog, section, *kind))[1]
    )
    monkeypatch.setattr(rollback, "find_checkpoint", lambda *values: (told.append("look"), find(*values))[1])
    done = run(**rewarded, train_steps=4, checkpointing_steps=2, on_nonfinite="rollback")
    assert [event["step"] for event in done.events if event["event"] == "rollback"] == [2]
    expected = [f"{record['reward/brightness']:.6g}" for record in done.metrics]
    assert len(expected) == 4
    assert (done.root / "rewards" / "brightness.txt").read_text().split() == expected
    assert told[told.index("look") - 1] == "checkpoint"


def test_a_checkpoint_that_came_before_the_lock_is_taken(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    """The run before was put back into the queue, and had not quite ended when this one looked for its checkpoints."""
    values = options(train_steps=2)
    later = preflight(load_config(**{**values, "train_steps": 3}, resume_from_checkpoint="auto"))
    assert later.start.checkpoint is None
    run(**values)
    state = runs.run(later)
    assert state is not None
    records = map(json.loads, (state.run_dir.root / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records] == [1, 2, 3]


def test_ranks_wait_for_samples_under_the_limit_of_sampling() -> None:
    told: list[str] = []
    state: Any = SimpleNamespace(
        step=3,
        is_last_step=False,
        wants_samples=False,
        requests=SimpleNamespace(sample=False),
        parallel=SimpleNamespace(barrier=lambda: told.append("wait")),
    )
    for due, expected in ((False, []), (True, ["sample", "wait"])):
        sampling: Any = SimpleNamespace(
            due=lambda _, due=due: due, sample=lambda _: told.append("sample") or [], scores=None
        )
        sampling._sample_and_score = partial(Validation._sample_and_score, sampling)
        Validation.on_step(sampling, state)
        assert told == expected


def test_what_keeps_one_rank_from_evaluating_or_trying_is_told_to_all(
    options: Callable[..., dict], rewarded: dict[str, Any], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Another rank's part may be sound, and it would wait for this one."""
    told: list[str] = []
    tell = Strategy.raise_if_any_failed

    def tell_all(parallel: Strategy, error: Exception | None, what: str) -> None:
        if error is not None:
            told.append(what)
        tell(parallel, error, what)

    def broken(*_: Any, **__: Any) -> Any:
        raise InvalidSampleError("ends early")

    monkeypatch.setattr(Strategy, "raise_if_any_failed", tell_all)
    monkeypatch.setattr(decoding, "read_frames", broken)
    monkeypatch.setattr(RewardSet, "score", broken)
    (tmp_path / "held_out.txt").write_text("a dog\n")
    for values in (
        options(clips=3, eval_num_items=1, eval_steps=2),
        options(clips=3, dry_batches="on"),
        {**rewarded, "train_steps": 1, "eval_prompts": str(tmp_path / "held_out.txt"), "eval_steps": 1},
    ):
        with pytest.raises(InvalidSampleError, match="ends early"):
            run(**{**values, "output_dir": str(tmp_path / f"run {len(told)}")})
    held_out, dry_batch, evaluation = told
    assert "held-out" in held_out
    assert "dry batch" in dry_batch
    assert "evaluation" in evaluation
