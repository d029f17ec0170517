"""What the trainer asks of a single process; two processes are tested by launching them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from finetrainers.parallel.engine import Parallel
from finetrainers.utils.launch import launched_processes


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Parallel]:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)

    def build(**changes: Any) -> Parallel:
        arguments: dict[str, Any] = {
            "mixed_precision": None,
            "fallback_precision": "no",
            "accumulation": 1,
            "batch_size": 1,
            "max_grad_norm": 1.0,
            "timeout_s": 60,
        }
        return Parallel(**{**arguments, **changes})

    return build


def test_alone(make: Callable[..., Parallel]) -> None:
    parallel = make()
    assert (parallel.rank, parallel.world_size, parallel.is_main) == (0, 1, True)
    assert (parallel.is_deepspeed, parallel.is_fsdp, parallel.is_sharded) == (False, False, False)
    assert parallel.describe().startswith("1 process (no)")
    assert parallel.gather_objects([1, 2]) == [1, 2]
    assert parallel.same_on_all({"a": 1}) == {"a": 1}
    assert parallel.mean({"b": torch.tensor(2.0), "a": torch.tensor([1.0])}) == {"a": 1.0, "b": 2.0}
    assert torch.equal(parallel.sum(torch.tensor([1.0, 2.0])).cpu(), torch.tensor([1.0, 2.0]))
    parallel.raise_if_any_failed(None, "nothing")
    with pytest.raises(KeyError, match="mine"):
        parallel.raise_if_any_failed(KeyError("mine"), "something")
    parallel.close()


def test_processes_that_do_not_see_each_other_are_refused(
    make: Callable[..., Parallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As accelerate leaves the processes of a launcher that it does not recognise: each would train on its own."""
    real = Parallel.__init__.__globals__["Accelerator"]

    def alone(**arguments: Any) -> Any:
        monkeypatch.delenv("WORLD_SIZE")
        accelerator = real(**arguments)
        monkeypatch.setenv("WORLD_SIZE", "2")
        return accelerator

    monkeypatch.setattr("finetrainers.parallel.engine.Accelerator", alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched_processes() == 2
    with pytest.raises(RuntimeError, match="started 2 processes, but this one sees 1"):
        make()


@pytest.mark.parametrize(
    ("asked", "launcher", "fallback", "expected"),
    [
        (None, None, "bf16", "bf16"),  # no launcher: the fallback
        (None, "no", "bf16", "no"),  # the launcher's word counts more
        ("bf16", "no", "no", "bf16"),  # and the user's most
        (None, None, "no", "no"),
    ],
)
def test_precision(
    asked: str | None,
    launcher: str | None,
    fallback: str,
    expected: str,
    make: Callable[..., Parallel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process may hold one run after another, each with its own precision."""
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    parallel = make(mixed_precision=asked, fallback_precision=fallback)
    assert parallel.accelerator.mixed_precision == expected
    computed = torch.bfloat16 if expected == "bf16" else torch.float32
    assert parallel.compute_dtype(torch.float32) == computed


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_the_norm_of_sharded_gradients_is_a_plain_number(max_grad_norm: float, make: Callable[..., Parallel]) -> None:
    """FSDP2's gradients are shards, and so is their norm, which no other collective takes."""
    parallel = make(max_grad_norm=max_grad_norm)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        network = nn.Linear(2, 1, bias=False)
        fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
        parallel._parameters = list(network.parameters())
        network(torch.tensor([[3.0, 4.0]])).sum().backward()
        assert isinstance(parallel._parameters[0].grad, DTensor)
        norm = parallel.clip()
        assert norm is not None
        assert not isinstance(norm, DTensor)
        assert parallel.mean({"grad_norm": norm}) == {"grad_norm": pytest.approx(5.0)}
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_a_step_of_two_micro_batches(max_grad_norm: float, make: Callable[..., Parallel]) -> None:
    """Losses add up, the norm is that of the sum, and the clipped gradient has the norm that was asked for."""
    parallel = make(accumulation=2, max_grad_norm=max_grad_norm)
    network = nn.Linear(3, 1, bias=False)
    network.weight.data.zero_()
    frozen = nn.Linear(1, 1).requires_grad_(False)
    model, optimizer = parallel.prepare(nn.Sequential(network, frozen), lambda ps: torch.optim.SGD(ps, lr=1.0))
    assert [p.shape for p in parallel._parameters] == [(1, 3)]
    with torch.no_grad():
        frozen.weight.fill_(1.0)
    for x in (torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([[0.0, 4.0, 0.0]])):
        with parallel.accumulate(model):
            parallel.backward(model(x).sum())
    norm = parallel.clip()
    assert norm is not None
    assert norm.item() == pytest.approx(5.0)
    optimizer.step()
    scale = 0.1 if max_grad_norm else 1.0
    torch.testing.assert_close(network.weight.data, -scale * torch.tensor([[3.0, 4.0, 0.0]]), rtol=1e-4, atol=1e-6)
    assert parallel.unwrap(model)[0] is network
    assert set(parallel.full_state(model)) == {"0.weight", "1.weight", "1.bias"}
