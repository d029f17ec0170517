"""Samples between steps: weights, averages and the next steps are as if none had been drawn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from on_devices import Run, assert_equal, cases

from finetrainers.training.callbacks.validation import Validation


@pytest.mark.parametrize(("device", "family", "offload"), cases(*product(FAMILIES, (False, True))))
def test_sampling_leaves_training_as_it_was(
    device: str, family: str, offload: bool, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where parts of the pipeline wait in host memory meanwhile, and with the averages in place of the weights."""
    sample, seen = Validation.sample, []

    def watched(self: Validation, state: Any) -> Any:
        network = state.parallel.unwrap(state.transformer)
        before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        averages = {name: weight.clone() for name, weight in state.ema.weights.items()}
        written = sample(self, state)
        assert {weight.device.type for weight in network.parameters()} == {device}
        assert_equal(dict(network.named_parameters()), before)
        assert_equal(state.ema.weights, averages)
        assert {weight.device.type for weight in averages.values()} == {device}
        assert network.training
        seen.append(len([*(state.run_dir.root / "samples" / f"step-{state.step:06d}").glob("*.mp4")]))
        return written

    monkeypatch.setattr(Validation, "sample", watched)
    options = {"use_ema": True, "train_steps": 2}
    sampled = start(
        device, family, **options, validation_prompts="a red ball@@@9x64x64", validation_steps=1,
        validation_inference_steps=2, enable_model_cpu_offload=offload,
    )  # fmt: skip
    assert seen == [1, 1, 1]  # before the first step, and after each
    if device == "cpu":
        return  # what other steps would have been is tested in training/
    straight = start(device, family, **options)
    assert sampled.curve() == pytest.approx(straight.curve(), rel=1e-4)
    torch.cuda.synchronize()
