"""A loss or gradient that is not finite never becomes an update."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.data.cache.store import CacheError
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.data.video import decode as decoding
from finetrainers.methods.base import Step
from finetrainers.methods.sft import SFT
from finetrainers.plan.preflight import preflight
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.rundir.run_dir import RunDirectory
from finetrainers.training.guards.nonfinite import NonFiniteError, NonFiniteGuard
from finetrainers.training.guards.spikes import SpikeDetector


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


@pytest.mark.rotating
@pytest.mark.parametrize("gradient_only", [False, True])
@pytest.mark.parametrize("logging_steps", [1, 10])
def test_it_ends_the_run_before_the_update(
    gradient_only: bool, logging_steps: int, options: Callable[..., dict], run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    poison(monkeypatch, {3}, gradient_only=gradient_only)
    found = "grad_norm nan" if gradient_only else "loss nan, grad_norm nan"
    with pytest.raises(NonFiniteError, match=f"step 3: {found}\\. .*--on_nonfinite skip"):
        run(**options(train_steps=4, checkpointing_steps=1, logging_steps=logging_steps))
    assert [found.step for found in scan_checkpoints(tmp_path / "run") if found.damage is None] == [1, 2]


@pytest.mark.rotating
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


def poison_sample(monkeypatch: pytest.MonkeyPatch, key: tuple[int, int]) -> None:
    """One clip in one epoch gives NaN, whenever it comes."""
    loss = SFT.loss

    def poisoned(method: SFT, transformer: Any, batch: Any) -> Any:
        value, metrics = loss(method, transformer, batch)
        if key not in batch.sample_keys:
            return value, metrics
        return value * math.nan, {name: one * math.nan for name, one in metrics.items()}

    monkeypatch.setattr(SFT, "loss", poisoned)


@pytest.mark.rotating
@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
def test_going_back_is_as_if_the_data_had_not_been_there(
    training_type: str, options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    values = options(
        train_steps=6, clips=3, use_ema=True, training_type=training_type, checkpointing_steps=2,
        on_nonfinite="rollback", lora_dropout=0.3 if training_type == "lora" else None, lr_scheduler="linear",
        async_checkpointing=training_type == "lora",
    )  # fmt: skip
    keys: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        loss = SFT.loss
        patch.setattr(SFT, "loss", lambda m, t, b: keys.append(b.sample_keys[0]) or loss(m, t, b))
        run(**{**values, "output_dir": str(tmp_path / "order")})
    with monkeypatch.context() as patch:
        poison_sample(patch, keys[3])  # the fourth step fails; the third goes with it
        done, again = (run(**{**values, "output_dir": str(tmp_path / name)}) for name in ("back", "again"))
    assert all(done.weights[name].equal(tensor) for name, tensor in again.weights.items())
    with monkeypatch.context() as patch:
        steps = SFT.steps
        # The same run over data in which neither step is: places 0 1, then 4 5 6 7.
        patch.setattr(
            SFT, "steps", lambda m, start, net: (s for n, s in enumerate(steps(m, start, net)) if n not in (2, 3))
        )
        reference = run(**{**values, "output_dir": str(tmp_path / "reference")})
    assert done.curve("loss", "grad_norm", "lr") == reference.curve("loss", "grad_norm", "lr")
    assert [step for step, _ in done.curve("loss")] == [1, 2, 3, 4, 5, 6]
    assert all(done.weights[name].equal(tensor) for name, tensor in reference.weights.items())
    [event] = [e for e in done.events if e["event"] == "rollback"]
    assert (event["step"], event["failed"], event["data_ahead"]) == (2, 4, 2)

    # It is continued with the same data as it went on with.
    shutil.rmtree(tmp_path / "back" / "checkpoints" / "step-6")
    resumed = run(**{**values, "output_dir": str(tmp_path / "back")}, resume_from_checkpoint="latest")
    assert resumed.steps_done == 2
    assert resumed.curve("loss", "grad_norm") == reference.curve("loss", "grad_norm")
    assert all(resumed.weights[name].equal(tensor) for name, tensor in reference.weights.items())
    # In other batches, those begin where it is in the data, which is two steps further than its count.
    changed = {**values, "output_dir": str(tmp_path / "back"), "train_steps": 8, "batch_size": 2}
    other = preflight(load_config(**changed, resume_from_checkpoint="latest"))
    assert [(segment.first_step, segment.batch_size) for segment in other.start.data_position.segments] == [
        (0, 1),
        (8, 2),
    ]


def test_going_back_has_its_limits(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--on_nonfinite: .*--checkpointing_steps"):
        run(**options(train_steps=4, on_nonfinite="rollback"))
    values = options(train_steps=4, on_nonfinite="rollback", checkpointing_steps=2, max_nonfinite_steps=1)
    with monkeypatch.context() as patch:
        poison(patch, {1})
        with pytest.raises(NonFiniteError, match=r"step 1 .*run/checkpoints.*config files"):
            run(**values)
    with monkeypatch.context() as patch:
        poison(patch, {3, 4})
        with pytest.raises(NonFiniteError, match=r"; 2 steps .*--max_nonfinite_steps 1"):
            run(**{**values, "output_dir": str(tmp_path / "twice")})


def test_spikes_are_found_and_hide_none(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path, writes=True)
    detector = SpikeDetector(window=128, sigma=6, run_dir=run_dir)
    series = [1.0 + 0.1 * math.sin(k) for k in range(200)]
    assert not any(detector.check_step(k, {"loss": value, "grad_norm": 2.0}) for k, value in enumerate(series))
    # sin has the standard deviation 1 / sqrt(2), so the bound is 1 + 6 * 0.0707.
    assert detector.check_step(200, {"loss": 1.40, "grad_norm": 2.0}) == {}
    assert detector.check_step(201, {"loss": 100.0, "grad_norm": 2.0}) == {"spikes": 1.0}
    assert detector.check_step(202, {"loss": 3.0, "grad_norm": 2.0}) == {"spikes": 2.0}  # the first one did not hide it
    assert detector.check_step(203, {"loss": 1.0, "grad_norm": 9.0}) == {"spikes": 3.0}
    events = [json.loads(line) for line in run_dir.events_file.read_text().splitlines()]
    assert [(e["event"], e["step"]) for e in events] == [("spike", 201), ("spike", 202), ("spike", 203)]
    assert "loss 100 is" in events[0]["values"]
    assert "grad_norm 9 is" in events[2]["values"]
    later = SpikeDetector(window=128, sigma=6, run_dir=run_dir)
    later.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    assert later.recent == detector.recent
    assert later.check_step(204, {"loss": 5.0}) == {"spikes": 4.0}
    # A level that stays is after a while no spike any more.
    assert [later._take("loss", 5.0 + 0.1 * math.sin(k)) is None for k in range(200)][-1]


#: Losses and gradient norms of the quickstart, step by step.
QUICKSTART_LOSSES = """
0.239 0.384 0.13 0.446 0.252 0.176 0.441 0.121 0.265 0.107 0.125 0.285 0.132 0.23 0.258 0.162 0.214 0.157 0.215
0.273 0.336 0.192 0.269 0.202 0.19 0.263 0.127 0.376 0.198 0.158 0.189 0.171 0.139 0.131 0.122 0.128 0.173 0.18
0.0984 0.15 0.129 0.0953 0.26 0.117 0.168 0.473 0.168 0.144 0.152 0.15 0.228 0.111 0.334 0.273 0.212 0.175 0.339
0.206 0.119 0.217 0.0697 0.11 0.143 0.202 0.209 0.2 0.456 0.0953 0.131 0.162 0.137 0.119 0.0967 0.168 0.153 0.165
0.0915 0.302 0.23 0.113 0.196 0.114 0.289 0.163 0.182 0.11 0.147 0.222 0.104 0.153 0.145 0.124 0.0788 0.145 0.138
0.134 0.136 0.276 0.0845 0.295 0.267 0.112 0.122 0.149 0.35 0.124 0.125 0.195 0.11 0.24 0.138 0.084 0.223 0.167
0.259 0.0952 0.247 0.0867 0.143 0.192 0.291 0.309 0.123 0.152 0.368 0.152 0.143 0.17 0.225 0.0736 0.137 0.107 0.219
0.106 0.121 0.222 0.235 0.155 0.436 0.151 0.103 0.0598 0.114 0.163 0.158 0.202 0.0603 0.085 0.141 0.103
"""
QUICKSTART_NORMS = """
0.0394 0.0606 0.0155 0.113 0.0652 0.0528 0.0656 0.0205 0.0797 0.0346 0.0588 0.183 0.0486 0.0572 0.055 0.0557 0.0456
0.0482 0.101 0.285 0.115 0.0967 0.057 0.0595 0.0497 0.142 0.0488 0.174 0.063 0.0375 0.036 0.0884 0.0478 0.0795
0.0514 0.0454 0.127 0.0446 0.0393 0.0495 0.0336 0.0548 0.094 0.0664 0.054 0.183 0.156 0.0465 0.0439 0.074 0.134
0.0462 0.0834 0.102 0.146 0.117 0.116 0.0747 0.067 0.1 0.0351 0.0537 0.203 0.204 0.28 0.0413 0.299 0.0335 0.0976
0.0549 0.1 0.0879 0.0782 0.0636 0.0357 0.0438 0.0374 0.145 0.119 0.155 0.0969 0.04 0.108 0.0326 0.082 0.0388 0.0529
0.171 0.113 0.0695 0.113 0.0563 0.0605 0.0511 0.0671 0.0978 0.126 0.207 0.0338 0.0835 0.284 0.109 0.0489 0.0353
0.132 0.052 0.102 0.0773 0.0375 0.2 0.0496 0.0269 0.268 0.0569 0.125 0.0408 0.071 0.0542 0.111 0.0601 0.0924 0.0987
0.063 0.0347 0.241 0.0557 0.0577 0.0535 0.117 0.0434 0.064 0.0338 0.0836 0.052 0.132 0.111 0.116 0.136 0.215 0.0585
0.0312 0.0405 0.0351 0.164 0.468 0.0987 0.0287 0.0298 0.0875 0.0494
"""


def test_a_fine_run_has_no_spikes_and_ten_times_the_loss_is_one(tmp_path: Path) -> None:
    losses, norms = ([float(text) for text in numbers.split()] for numbers in (QUICKSTART_LOSSES, QUICKSTART_NORMS))
    assert len(losses) == len(norms) == 150

    def spikes(step: int = 0, **changes: float) -> list[int]:
        """Steps that are spikes, where numbers of one step are changed."""
        detector, counts = SpikeDetector(window=128, sigma=6, run_dir=RunDirectory(tmp_path, writes=False)), [0.0]
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
            record = {"loss": loss, "grad_norm": norm} | (changes if number == step else {})
            counts.append(detector.check_step(number, record).get("spikes", 0.0))
        return [number for number in range(1, 151) if counts[number] > counts[number - 1]]

    assert spikes() == []
    for step in range(66, 151, 21):
        assert spikes(step, loss=10 * sum(losses) / 150) == [step]
        assert spikes(step, grad_norm=100 * sum(norms) / 150) == [step]


def test_a_spike_is_recorded_by_a_run(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, count = SFT.loss, iter(range(1, 100))

    def jumping(method: SFT, transformer: Any, batch: Any) -> Any:
        value, _ = loss(method, transformer, batch)
        value = value * 0 + (1000.0 if next(count) == 6 else 1.0)
        return value, {"loss": value.detach()}

    monkeypatch.setattr(SFT, "loss", jumping)
    done = run(**options(train_steps=7, spike_window=8, lr=0.0))
    assert [r.get("spikes") for r in done.metrics] == [None] * 5 + [1.0, 1.0]
    assert [e["step"] for e in done.events if e["event"] == "spike"] == [6]
    state = json.loads((done.root / "checkpoints" / "step-7" / "state.json").read_text())["guards"]["spikes"]
    assert (state["count"], len(state["loss"]), max(state["loss"]) < 2) == (1, 7, True)


def test_too_many_are_an_error(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1, 3, 4})
    with pytest.raises(NonFiniteError, match=r"; 3 steps .*--max_nonfinite_steps 2"):
        run(**options(train_steps=6, on_nonfinite="skip", max_nonfinite_steps=2))


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_weights_as_loaded_do_not_blame_the_learning_rate(policy: str, tmp_path: Path) -> None:
    def fail(*skipped: int, step: int) -> str:
        run_dir = RunDirectory(tmp_path, writes=False)
        guard = NonFiniteGuard(policy=policy, limit=len(skipped), loss_scaling=False, run_dir=run_dir)
        assert all(guard.choose_action(earlier, {"loss": math.nan}) == "skip" for earlier in skipped)
        with pytest.raises(NonFiniteError) as caught:
            guard.choose_action(step, {"loss": math.nan})
        return str(caught.value)

    assert "config files" in fail(step=1)
    assert "lower --lr" in fail(step=2)  # of a run, or resumed there
    if policy == "skip":
        assert "config files" in fail(1, step=2)
        assert "lower --lr" in fail(1, step=3)  # the second one was an update


def test_a_scaled_gradient_may_overflow(tmp_path: Path) -> None:
    """With fp16 it does at the start of every run, and the scaler takes care of it."""
    guard = NonFiniteGuard(policy="raise", limit=0, loss_scaling=True, run_dir=RunDirectory(tmp_path, writes=False))
    assert guard.choose_action(1, {"loss": 1.0, "grad_norm": math.inf}) == "update"
    with pytest.raises(NonFiniteError, match="loss inf"):
        guard.choose_action(1, {"loss": math.inf, "grad_norm": math.inf})


@pytest.mark.rotating
@pytest.mark.parametrize("changes", [{"precompute_conditions": True}, {"dataloader_num_workers": 1}, {}])
def test_a_run_goes_on_without_a_file_that_breaks_off(
    changes: dict[str, Any], options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Its header is whole, so that it is planned with; what is missing shows only when it is decoded."""
    decode = decoding.read_frames

    def breaks_off(path: Path, *rest: Any, **more: Any) -> torch.Tensor:
        if path.name == "1.mp4":
            raise InvalidSampleError(f"{path} ends early")
        return decode(path, *rest, **more)

    monkeypatch.setattr(decoding, "read_frames", breaks_off)
    values = options(train_steps=3, clips=3, **changes)
    done = run(**values)
    assert done.metrics[-1]["bad_samples"] == 1.0
    [event] = [e for e in done.events if e["event"] == "bad_sample"]
    assert event["file"].endswith("1.mp4")
    with pytest.raises((InvalidSampleError, CacheError), match=r"1\.mp4"):
        run(**{**values, "output_dir": str(tmp_path / "strict")}, max_bad_share=0.0)


def test_a_saturated_loss_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    detector = SpikeDetector(window=8, sigma=6, run_dir=RunDirectory(tmp_path, writes=False))
    for step in range(1, 20):
        detector.check_step(step, {"loss": 0.0, "grad_norm": 1e-3 if step < 5 else 0.0})
        assert len(caplog.records) == (step >= 12)  # once the window has nothing else
