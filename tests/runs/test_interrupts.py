"""Interrupts and requests in a host program: nothing that can be saved is lost, and handlers are restored."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetrainers import Callback, ConfigError, TrainResult, TrainState, load_config, train
from finetrainers.methods.registry import load_method
from finetrainers.methods.sft import SFT
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.training import control
from finetrainers.training.trainer import Trainer

OPTIONS = {"clips": 2, "train_steps": 4, "lora_dropout": 0.3, "use_ema": True, "checkpointing_steps": 0}


class At(Callback):
    """Calls functions in hooks, once each: `At(on_log=(2, function))` at step 2, with the state."""

    def __init__(self, **calls: tuple[int, Callable[[TrainState], None]]) -> None:
        self.calls = calls

    def _call(self, hook: str, state: TrainState) -> None:
        step, function = self.calls.get(hook, (-1, None))
        if step == state.step and function is not None:
            del self.calls[hook]  # records come more than once a step
            function(state)

    def on_start(self, state: TrainState) -> None:
        self._call("on_start", state)

    def on_log(self, state: TrainState, record: dict[str, float]) -> None:
        self._call("on_log", state)

    def on_step(self, state: TrainState) -> None:
        self._call("on_step", state)


def interrupt(state: TrainState | None = None) -> None:
    """Press Ctrl-C; Python's handler raises an exception at the next instruction."""
    signal.raise_signal(signal.SIGINT)


def wait_until_noted(state: TrainState) -> None:
    while state.requests.signals.received is None:
        time.sleep(0.01)


def steps_saved(root: Path) -> list[int]:
    return sorted(found.step for found in scan_checkpoints(root) if found.damage is None)


def events(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]


def results(result: TrainResult) -> tuple[list[float], dict[str, list[float]]]:
    """The losses of all steps and the trained weights."""
    assert result.weights is not None
    weights = {name: tensor.flatten().tolist() for name, tensor in load_file(result.weights).items()}
    return [record["loss"] for record in result.metrics], weights


@pytest.fixture
def host_signals() -> Any:
    """A host with handlers and an event loop's descriptor; gives what arrives there."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR2)}
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    current = {number: signal.getsignal(number) for number in handlers}
    yield reader
    assert {number: signal.getsignal(number) for number in handlers} == current
    assert signal.set_wakeup_fd(before) == writer.fileno()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    reader.close()
    writer.close()


def test_an_interrupt_saves_what_can_be_saved(
    options: Callable[..., dict],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host_signals: socket.socket,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    straight = results(train(load_config(**options(**OPTIONS, output_dir=str(tmp_path / "straight")))))

    # The run handles the signal: it ends in order. A signal of the host's own still reaches its event loop.
    def interrupt_and_signal(state: TrainState) -> None:
        signal.raise_signal(signal.SIGUSR2)
        interrupt()
        wait_until_noted(state)

    handled = options(**OPTIONS, output_dir=str(tmp_path / "handled"))
    stopped = train(load_config(**handled), callbacks=[At(on_log=(2, interrupt_and_signal))])
    assert (stopped.step, stopped.stopped_by, stopped.weights) == (2, "SIGINT", None)
    assert steps_saved(stopped.run_dir) == [2]
    assert bytes([signal.SIGUSR2]) in host_signals.recv(64)
    assert "train(load_config(" in capsys.readouterr().out
    with pytest.raises(ConfigError) as refusal:  # the cell of a notebook, run again
        train(load_config(**handled))
    assert "resume_from_checkpoint" in str(refusal.value)
    assert results(train(load_config(**handled, resume_from_checkpoint="latest"))) == straight

    # The host handles it: Python's exception comes in the middle of the third step.
    values = options(**OPTIONS, output_dir=str(tmp_path / "raised"))
    with monkeypatch.context() as patch:
        interrupted_loss(patch, step=3)
        with pytest.raises(KeyboardInterrupt):
            train(load_config(**values), handle_signals=False)
    assert steps_saved(tmp_path / "raised") == [2]
    last = events(tmp_path / "raised")[-1]
    assert (last["event"], last["step"], last["by"]) == ("stopped", 2, "KeyboardInterrupt")
    assert results(train(load_config(**values, resume_from_checkpoint="latest"))) == straight

    # In the middle of an update there is no state to save; what is lost is logged.
    def exit_in_update(state: TrainState) -> None:
        monkeypatch.setattr(state.optimizer, "step", lambda: exit("a handler of the host's"))

    values = options(**OPTIONS, output_dir=str(tmp_path / "torn"))
    with pytest.raises(SystemExit):
        train(load_config(**values), handle_signals=False, callbacks=[At(on_log=(2, exit_in_update))])
    assert steps_saved(tmp_path / "torn") == []
    assert re.search("steps 1 to 2 .*: weights ", caplog.text)


@pytest.mark.parametrize("changes", [{"method": "grpo", "selective_rollouts": 0.5}, {"method": "nft"}])
def test_an_interrupt_within_a_rollout_saves_the_step_before(
    changes: dict[str, Any],
    options: Callable[..., dict],
    tmp_path: Path,
    host_signals: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of clips with shared starts, when the older policy has moved or prompts were skipped for the next rollout."""
    values = options(
        reward=["brightness"], rollout_size="9x64x64", prompts_per_step=1, num_generations=2, batch_size=2,
        sampling_steps=4, window_size=1, window_range=[0.5, 1.0], train_steps=4, checkpointing_steps=0,
        old_policy_decay=[0.0, 1.0, 0.5], **changes,
    )  # fmt: skip
    del values["data_root"], values["video_resolution_buckets"]
    prompts = ["a ball", "a cube"]
    if changes["method"] == "grpo":
        del values["old_policy_decay"]
    straight = train(load_config(**values), prompts=prompts)
    values["output_dir"] = str(tmp_path / "interrupted")
    with monkeypatch.context() as patch:
        interrupted_loss(patch, load_method(changes["method"]), step=3)
        with pytest.raises(KeyboardInterrupt):
            train(load_config(**values), prompts=prompts, handle_signals=False)
    assert steps_saved(tmp_path / "interrupted") == [2]
    resumed = train(load_config(**values, resume_from_checkpoint="latest"), prompts=prompts)
    assert results(resumed) == results(straight)


