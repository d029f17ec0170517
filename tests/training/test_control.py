"""Stopping: by signal in real processes, by file, at steps that can be continued; and nothing is lost by it."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_process import Python
from refusals import refused_options
from safetensors.torch import load_file

from finetrainers.cli.main import train_command
from finetrainers.config.load import load_config
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.runs.training import train
from finetrainers.training import control
from finetrainers.training.control import SIGNALS
from finetrainers.training.trainer import Trainer
from finetrainers.utils import exit_codes

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def flags_of(values: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in values.items():
        if value is True:
            flags.append(f"--{name}")
        else:
            flags += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return flags


def steps_taken(root: Path) -> int:
    file = root / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def test_a_signal_stops_the_run_and_resuming_changes_nothing(
    options: Callable[..., dict], run: Callable[..., Any], python: Python, tmp_path: Path
) -> None:
    changes = {"clips": 3, "train_steps": 30, "lora_dropout": 0.3, "use_ema": True, "caption_dropout_p": 0.5}
    straight = run(**options(**changes, output_dir=str(tmp_path / "straight")))

    values = options(**changes, output_dir=str(tmp_path / "stopped"))
    root = tmp_path / "stopped"
    process = python("train.py", *flags_of(values), "--dataloader_num_workers", "1")
    process.wait_until(lambda: steps_taken(root) >= 3)
    process.send_signal(signal.SIGSTOP)  # however fast its steps are, it is not done before it was looked at
    with refused_options(("--output_dir", "occupied")) as refusal:
        train(load_config(**values))
    assert f"(process {process.pid} on " in str(refusal.value)
    assert train_command(flags_of(values), prog="train.py") == exit_codes.CONFIGURATION
    process.signal_group(signal.SIGTERM)  # also to the worker that decodes, as Slurm does
    process.send_signal(signal.SIGCONT)
    assert process.wait() == exit_codes.STOPPED, process.stderr
    [stopped_at] = [found.step for found in scan_checkpoints(root)]
    assert stopped_at < 30
    assert steps_taken(root) == stopped_at
    events = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    last = {k: v for k, v in events[-1].items() if k != "time"}
    assert last == {"event": "stopped", "step": stopped_at, "by": "SIGTERM"}
    assert "SIGTERM: " in process.stderr
    # The command that is printed continues the run; here in this process.
    command = f"finetrainers train --config {root / 'config.toml'} --resume_from_checkpoint latest"
    assert f"to continue:\n  {command}\n" in process.stdout
    assert (process.stdout + process.stderr).count(command) == 1
    assert not (root / "pytorch_lora_weights.safetensors").exists()
    assert not (root / "control").exists()

    assert train_command(shlex.split(command)[2:], prog="finetrainers train") == exit_codes.DONE
    assert steps_taken(root) == 30
    curves = [
        [
            (r["step"], r["loss"], r["grad_norm"], r["lr"])
            for r in map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
        ]
        for place in (root, straight.root)
    ]
    assert curves[0] == curves[1]
    assert_same(root, straight.root)


def assert_same(ours: Path, theirs: Path) -> None:
    """The results of two runs, bit for bit."""
    a, b = (load_file(root / "pytorch_lora_weights.safetensors") for root in (ours, theirs))
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)


#: Stands still where no Python runs: a lock of the C library that is taken already.
_STUCK = """
import ctypes, signal, sys, time
from finetrainers.training.control import StopSignals
before = signal.getsignal(signal.SIGTERM)
signals = StopSignals(logs_signal=True)
with signals.listen():
    print("ready", flush=True)
    if sys.argv[1] == "stuck":
        library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        library.pthread_mutex_lock(lock)
        library.pthread_mutex_lock(lock)
    while signals.received is None:
        time.sleep(0.01)
