"""What the trainer asks of a single process; two processes are tested by launching them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from finetrainers.config.load import load_config
from finetrainers.config.parallel import ParallelSection
from finetrainers.config.root import TrainConfig
from finetrainers.parallel.ddp import DDP
from finetrainers.parallel.fsdp import FSDP
from finetrainers.parallel.ranks import DistributedContext
from finetrainers.parallel.strategy import Strategy
from finetrainers.parallel.zero import ZeRO
from finetrainers.utils.launch import launched_processes


def config_for(**options: Any) -> TrainConfig:
    given = {"model_name": "ltx_video", "pretrained_model_name_or_path": "x", "transformer_dtype": "fp32"}
    return load_config(**{**given, **options})


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Strategy]:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)

    def build(**changes: Any) -> Strategy:
        config = config_for(**changes)
        return DDP(config, config.parallel)

    return build


def test_alone(make: Callable[..., Strategy]) -> None:
    parallel = make()
    assert (parallel.rank, parallel.world_size, parallel.is_main) == (0, 1, True)
    assert (parallel.data_rank, parallel.data_size) == (0, 1)
    assert not parallel.forward_is_collective
    assert parallel.why_no_retry is None
    assert parallel.describe().startswith("1 process ")
    assert " cpu, " in parallel.describe()
    assert parallel.gather_objects([1, 2]) == [1, 2]
    assert parallel.broadcast_object({"a": 1}) == {"a": 1}
    assert parallel.mean({}) == {}
    found = parallel.mean({"c": torch.tensor(2.0), "a": torch.tensor([1.0]), "b": 0.1, "d": 3})
    assert list(found.items()) == [("a", 1.0), ("b", torch.tensor(0.1).item()), ("c", 2.0), ("d", 3.0)]
    assert torch.equal(parallel.sum(torch.tensor([1.0, 2.0])).cpu(), torch.tensor([1.0, 2.0]))
    parallel.raise_if_any_failed(None, "nothing")
    with pytest.raises(KeyError, match="mine"):
        parallel.raise_if_any_failed(KeyError("mine"), "something")
    parallel.close()


def test_processes_that_do_not_see_each_other_are_refused(
    make: Callable[..., Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As accelerate leaves the processes of a launcher that it does not recognize: each would train on its own."""
    real = Strategy._join.__globals__["Accelerator"]

    def alone(**arguments: Any) -> Any:
        monkeypatch.delenv("WORLD_SIZE")
        accelerator = real(**arguments)
        monkeypatch.setenv("WORLD_SIZE", "2")
        return accelerator

    monkeypatch.setattr("finetrainers.parallel.strategy.Accelerator", alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched_processes() == 2
    with pytest.raises(RuntimeError, match=r"\b2 processes, .*\b1: .*ACCELERATE_USE_CPU"):
        make()


@pytest.mark.parametrize(
    ("asked", "launcher", "fallback", "expected"),
    [
        (None, None, "bf16", "bf16"),  # no launcher: the fallback
        (None, "no", "bf16", "no"),  # the launcher's word counts more
        ("bf16", "no", "fp32", "bf16"),  # and the user's most
        (None, None, "fp32", "no"),
    ],
)
def test_precision(
    asked: str | None,
    launcher: str | None,
    fallback: str,
    expected: str,
    make: Callable[..., Strategy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process may hold one run after another, each with its own precision."""
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    parallel = make(mixed_precision=asked, transformer_dtype=fallback)
    assert parallel.accelerator.mixed_precision == expected
    computed = torch.bfloat16 if expected == "bf16" else torch.float32
    assert parallel.compute_dtype(torch.float32) == computed


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_the_norm_of_sharded_gradients_is_a_plain_number(max_grad_norm: float, make: Callable[..., Strategy]) -> None:
    """FSDP2's gradients are shards, and so is their norm, which no other collective takes."""
    parallel = make(max_grad_norm=max_grad_norm)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        network = nn.Linear(2, 1, bias=False)
        fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
        parallel._parameters = list(network.parameters())
        network(torch.tensor([[3.0, 4.0]])).sum().backward()
        assert isinstance(parallel._parameters[0].grad, DTensor)
        norm = parallel.clip_grad_norm()
        assert norm is not None
        assert not isinstance(norm, DTensor)
        assert parallel.mean({"grad_norm": norm}) == {"grad_norm": pytest.approx(5.0)}
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_a_step_of_two_micro_batches(max_grad_norm: float, make: Callable[..., Strategy]) -> None:
    """Losses add up, the norm is that of the sum, and the clipped gradient has the norm that was asked for."""
    parallel = make(gradient_accumulation_steps=2, max_grad_norm=max_grad_norm)
    network = nn.Linear(3, 1, bias=False)
    network.weight.data.zero_()
    frozen = nn.Linear(1, 1).requires_grad_(False)
    model, optimizer = parallel.prepare(lambda: nn.Sequential(network, frozen), lambda ps: torch.optim.SGD(ps, lr=1.0))
    assert [p.shape for p in parallel._parameters] == [(1, 3)]
    with torch.no_grad():
        frozen.weight.fill_(1.0)
    for x in (torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([[0.0, 4.0, 0.0]])):
        with parallel.accumulate(model):
            parallel.backward(model(x).sum())
    norm = parallel.clip_grad_norm()
    assert norm is not None
    assert norm.item() == pytest.approx(5.0)
    optimizer.step()
    scale = 0.1 if max_grad_norm else 1.0
    torch.testing.assert_close(network.weight.data, -scale * torch.tensor([[3.0, 4.0, 0.0]]), rtol=1e-4, atol=1e-6)
    assert parallel.unwrap(model)[0] is network
    assert set(parallel.full_state(model)) == {"0.weight", "1.weight", "1.bias"}


class Network(nn.Module):
    """Two blocks and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.frozen(x)


@pytest.mark.parametrize(("offload", "expected"), [(True, "cpu"), (False, "cuda")])
def test_an_optimizer_of_weights_on_the_host_is_there_too(
    offload: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory probe must not hold room on the device for a state that never comes there."""
    monkeypatch.setattr(DistributedContext, "device", torch.device("cuda"))
    parallel = object.__new__(FSDP)
    parallel._options = ParallelSection(fsdp_cpu_offload=offload)
    assert parallel.optimizer_device.type == expected


@pytest.mark.parametrize(("sync_each_batch", "launcher"), [(False, "AOT_EAGER"), (True, "NO")])
def test_fsdp_steps_as_the_network_alone_does(
    sync_each_batch: bool, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled blocks, two micro-batches, clipping, and a state that goes out and in again.

    Either the launcher asks for compiling, or blocks are compiled as they are loaded (`--compile regional`).
    """
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", launcher)
    torch.manual_seed(0)
    alone = Network()
    split = copy.deepcopy(alone)
    if launcher == "NO":
        for block in split.blocks:
            block.compile(backend="aot_eager", dynamic=False)  # type: ignore[operator]
    batches = torch.randn(2, 3, 4)
    optimizer = torch.optim.AdamW(list(alone.blocks.parameters()), lr=0.1)
    sum(alone(x).square().mean() for x in batches).backward()  # type: ignore[union-attr]
    expected = nn.utils.clip_grad_norm_(alone.blocks.parameters(), 0.1)
    optimizer.step()

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        config = config_for(sync_each_batch=sync_each_batch, mixed_precision="no", max_grad_norm=0.1)
        parallel = FSDP(config, config.parallel)
        model, stepped = parallel.prepare(lambda: split, lambda ps: torch.optim.AdamW(ps, lr=0.1), blocks=["blocks"])
        assert all(block._compiled_call_impl is not None for block in split.blocks)
        synced = []
        monkeypatch.setattr(model, "set_requires_gradient_sync", synced.append)
        parallel.begin_step(2)
        for x in batches:
            with parallel.accumulate(model):
                parallel.backward(model(x).square().mean())
        assert synced == [sync_each_batch, True]
        assert parallel.clip_grad_norm().item() == pytest.approx(expected.item(), rel=1e-5)  # type: ignore[union-attr]
        stepped.step()
        found = parallel.full_state(model)
        assert set(found) == {name for name, p in alone.named_parameters() if p.requires_grad}
        for name, value in found.items():
            torch.testing.assert_close(value, alone.state_dict()[name])
        state = parallel.optimizer_state(model, stepped)
        assert state is not None
        optimizer.load_state_dict(state)  # as a plain optimizer would, and as FSDP does
        parallel.load_optimizer(model, stepped, optimizer.state_dict())
        again = parallel.optimizer_state(model, stepped)
        assert again is not None
        assert state["state"].keys() == again["state"].keys()
        assert all(
            torch.equal(again["state"][n][k], v) for n, values in state["state"].items() for k, v in values.items()
        )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_frozen_copy_is_split_and_computes_the_same_numbers(
    mixed_precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half the memory under bf16, and gathered for no longer than it computes, whatever the trained network does."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    network = Network()
    loaded = copy.deepcopy(network)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        config = config_for(fsdp_reshard_after_forward=False, mixed_precision=mixed_precision, max_grad_norm=0.0)
        parallel = FSDP(config, config.parallel)
        trained, _ = parallel.prepare(lambda: network, lambda ps: torch.optim.SGD(ps), blocks=["blocks"])
        frozen = parallel.prepare_frozen(lambda: loaded, weights=torch.float32, blocks=["blocks"])
        x = torch.randn(3, 4)
        with torch.no_grad():
            wanted, found = trained(x), frozen(x)
        assert torch.equal(found, wanted)
        assert found.dtype == torch.float32
        for parameter in frozen.parameters():
            assert isinstance(parameter, DTensor), "still gathered"
            assert parameter.dtype == (torch.bfloat16 if mixed_precision == "bf16" else torch.float32)
            assert not parameter.requires_grad
    finally:
        torch.distributed.destroy_process_group()


def test_an_optimizer_state_of_another_strategy_is_refused(make: Callable[..., Strategy], tmp_path: Path) -> None:
    """DeepSpeed itself would warn and start its optimizer anew."""
    with refused("mismatch", tmp_path, "DDP or FSDP2"):
        object.__new__(ZeRO).load_own_files(tmp_path)
    parallel = make()
    parallel.load_own_files(tmp_path)
    (tmp_path / "deepspeed").mkdir()
    with refused("mismatch", tmp_path, "DeepSpeed") as caught:
        parallel.load_own_files(tmp_path)
    assert "FSDP2" not in str(caught.value)
