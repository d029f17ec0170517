"""A run whose activation memory changes between steps is the run without, bit for bit; the plans and lines of auto."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.memory.activation_plan import LAUNCH_S, Machine
from finetrainers.memory.estimate import GIB
from finetrainers.methods.sft import SFT
from finetrainers.plan import automatic
from finetrainers.plan.automatic import choose_settings
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.preflight import preflight
from finetrainers.runs.training import train
from finetrainers.training import activation_memory
from finetrainers.training.activation_memory import ActivationPlanner, activation_planner

GIVEN = {"clips": 3, "batch_size": 1, "gradient_accumulation_steps": 2, "train_steps": 3, "checkpointing_steps": 1}
CHANGES = "activation_memory"


def slightly_more(planner: ActivationPlanner) -> float:
    """A peak above the planned one, before the optimizer has its state."""
    model = planner._model
    plan = model.plan(planner.choice.stored, planner.choice.number)
    return 1.005 * planner.choice.device - model.others - GIB * plan.parts["optimizer state"]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Of all checkpoints and the results."""
    files = [path for path in directory.rglob("*.safetensors") if "precomputed" not in path.parts]
    return {f"{p.relative_to(directory)} {n}": t for p in files for n, t in load_file(p).items()}


@pytest.mark.rotating
def test_a_plan_that_changes_between_steps_changes_no_bit(
    options: Callable[..., dict], run: Callable[..., Any], tiny_repo: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """First an OOM, then a measured peak, which is larger than planned; resumed with another setting."""
    model = str(tiny_repo("ltx_video", layers=6))
    given = options(**GIVEN, pretrained_model_name_or_path=model)
    plain = run(**{**given, "output_dir": str(tmp_path / "plain")}, activation_memory="checkpoint")
    capsys.readouterr()

    planners: list[ActivationPlanner] = []
    monkeypatch.setattr(automatic, "_machine", lambda *_: Machine(2**40, 2**40, 1e9, 1.0))
    monkeypatch.setattr(activation_memory, "measured_peak", lambda _: slightly_more(planners[0]))
    init, loss, calls = ActivationPlanner.__init__, SFT.loss, []

    def noted(self: ActivationPlanner, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        planners.append(self)

    def limited(self: SFT, transformer: Any, batch: Any) -> Any:
        found = loss(self, transformer, batch)
        calls.append(planners[0].choice.what)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return found

    monkeypatch.setattr(ActivationPlanner, "__init__", noted)
    monkeypatch.setattr(SFT, "loss", limited)
    auto = {**given, "activation_memory": "auto", "memory_budget": 100, "output_dir": str(tmp_path / "auto")}
    found = run(**auto)
    [planner] = planners
    assert calls[:2] == ["none"] * 2
    assert len(set(calls)) == 3, calls
    assert calls[2] == calls[3] != calls[4] == calls[-1]
    changes = [(event["step"], event["why"].split()[0]) for event in found.events if event["event"] == CHANGES]
    assert changes == [(0, "out"), (0, "measured")]
    assert not [event for event in found.events if event["event"] == "out_of_memory"], "no micro-batch is halved"
    out = capsys.readouterr().out
    assert "activation memory: none: " in out
    assert re.findall(r"^activation memory, (\w+)", out, re.MULTILINE) == ["out", "measured"]
    assert planner.machine.flops != 1e9
    assert found.curve("loss", "grad_norm") == plain.curve("loss", "grad_norm")
    ours, theirs = tensors(tmp_path / "auto"), tensors(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert 'activation_memory = "auto"' in (tmp_path / "auto" / "config.toml").read_text()

    monkeypatch.setattr(SFT, "loss", loss)
    more = {"output_dir": str(tmp_path / "plain"), "resume_from_checkpoint": "2", "activation_memory": "auto"}
    assert run(**{**given, **more}).steps_done == 1  # without a budget, on a CPU
    assert re.search(r"^activation memory: none, .*CPU", capsys.readouterr().out, re.MULTILINE)
    resumed = tensors(tmp_path / "plain")
    assert all(torch.equal(resumed[name], ours[name]) for name in ours)


def test_micro_batches_are_halved_when_nothing_is_left_to_recompute(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "_machine", lambda *_: Machine(0.0, 0.0, 1e9, 1.0))
    loss, sizes = SFT.loss, []

    def limited(self: SFT, transformer: Any, batch: Any) -> Any:
        sizes.append(len(batch))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss(self, transformer, batch)

    monkeypatch.setattr(SFT, "loss", limited)
    found = run(**options(clips=2, batch_size=2, train_steps=1, activation_memory="auto", memory_budget=100))
    assert sizes == [2, 1, 1]
    assert [event["event"] for event in found.events if event["event"] in ("out_of_memory", CHANGES)] == [
        "out_of_memory"
    ]


def test_what_ranks_with_gpus_plan_for(
    options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The least memory, rate and bandwidth of all; the budget counts what is loaded already."""
    other = (8 * GIB, 3 * GIB, 5e12, 7e9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (23 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(automatic, "link_bandwidth", lambda _: 50e9)
    monkeypatch.setattr(automatic, "read_host_memory", lambda: SimpleNamespace(available=80 * GIB))
    checked = preflight(load_config(**options(activation_memory="auto")))
    memory = RunMemory(checked)
    planned = memory.plan().other_networks
    assert planned > 0

    def machine(*shares: Any, **options: Any) -> Machine:
        """Beyond what other networks are planned to take."""
        parallel: Any = SimpleNamespace(device=torch.device("cuda"), gather_objects=lambda one: [*one, *shares])
        section = checked.config.memory.model_copy(update=options)
        found = automatic._machine(checked.config.model_copy(update={"memory": section}), memory, parallel)
        return replace(found, device=round(found.device - planned))

    assert machine() == pytest.approx(Machine(20 * GIB, 60 * GIB, 0.4 * 989.4e12, 50e9, LAUNCH_S))
    assert machine(other) == pytest.approx(Machine(8 * GIB, 3 * GIB, 5e12, 7e9, LAUNCH_S))
    # Of 13.8 GiB tensors may take 12.
    assert machine(memory_budget=13.8) == pytest.approx(Machine(10 * GIB, 60 * GIB, 0.4 * 989.4e12, 50e9, LAUNCH_S))

    monkeypatch.setattr(automatic, "_machine", lambda *_: Machine(1e5, 0.0, 1e12, 1e9))
    parallel: Any = SimpleNamespace(device=torch.device("cuda"), weights_are_movable=True)
    config, found = choose_settings(checked, parallel)
    planner = activation_planner(checked, found, parallel.device)
    assert planner is not None
    assert not planner.choice.fits
    assert config.memory.activation_memory == "checkpoint"
    out = capsys.readouterr().out
    assert re.search(r"^activation memory: checkpoint .* 2 blocks: .* missing$", out, re.MULTILINE)
    assert re.search(r"^warning: .* planned ", out, re.MULTILINE)


def test_sharing_out_blocks_is_refused(options: Callable[..., dict]) -> None:
    with pytest.raises(ConfigError, match=r"--selective_checkpointing: .* --activation_memory auto"):
        preflight(load_config(**options(activation_memory="auto", selective_checkpointing=0.5)))


def test_a_dry_run_says_what_would_be_chosen(options: Callable[..., dict], capsys: pytest.CaptureFixture[str]) -> None:
    train(load_config(**options(activation_memory="auto", dry_run=True)))
    assert "--activation_memory auto: no GPU " in capsys.readouterr().out
    train(load_config(**options(activation_memory="auto", dry_run=True, memory_budget=24)))
    out = capsys.readouterr().out
    assert "125 TFLOP/s" in out
    assert "  none\n  " in out