assert signal.getsignal(signal.SIGTERM) is before
sys.exit(signals.received)
"""


def start(program: str, *arguments: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_first_signal_is_noted_and_the_second_ends_a_process_that_is_stuck() -> None:
    stuck = {number: start(_STUCK, "stuck") for number in SIGNALS}
    for number, process in stuck.items():
        waiting = start(_STUCK, "waits")
        waiting.send_signal(number)
        assert waiting.wait(20) == number
        for _ in range(2):  # as from a terminal and its launcher: one wish
            process.send_signal(number)
    time.sleep(1.2)
    for number, process in stuck.items():
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(20) == exit_codes.killed_by(number)
        assert process.stderr is not None
        assert f"{number.name} again: " in process.stderr.read()


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, *commands: str) -> None:
    """While a trainer takes this step, the user touches files."""
    take_step = Trainer.train_step

    def touching(trainer: Trainer, batches: Any) -> dict[str, float]:
        record = take_step(trainer, batches)
        if trainer.state.step == step:
            for command in commands:
                (trainer.state.run_dir.root / "control" / command).touch()
        return record

    monkeypatch.setattr(Trainer, "train_step", touching)


def names(events: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    return [(event["event"], event.get("step")) for event in events]


def test_files_ask_for_a_checkpoint_samples_and_the_end(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = options(
        train_steps=6, clips=2, eval_num_items=1, eval_steps=100, validation_prompts="a@@@9x64x64",
        validation_inference_steps=2,
    )  # fmt: skip
    # Samples change nothing of what is trained, whenever they are made.
    straight = run(**{**values, "output_dir": str(tmp_path / "straight"), "validation_inference_steps": 3})
    with monkeypatch.context() as patch:
        at_step(patch, 2, "save")
        at_step(patch, 3, "sample", "typo")
        at_step(patch, 5, "stop")
        stopped = run(**values)
    assert stopped.state.stopped_by == "control/stop"
    assert names(stopped.events) == [
        ("start", 0), ("memory_planned", 0), ("save_requested", None), ("checkpoint", 2), ("sample_requested", None),
        ("samples", 3), ("stop_requested", None), ("checkpoint", 5), ("memory", 5), ("stopped", 5),
    ]  # fmt: skip
    assert [r["step"] for r in stopped.metrics if "eval_loss" in r] == [0, 3]
    assert [path.name for path in (stopped.root / "control").iterdir()] == ["typo"]
    (stopped.root / "control" / "stop").touch()  # too late for the run that it was meant for
    resumed = run(**values, resume_from_checkpoint="latest")
    assert resumed.state.stopped_by is None
    assert_same(resumed.root, straight.root)
    assert resumed.curve("loss") == straight.curve("loss")


def test_a_stop_at_the_last_step_is_the_end(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 2, "stop", "save")
    done = run(**options(train_steps=2))
    assert done.state.stopped_by is None
    assert done.weights
    assert not (done.root / "control").exists()


def test_reward_finetuning_stops_between_rollouts(
    tiny_repo: Callable[..., Path], tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\na cat\n")
    values = {
        "method": "grpo", "model_name": "ltx_video", "pretrained_model_name_or_path": str(tiny_repo("ltx_video")),
        "prompts": str(prompts), "reward": ["brightness"], "rollout_size": "9x64x64", "prompts_per_step": 2,
        "num_generations": 4, "batch_size": 4, "sampling_steps": 5, "transformer_dtype": "fp32", "vae_dtype": "fp32",
        "text_encoder_dtype": "fp32", "lr": 1e-2, "rank": 4, "lora_alpha": 8, "train_steps": 6,
        "updates_per_rollout": 2,
    }  # fmt: skip
    straight = run(**values, output_dir=str(tmp_path / "straight"))
    with monkeypatch.context() as patch:
        at_step(patch, 3, "stop", "save")
        stopped = run(**values, output_dir=str(tmp_path / "stopped"))
    assert (stopped.state.step, stopped.state.stopped_by) == (4, "control/stop")
    assert [found.step for found in scan_checkpoints(stopped.root) if found.damage is None] == [4]
    resumed = run(**values, output_dir=str(tmp_path / "stopped"), resume_from_checkpoint="latest")
    assert_same(resumed.root, straight.root)
    assert resumed.curve("loss", "reward/brightness") == straight.curve("loss", "reward/brightness")


def test_only_commands_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = control.ControlFiles(tmp_path)
    assert files.take() == set()
    with files.watched():
        (files.folder / "save").touch()
        (files.folder / "halt").touch()
        assert files.take() == {"save"}
        assert files.take() == set()
        assert [record.args for record in caplog.records] == [(files.folder / "halt", ", ".join(control.COMMANDS))]
        (files.folder / "halt").unlink()
    assert not files.folder.exists()


def test_commands_that_are_folders_and_a_folder_that_is_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = control.ControlFiles(tmp_path)
    with files.watched():
        (files.folder / "stop").mkdir()
        (files.folder / "save" / "inner").mkdir(parents=True)
        assert files.take() == {"stop", "save"}
        assert files.take() == set(), "a command counts once, also where it cannot be removed"
        assert [record.args for record in caplog.records] == [(files.folder / "save", os.strerror(errno.ENOTEMPTY))]
        (files.folder / "save" / "inner").rmdir()
        (files.folder / "save").rmdir()
        assert files.take() == set()
        (files.folder / "save").touch()
        assert files.take() == {"save"}
    assert not files.folder.exists()
    files.folder.touch()
    with files.watched():
        assert files.take() == set()
    assert caplog.records[-1].args == (files.folder, os.strerror(errno.EEXIST))
    assert files.folder.is_file()


def test_exit_codes_are_those_of_the_documentation() -> None:
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")}
    codes = [exit_codes.DONE, exit_codes.FAILED, exit_codes.CONFIGURATION, exit_codes.STOPPED, exit_codes.HUNG]
    codes += [exit_codes.killed_by(number) for number in SIGNALS]
    assert {str(code) for code in codes} <= rows
