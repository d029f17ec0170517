"""Runs that earlier versions have begun are continued by this one: state restored bit for bit, the same next steps.

Each directory next to this file is named after the commit that wrote it with `make.py`, and has in `expected.json` the
metrics of the three steps that followed there. On the machine that wrote them they are equal bit for bit; other
machines round differently.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_process import Python
from safetensors.torch import load_file
from upgrades.make import STOPPED_AT, TOTAL, machine, metrics

from finetrainers import Callback, TrainState, load_config, train
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.training.checkpoints.save import take_snapshot

HERE = Path(__file__).parent
VERSIONS = sorted(path.parent.name for path in HERE.glob("*/expected.json"))
RUNS = ["sft", "grpo", "dpo", "datasets", "stages/high"]
#: Runs that now compute otherwise, each with the relative error of what it was: preferences are compared per element
#: before the mean, to 8e-8 of the loss in float64, where means of errors were subtracted, to 4e-4.
CHANGED = {"dpo": 1e-3}
#: What a checkpoint holds that is not the same when it is written again: sizes and hashes of the files themselves.
WRITTEN_AGAIN = {"manifest.json"}


@pytest.fixture(params=VERSIONS)
def earlier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of what an earlier version left, which is the current directory."""
    copy = shutil.copytree(HERE / request.param, tmp_path / "earlier")
    monkeypatch.chdir(copy)
    return copy


def assert_continued(directory: Path, name: str) -> None:
    """Compare the three steps after the resume with those of the version that began the run, and keep the records
    before."""
    expected = json.loads((directory / "expected.json").read_text())
    run, is_same_machine = directory / "runs" / name, expected["machine"] == machine()
    continued = metrics(run, after=STOPPED_AT)
    assert [record["step"] for record in continued] == [*range(STOPPED_AT + 1, TOTAL + 1)]
    for record, wanted in zip(continued, expected["metrics"][name], strict=True):
        values = {key: record.get(key) for key in wanted}
        is_exact = is_same_machine and name not in CHANGED
        assert values == (wanted if is_exact else pytest.approx(wanted, rel=CHANGED.get(name, 1e-4), abs=1e-6))


class Restored(Callback):
    """Writes the restored state again before the first step, and compares it with the checkpoint."""

    def __init__(self, checkpoint: Path, again: Path) -> None:
        self.checkpoint, self.again, self.compared = checkpoint, again, 0

    def on_start(self, state: TrainState) -> None:
        self.again.mkdir()
        take_snapshot(state).write(self.again)
        for path in sorted(self.checkpoint.rglob("*")):
            copy = self.again / path.relative_to(self.checkpoint)
            if path.is_dir() or path.name in WRITTEN_AGAIN:
                continue
            if path.suffix == ".safetensors":
                assert_equal(load_file(copy), load_file(path))
            elif path.suffix == ".pt":
                assert_equal(torch.load(copy, weights_only=True), torch.load(path, weights_only=True))
            elif path.name == "state.json":
                assert_keeps(json.loads(copy.read_text()), json.loads(path.read_text()))
            self.compared += 1


def assert_equal(value: Any, expected: Any) -> None:
    """Compare nested containers of tensors bit for bit."""
    torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


def assert_keeps(value: Any, expected: Any) -> None:
    """Check that JSON has all that it had, with the same values; objects may have more."""
    if isinstance(expected, dict):
        assert expected.keys() <= value.keys()
        for key in expected:
            assert_keeps(value[key], expected[key])
    else:
        assert value == expected


@pytest.mark.parametrize("name", RUNS)
def test_run_continues_by_its_configuration(earlier: Path, name: str, tmp_path: Path) -> None:
    run = earlier / "runs" / name
    begun = (run / "metrics.jsonl").read_text().splitlines()
    cached = {path: path.stat().st_mtime_ns for path in (run / "precomputed").rglob("*.safetensors")}
    assert [found.damage for found in scan_checkpoints(run)] == [None, None] if name == "sft" else [None]
    restored = Restored(run / "checkpoints" / f"step-{STOPPED_AT}", tmp_path / "again")
    config = load_config(f"runs/{name}/config.toml", resume_from_checkpoint="latest")
    result = train(config, callbacks=[restored])
    assert result.step == TOTAL
    assert restored.compared >= 3
    assert_continued(earlier, name)
    assert (run / "metrics.jsonl").read_text().splitlines()[: len(begun)] == begun
    assert {path: path.stat().st_mtime_ns for path in (run / "precomputed").rglob("*.safetensors")} == cached


@pytest.mark.rotating
@pytest.mark.parametrize("name", RUNS)
def test_run_continues_by_the_command_that_began_it(earlier: Path, name: str, python: Python) -> None:
    expected = json.loads((earlier / "expected.json").read_text())
    command = ["-m", "finetrainers", *expected["commands"][name], *expected["resume"][name]]
    output = python.launch(*command, timeout=90, cwd=earlier)
    assert (earlier / "runs" / name / "pytorch_lora_weights.safetensors").is_file(), output
    assert_continued(earlier, name)
