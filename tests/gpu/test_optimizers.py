"""Every optimizer that is installed: steps on a device, and its state goes out and in again."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_devices import cases
from torch import nn

from finetrainers.config.sections import OptimizerSection
from finetrainers.optim.factory import create_optimizer
from finetrainers.optim.table import OPTIMIZERS
from finetrainers.training.staging import tensors_in

LR = {"prodigy": 1.0, "adafactor": 3e-2, "muon": 1e-2}
ON_DEVICES = ["adamw", *(name for name, recipe in OPTIMIZERS.items() if not recipe.on_host and name != "adamw")]
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Network(nn.Module):
    """Two matrices; 8-bit states begin at 4096 weights."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("a", "b"):
            value = torch.randn(256, 32, generator=generator) / 8
            setattr(self, name, nn.Parameter(value.to(device, dtype)))

    def loss(self) -> torch.Tensor:
        return (self.b.float() @ self.a.float().T - torch.eye(256, device=self.a.device)).square().mean()


def steps(network: Network, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        network.loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def check(device: str, make: Make, dtype: torch.dtype, *, lowers: bool = True) -> None:
    """Learn, save, load, and go on as the one that was saved."""
    network = Network(device, dtype)
    optimizer = make(network)
    before = network.loss().item()
    torch.manual_seed(0)
    steps(network, optimizer, 4)
    assert network.loss().item() < before or not lowers
    file = io.BytesIO()
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, file)
    torch.manual_seed(1)  # stochastic rounding draws
    steps(network, optimizer, 2)

    file.seek(0)
    state = torch.load(file, map_location="cpu", weights_only=True)
    resumed = Network(device, dtype)
    resumed.load_state_dict(state["network"])
    again = make(resumed)
    again.load_state_dict(state["optimizer"])
    torch.manual_seed(1)
    steps(resumed, again, 2)
    for name, weight in resumed.named_parameters():
        assert weight.isfinite().all()
        assert torch.equal(weight, dict(network.named_parameters())[name]), name
    assert list(tensors_in(again.state_dict()))


@pytest.mark.parametrize(("device", "name"), cases(*ON_DEVICES))
def test_learns_and_resumes(device: str, name: str) -> None:
    recipe = OPTIMIZERS[name]
    if not recipe.is_installed:
        pytest.skip(f"{recipe.library} is not installed")
    config = OptimizerSection(optimizer=name, lr=LR.get(name, 3e-3))  # type: ignore[arg-type]

    def make(network: nn.Module) -> torch.optim.Optimizer:
        return create_optimizer(network.parameters(), config=config, lr=config.lr, device_type=device)

    # Prodigy's first steps are tiny while it estimates the distance to go.
    check(device, make, torch.float32, lowers=name != "prodigy")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, recipe in OPTIMIZERS.items() if recipe.stochastic])
def test_stochastic_rounding(name: str) -> None:
    pytest.importorskip("torchao")
    config = OptimizerSection(optimizer=name, lr=3e-3)  # type: ignore[arg-type]

    def make(network: nn.Module) -> torch.optim.Optimizer:
        return create_optimizer(
            network.parameters(), config=config, lr=config.lr, device_type="cuda", stochastic_rounding=True
        )

    check("cuda", make, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("offload_gradients", [False, True])
def test_state_on_the_host(offload_gradients: bool) -> None:
    pytest.importorskip("torchao")
    options: dict[str, Any] = {"use_cpu_offload_optimizer": True, "offload_gradients": offload_gradients}
    config = OptimizerSection(optimizer="adamw", lr=3e-3, **options)

    def make(network: nn.Module) -> torch.optim.Optimizer:
        return create_optimizer(network.parameters(), config=config, lr=config.lr, device_type="cuda")

    check("cuda", make, torch.float32)
    network = Network("cuda", torch.float32)
    optimizer = make(network)
    steps(network, optimizer, 1)
    assert {tensor.device.type for tensor in tensors_in(optimizer.state_dict())} == {"cpu"}
