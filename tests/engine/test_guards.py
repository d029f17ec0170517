"""A loss or gradient that is not finite never becomes an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetrainers.engine.guards import NonFiniteError, NonFiniteGuard
from finetrainers.engine.resume import list_checkpoints
from finetrainers.engine.run_dir import RunDirectory
from finetrainers.methods.base import Step
from finetrainers.methods.sft import SFT


def poison(monkeypatch: pytest.MonkeyPatch, calls: set[int], *, gradient_only: bool = False) -> None:
    """The given calls of the loss are NaN, or their gradients alone."""
    loss, count = SFT.loss, iter(range(1, 1000))

    def poisoned(method: SFT, transformer: Any, batch: Any) -> Any:
        value, metrics = loss(method, transformer, batch)
        if next(count) not in calls:
            return value, metrics
        if gradient_only:  # the square root's slope at zero is infinite, times zero
            return value + torch.sqrt(value * 0), metrics
        return value * math.nan, {name: one * math.nan for name, one in metrics.items()}

    monkeypatch.setattr(SFT, "loss", poisoned)


@pytest.mark.parametrize("gradient_only", [False, True])
@pytest.mark.parametrize("logging_steps", [1, 10])
def test_it_ends_the_run_before_the_update(
    gradient_only: bool, logging_steps: int, options: Callable[..., dict], run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    poison(monkeypatch, {3}, gradient_only=gradient_only)
    found = "grad_norm nan" if gradient_only else "loss nan, grad_norm nan"
    with pytest.raises(NonFiniteError, match=f"step 3: {found}. No weight was changed"):
        run(**options(train_steps=4, checkpointing_steps=1, logging_steps=logging_steps))
    assert [step for step, _ in list_checkpoints(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("gradient_only", [False, True])
def test_skipping_is_as_if_the_step_had_been_empty(
    gradient_only: bool, options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    values = options(train_steps=4, clips=3, use_ema=True, on_nonfinite="skip")
    with monkeypatch.context() as patch:
        poison(patch, {2}, gradient_only=gradient_only)
        skipped = run(**values)
    with monkeypatch.context() as patch:
        steps = SFT.steps
        empty_second = lambda method, start, network: (  # noqa: E731
            Step([]) if n == 2 else step for n, step in enumerate(steps(method, start, network), start=1)
        )
        patch.setattr(SFT, "steps", empty_second)
        reference = run(**{**values, "output_dir": str(tmp_path / "reference")})
    assert all(skipped.weights[name].equal(tensor) for name, tensor in reference.weights.items())
    assert [r.get("nonfinite_steps") for r in skipped.metrics] == [None, 1.0, None, None]
    assert all(math.isfinite(value) for r in skipped.metrics for value in r.values())
    [event] = [e for e in skipped.events if e["event"] == "nonfinite"]
    assert (event["step"], event["skipped"]) == (2, True)


def test_too_many_are_an_error(options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    poison(monkeypatch, {1, 3, 4})
    with pytest.raises(NonFiniteError, match="3 steps were not finite, more than --max_nonfinite_steps 2"):
        run(**options(train_steps=6, on_nonfinite="skip", max_nonfinite_steps=2))


def test_a_scaled_gradient_may_overflow(tmp_path: Path) -> None:
    """With fp16 it does at the start of every run, and the scaler takes care of it."""
    guard = NonFiniteGuard(policy="raise", limit=0, loss_scaling=True, run_dir=RunDirectory(tmp_path, writes=False))
    assert guard.lets_through(1, {"loss": 1.0, "grad_norm": math.inf})
    with pytest.raises(NonFiniteError, match="loss inf"):
        guard.lets_through(1, {"loss": math.inf, "grad_norm": math.inf})
