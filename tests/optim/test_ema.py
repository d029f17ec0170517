"""The moving average against float64, its swap, and its resume."""

from __future__ import annotations

import io

import pytest
import torch
from diffusers.training_utils import EMAModel
from refusals import refused
from torch import nn

from finetrainers.optim.ema import EMA


def model(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(7, 5).to(dtype)


def walk(network: nn.Module, ema: EMA, count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Random weight changes, each followed by an update; the weights after each, in float64."""
    generator = torch.Generator().manual_seed(seed)
    history = []
    for _ in range(count):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
        ema.update()
        history.append({n: p.detach().double().clone() for n, p in network.named_parameters()})
    return history


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("decay", "start"), [(0.999, 0), (0.5, 0), (0.9, 12), (0.0, 0)])
def test_average_is_the_formula(decay: float, start: int, dtype: torch.dtype) -> None:
    network = model(dtype)
    ema = EMA(dict(network.named_parameters()), decay=decay, update_after_step=start)
    average: dict[str, torch.Tensor] = {}
    for n, weights in enumerate(walk(network, ema, 40), start=1):
        s = n - start - 1
        d = 0.0 if s <= 0 else min((1 + s) / (10 + s), decay)
        average = {k: d * average.get(k, 0) + (1 - d) * w for k, w in weights.items()}
    for name, value in ema.weights.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), average[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_many_weights_at_once_give_the_same_bits(
    at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As diffusers' average, weight by weight, whatever is updated by one call."""
    monkeypatch.setattr("finetrainers.optim.ema._BYTES_AT_ONCE", at_once)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(33, 17), nn.LayerNorm(17), nn.Linear(17, 5)).to(dtype)
    ours = EMA(dict(network.named_parameters()), decay=0.97, update_after_step=2)
    theirs = EMAModel(network.parameters(), decay=0.97, update_after_step=2)
    theirs.to(dtype=torch.float32)
    for _ in range(25):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += torch.randn_like(parameter)
        ours.update()
        theirs.step(network.parameters())
        for name, expected in zip(ours.weights, theirs.shadow_params, strict=True):
            assert torch.equal(ours.weights[name], expected)


def test_applied_swaps_and_restores_bit_for_bit() -> None:
    network = model(torch.bfloat16)
    ema = EMA(dict(network.named_parameters()), decay=0.9)
    walk(network, ema, 5)
    before = {n: p.detach().clone() for n, p in network.named_parameters()}
    pointers = [p.data_ptr() for p in network.parameters()]

    def fail_inside() -> None:
        with ema.applied():
            for name, parameter in network.named_parameters():
                assert torch.equal(parameter, ema.weights[name].bfloat16())
                assert not torch.equal(parameter, before[name])
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, before[name])
    assert [p.data_ptr() for p in network.parameters()] == pointers
    with ema.applied(), pytest.raises(AssertionError):
        ema.update()


def test_resume_is_exact() -> None:
    straight = model()
    ema = EMA(dict(straight.named_parameters()), decay=0.9, update_after_step=3)
    walk(straight, ema, 6)
    saved = io.BytesIO()
    torch.save({"model": straight.state_dict(), "ema": ema.state_dict()}, saved)
    walk(straight, ema, 6, seed=2)

    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    resumed = model()
    resumed.load_state_dict(state["model"])
    again = EMA(dict(resumed.named_parameters()), decay=0.9, update_after_step=3)
    again.load_state_dict(state["ema"])
    walk(resumed, again, 6, seed=2)
    assert again.state_dict()["num_updates"] == 12
    for name, value in ema.weights.items():
        assert torch.equal(value, again.weights[name])


def test_refuses_what_does_not_fit() -> None:
    with refused("invalid"):
        EMA({}, decay=0.9)
    network = model()
    ema = EMA(dict(network.named_parameters()), decay=0.9)
    state = ema.state_dict()
    with refused("mismatch", " 1 names ", "'bias'"):
        ema.load_state_dict({**state, "shadow": {"weight": state["shadow"]["weight"]}})
    with refused("mismatch", "'bias'", " (1,),", " (5,)"):
        ema.load_state_dict({**state, "shadow": {**state["shadow"], "bias": torch.zeros(1)}})
