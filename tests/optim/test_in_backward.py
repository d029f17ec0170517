"""An optimizer that steps in backward: the same weights bit for bit, no gradients left, and an exact resume."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from finetrainers.config.errors import Problem
from finetrainers.config.load import load_config
from finetrainers.config.sections import OptimizerSection
from finetrainers.memory.count import LiveStorages
from finetrainers.optim.factory import create_optimizer
from finetrainers.optim.in_backward import StepInBackward, get_step_in_backward
from finetrainers.optim.rules import optimizer_problems
from finetrainers.utils.failures import Kind


def trained(name: str, *, early: bool, at_once: int = 1) -> tuple[nn.Module, Any, list[torch.Tensor | None]]:
    """A small network after four steps; the optimizer, and the norm of each step's gradients."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    config = OptimizerSection(optimizer=name, lr=1e-2, max_grad_norm=0.0)
    optimizer = create_optimizer(network.parameters(), config=config, lr=1e-2, device_type="cpu")
    if early:
        StepInBackward(optimizer, at_once=at_once)
    norms: list[torch.Tensor | None] = []
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        network(x).square().mean().backward()
        stepper = get_step_in_backward(optimizer)
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients) if stepper is None else stepper.take_norm())
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in network.parameters())
    return network, optimizer, norms


@pytest.mark.parametrize("name", ["adamw", "adam", "adafactor"])
@pytest.mark.parametrize("at_once", [1, 6_000, 10**9])
def test_the_same_weights_state_and_norms(name: str, at_once: int) -> None:
    """One weight at a time, several together, and all after backward."""
    plain, expected, norms = trained(name, early=False)
    network, optimizer, found = trained(name, early=True, at_once=at_once)
    assert all(a.equal(b) for a, b in zip(network.parameters(), plain.parameters(), strict=True))
    theirs, ours = expected.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for place, state in theirs["state"].items():
        assert all(torch.as_tensor(ours["state"][place][key]).equal(torch.as_tensor(state[key])) for key in state)
    assert torch.stack(found).allclose(torch.stack(norms), rtol=1e-6)  # type: ignore[arg-type]


def test_the_network_is_freed_after_training() -> None:
    network, optimizer, _ = trained("adamw", early=True)
    weights = [weakref.ref(weight) for weight in network.parameters()]
    del network, optimizer
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)


def test_gradients_do_not_add_up_in_memory() -> None:
    def peak(early: bool) -> int:
        network = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        if early:
            StepInBackward(optimizer, at_once=1)
        x = torch.randn(1, 256)
        live = LiveStorages()
        live.add(network.parameters())
        weights = live.live
        with live:
            network(x).sum().backward()
            optimizer.step()
        return live.peak - weights

    weight = 4 * 256 * 256
    assert peak(False) >= 8 * weight
    assert peak(True) < 2 * weight


def test_a_pause_and_a_dropped_step_change_nothing() -> None:
    network = nn.Linear(4, 4)
    before = [p.detach().clone() for p in network.parameters()]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    stepper = StepInBackward(optimizer)
    with stepper.pause_updates():
        network(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    network(torch.ones(1, 4)).sum().backward()  # less than is stepped at once
    optimizer.zero_grad()
    optimizer.step()
    assert all(a.equal(b) for a, b in zip(network.parameters(), before, strict=True))
    assert stepper.take_norm() is not None
    assert stepper.take_norm() is None


FULL = {"training_type": "full-finetune", "optimizer_in_backward": True, "max_grad_norm": 0.0}


def problems(**changes: Any) -> list[Problem]:
    config = load_config(**{"model_name": "ltx_video", "pretrained_model_name_or_path": "x", **FULL, **changes})
    return optimizer_problems(config, device_type="cuda")[0]


@pytest.mark.parametrize(
    ("changes", "kind", "value"),
    [
        ({"training_type": "lora"}, "conflict", "full-finetune"),
        ({"max_grad_norm": 1.0}, "conflict", "--max_grad_norm 0"),
        ({"fsdp": "full"}, "conflict", "--fsdp full"),
        ({"optimizer": "prodigy"}, "unsupported", "--optimizer prodigy "),
        ({"mixed_precision": "fp16"}, "conflict", "--mixed_precision bf16"),
        ({"on_nonfinite": "skip"}, "conflict", "--on_nonfinite rollback or raise"),
        ({"oom_retry": "on"}, "conflict", "--oom_retry on"),
        ({"use_cpu_offload_optimizer": True}, "conflict", "--offload_gradients,"),
    ],
)
def test_refused(changes: dict[str, Any], kind: Kind, value: str) -> None:
    assert problems() == []
    [problem] = problems(**changes)
    assert (problem.where, problem.kind) == ("--optimizer_in_backward", kind)
    assert value in problem.message
