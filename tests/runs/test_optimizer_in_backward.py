"""Runs whose optimizer steps in backward: the same results, an exact resume, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused_options

from finetrainers.config.load import load_config
from finetrainers.plan.preflight import preflight
from finetrainers.training.guards.memory import OutOfMemory

FULL = {"training_type": "full-finetune", "optimizer_in_backward": True, "max_grad_norm": 0.0}


def test_a_run_is_the_same_and_resumes_exactly(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the memory probe, with a checkpoint in the middle, resumed with and without it; an OOM is not retried."""
    values = options(clips=3, training_type="full-finetune", max_grad_norm=0.0, train_steps=4, checkpointing_steps=2)
    folder = lambda name: {"output_dir": str(tmp_path / name)}  # noqa: E731
    plain = run(**{**values, **folder("plain")})
    monkeypatch.setattr("finetrainers.optim.in_backward._AT_ONCE", 20_000)
    early = run(**{**values, **FULL, **folder("early"), "dry_batches": "on"})
    assert early.curve("loss") == plain.curve("loss")
    assert dict(early.curve("grad_norm")) == pytest.approx(dict(plain.curve("grad_norm")), rel=1e-5)
    assert all(early.weights[name].equal(tensor) for name, tensor in plain.weights.items())
    half = tmp_path / "early" / "checkpoints" / "step-2"
    for name, changes in (("with", FULL), ("without", {})):
        resumed = run(**{**values, **changes, **folder(name)}, resume_from_checkpoint=str(half))
        assert all(resumed.weights[key].equal(tensor) for key, tensor in plain.weights.items())
    monkeypatch.setenv("FINETRAINERS_FAULT", "oom@loss")
    with pytest.raises(OutOfMemory, match="--optimizer_in_backward "):
        run(**{**values, **FULL, **folder("oom")})


def test_accumulation_is_refused(options: Callable[..., dict]) -> None:
    config = load_config(**options(**FULL, gradient_accumulation_steps=2))
    with refused_options(("--optimizer_in_backward", "conflict")) as caught:
        preflight(config)
    assert "--gradient_accumulation_steps 1" in str(caught.value)
