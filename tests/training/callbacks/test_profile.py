"""Profiles of steps: the files of a run, the steps in them, the memory of an OOM, and refused ranges."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused_options

from finetrainers.config.load import load_config
from finetrainers.plan.ready import get_ready
from finetrainers.rundir.run_dir import RunDirectory
from finetrainers.training.callbacks.profile import StepProfile
from finetrainers.training.guards.memory import OutOfMemory

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling")


def labels(trace: Path) -> Counter[str]:
    """The labels of the training loop in a trace, with the number of times that each is there."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_a_run_profiles_its_steps(
    options: Callable[..., dict], run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    profiled = run(**options(train_steps=4, profile_steps="2:3", gradient_accumulation_steps=2))
    directory = profiled.root / "profile"
    name = "steps-2-3-rank-0"
    assert sorted(path.name for path in directory.iterdir()) == [f"{name}.json.gz", f"{name}.txt"]
    expected = {"loss": 4, "backward": 4, "exchange and clip": 2, "update weights": 2}
    assert {
        label: count for label, count in labels(directory / f"{name}.json.gz").items() if label in expected
    } == expected
    assert "aten::" in (directory / f"{name}.txt").read_text()
    [event] = [event for event in profiled.events if event["event"] == "profile"]
    assert (event["step"], event["path"]) == (3, str(directory))
    assert ["profile", str(directory)] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.rotating
def test_a_failure_leaves_the_profile_so_far(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FINETRAINERS_FAULT", "oom@loss:2+")
    with pytest.raises(OutOfMemory):
        run(**options(train_steps=3, profile_steps="1:3"))
    [trace] = (tmp_path / "run" / "profile").glob("*.json.gz")
    assert labels(trace)["backward"] == 1


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that record the memory of a GPU."""
    calls: list[Any] = []
    recorder = torch.cuda.memory
    monkeypatch.setattr(recorder, "_record_memory_history", lambda enabled="all", stacks="": calls.append(enabled))
    monkeypatch.setattr(recorder, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    return calls


def gpu_state(root: Path, *, step: int = 0) -> Any:
    parallel = SimpleNamespace(device=torch.device("cuda"), rank=1)
    return SimpleNamespace(step=step, total_steps=9, parallel=parallel, run_dir=RunDirectory(root, writes=True))


def test_memory_of_a_gpu_is_recorded_from_the_first_step(memory: list[Any], tmp_path: Path) -> None:
    profiler, state = StepProfile((3, 4)), gpu_state(tmp_path)
    profiler.on_start(state)
    assert memory == ["all"]
    for state.step in range(1, 9):
        profiler.on_step(state)
        assert len(memory) == (1 if state.step < 4 else 3)
    profiler.on_stop(state)
    assert memory == ["all", "steps-3-4-rank-1.pickle", None]
    assert (tmp_path / "profile" / "steps-3-4-rank-1.json.gz").is_file()


@pytest.mark.parametrize("step", [0, 3])
def test_an_oom_leaves_a_snapshot(step: int, memory: list[Any], tmp_path: Path) -> None:
    """Until the profiled steps are over."""
    profiler, state = StepProfile((2, 5)), gpu_state(tmp_path, step=step)
    profiler.on_start(state)
    try:
        raise OutOfMemory("out of memory while training")
    except OutOfMemory:
        profiler.on_stop(state)
    assert memory == ["all", "out-of-memory-steps-2-5-rank-1.pickle", None]


def test_steps_that_are_not_trained_are_not_profiled(
    memory: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler, state = StepProfile((3, 5)), gpu_state(tmp_path, step=5)
    profiler.on_start(state)
    profiler.on_step(state)
    profiler.on_stop(state)
    assert memory == []
    assert not (tmp_path / "profile").exists()
    assert len(caplog.records) == 1


def test_ranges(options: Callable[..., dict]) -> None:
    for text, steps in {"3:5": (3, 5), "3": (3, 3), 2: (2, 2)}.items():
        assert load_config(**options(train_steps=9, profile_steps=text)).run.profile_steps == steps
    for text in ("5:3", "0:2", "3-5", "a", "3:5:7", "1" * 5000):
        with refused_options(("profile_steps", "invalid")):
            load_config(**options(profile_steps=text))
    with refused_options(("--profile_steps", "conflict")):
        get_ready(load_config(**options(train_steps=4, profile_steps="3:5")))
