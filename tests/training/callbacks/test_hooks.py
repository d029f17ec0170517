"""Hooks of callbacks that use gradients and samples, and requests that end a run with results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused, refused_options
from safetensors.torch import load_file

from finetrainers import Callback, Sample, TrainResult, TrainState, load_config, train


class Hooks(Callback):
    """Records gradients, which it doubles, and samples, and requests the end with results after the second step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.samples_by_step: dict[int, list[Sample]] = {}

    def on_gradients(self, state: TrainState) -> None:
        gradients = [p.grad for p in state.transformer.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())
        for gradient in gradients:
            gradient.mul_(2)

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> dict[str, float]:
        self.samples_by_step[state.step] = list(samples)
        return {"brightness": float(samples[0].frames.mean())}

    def on_log(self, state: TrainState, record: dict[str, float]) -> None:
        if state.step == 2 and "loss" in record:
            state.requests.finish = "bright enough"


def test_hooks_see_gradients_and_samples_and_finish_a_run(options: Callable[..., dict], tmp_path: Path) -> None:
    values = options(
        train_steps=5, logging_steps=1, validation_prompts="a ball", validation_steps=4, validation_inference_steps=2,
        checkpointing_steps=0, max_grad_norm=1e-9,
    )  # fmt: skip
    hooks = Hooks()
    result = train(load_config(**values), callbacks=[hooks])
    assert (result.step, result.stopped_by, result.finished_by) == (2, None, "bright enough")
    assert TrainResult.load(result.run_dir).finished_by == "bright enough"
    records = result.metrics
    assert hooks.norms == pytest.approx([r["grad_norm"] / 2 for r in records if "loss" in r], rel=1e-5)
    assert list(hooks.samples_by_step) == [0, 2]
    [sample] = hooks.samples_by_step[2]
    assert (sample.prompt, sample.frames.shape, sample.frames.dtype) == ("a ball", (9, 64, 64, 3), "uint8")
    assert sample.path in result.samples
    assert [r["step"] for r in records if "brightness" in r] == [0, 2]
    # The results are there, and the run can be continued.
    assert result.weights is not None
    assert load_file(result.weights)
    assert "2 steps" in (result.run_dir / "README.md").read_text()
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    assert [e["by"] for e in events if e["event"] == "finish_requested"] == ["bright enough"]
    assert [e["step"] for e in events if e["event"] == "finished"] == [2]
    longer = train(load_config(**values, resume_from_checkpoint="latest"))
    assert (longer.step, longer.stopped_by, longer.finished_by) == (5, None, None)
    assert TrainResult.load(longer.run_dir).finished_by is None

    values = options(
        training_type="full-finetune", optimizer_in_backward=True, max_grad_norm=0.0, dry_run=True,
        output_dir=str(tmp_path / "refused"),
    )  # fmt: skip
    with refused_options(("callbacks[1]", "unsupported")):
        train(load_config(**values), callbacks=[Callback(), Hooks()])


class Returns(Callback):
    """Returns a value of a hook in every step."""

    def __init__(self, value: Any, *, on_log: Any = None) -> None:
        self.value, self.logged = value, on_log

    def on_step(self, state: TrainState) -> Any:
        return self.value

    def on_log(self, state: TrainState, record: dict[str, float]) -> Any:
        return self.logged


def test_numbers_of_hooks_may_be_of_any_type_and_mistakes_are_warnings(
    options: Callable[..., dict], caplog: pytest.LogCaptureFixture
) -> None:
    numbers = {
        "float32": np.float32(0.5), "tensor": torch.tensor(2.0, requires_grad=True), "bfloat16": torch.tensor([3.0]),
        "integer": 4, "flag": True,
    }  # fmt: skip
    mistakes = {
        "text": "0.5", "many": np.zeros(2), "nested": {"a": 1.0}, "undefined": float("nan"), 7: 1.0,
        "step": 9, "time": 1.0, "loss": -1.0, "lr": 1.0, "grad_norm": 0.0,
    }  # fmt: skip
    callbacks = [Returns({**numbers, **mistakes}), Returns(0.25), Returns(None, on_log={"late": 1.0})]
    result = train(load_config(**options(train_steps=2)), callbacks=callbacks)
    records = [record for record in result.metrics if "float32" in record]
    expected = {"float32": 0.5, "tensor": 2.0, "bfloat16": 3.0, "integer": 4.0, "flag": 1.0}
    assert [{name: record[name] for name in record if name != "time"} for record in records] == [
        {"step": 1, **expected}, {"step": 2, **expected},
    ]  # fmt: skip
    assert [record["loss"] > 0 for record in result.metrics if "loss" in record] == [True, True]
    warnings = [record.message for record in caplog.records if record.message.startswith("Returns.")]
    assert len(warnings) == len(mistakes) + 2  # once each
    assert all(any(repr(name) in warning for warning in warnings) for name in mistakes)

    class Lazy(Callback):
        async def on_log(self, state: TrainState, record: dict[str, float]) -> None: ...

        def on_step(self, state: TrainState) -> Any:
            yield

    with refused_options(("callbacks[0]", "invalid"), ("callbacks[0]", "invalid")):
        train(load_config(**options(train_steps=1)), callbacks=[Lazy()])


@pytest.mark.parametrize(
    ("name", "value", "kind"), [("finnish", "x", "unknown"), ("finish", False, "invalid"), ("save", "yes", "invalid")]
)
def test_requests_that_nothing_reads_are_refused(
    options: Callable[..., dict], name: str, value: Any, kind: Any
) -> None:
    class Requests(Callback):
        def on_start(self, state: Any) -> None:
            with pytest.raises(AttributeError):
                state.finish = "x"
            setattr(state.requests, name, value)

    with refused(kind, name):
        train(load_config(**options(train_steps=1)), callbacks=[Requests()])