def interrupted_loss(patch: pytest.MonkeyPatch, method: Any = SFT, *, step: int) -> None:
    """Press Ctrl-C before a loss of a step is computed."""
    loss, train_step = method.loss, Trainer.train_step
    steps: list[int] = []

    def note(trainer: Trainer, *arguments: Any) -> Any:
        steps.append(trainer.state.step + 1)
        return train_step(trainer, *arguments)

    def loss_of(self: Any, transformer: Any, batch: Any) -> Any:
        if steps[-1] == step:
            interrupt()
        return loss(self, transformer, batch)

    patch.setattr(Trainer, "train_step", note)
    patch.setattr(method, "loss", loss_of)


@pytest.mark.timeout(300)
def test_a_second_interrupt_ends_the_run_at_once_and_threads_leave_signals_alone(
    options: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_signals: socket.socket
) -> None:
    monkeypatch.setattr(control, "_SAME_REQUEST_S", 0.0)

    def interrupt_twice(state: TrainState) -> None:
        interrupt()
        wait_until_noted(state)
        interrupt()
        time.sleep(3600)  # a system call that ends by the signal alone

    values = options(**OPTIONS, output_dir=str(tmp_path / "twice"))
    with pytest.raises(KeyboardInterrupt):
        train(load_config(**values), callbacks=[At(on_log=(2, interrupt_twice))])
    assert steps_saved(tmp_path / "twice") == []

    errors: list[Exception] = []
    steps: list[int] = []

    def in_thread() -> None:
        try:
            train(load_config(**options(train_steps=1, output_dir=str(tmp_path / "refused"))), handle_signals=True)
        except ValueError as error:
            errors.append(error)
        steps.append(train(load_config(**options(train_steps=1, output_dir=str(tmp_path / "thread")))).step)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert steps == [1]
    assert not (tmp_path / "refused").exists()


def test_requests_of_every_hook_are_honored(options: Callable[..., dict], tmp_path: Path) -> None:
    def request(name: str, value: Any = True) -> Callable[[TrainState], None]:
        return lambda state: setattr(state.requests, name, value)

    values = options(
        clips=2, train_steps=6, checkpointing_steps=0, validation_prompts="a@@@9x64x64", validation_inference_steps=2
    )
    result = train(
        load_config(**values),
        callbacks=[
            At(on_start=(0, request("save")), on_log=(3, request("sample")), on_step=(2, request("save"))),
            At(on_log=(3, request("save")), on_step=(4, request("sample"))),
            At(on_step=(5, request("stop", "enough"))),
        ],
    )
    assert (result.step, result.stopped_by) == (5, "enough")
    # Of those in `on_step`, a save and a stop act at this step, samples after the next one.
    kinds = [
        (e["event"], e["step"]) for e in events(result.run_dir) if e["event"] in ("checkpoint", "samples", "stopped")
    ]
    assert kinds == [
        ("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 3), ("samples", 3), ("samples", 5), ("checkpoint", 5),
        ("stopped", 5),
    ]  # fmt: skip


def test_lines_are_printed_once_in_a_notebook(
    options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels do
    monkeypatch.setattr(logging.root, "handlers", [])
    warns = At(on_log=(1, lambda _: logging.getLogger("finetrainers.test").warning("a warning")))
    result = train(load_config(**options(train_steps=1, train_log=True)), callbacks=[warns])
    (printed, errors), logged = capsys.readouterr(), (result.run_dir / "train.log").read_text()
    assert (errors.count("a warning"), logged.count("a warning")) == (1, 1)
    assert logging.root.handlers == []
    for line in ("done; results:", "step 1/1", "peak memory, GiB"):
        assert (printed.count(line), logged.count(line)) == (1, 1)
    assert "\x1b" not in logged
