"""Copies of a device's tensors in host memory while kernels still write to them, and checkpoints that are written from
them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from on_devices import Run, assert_equal, devices
from safetensors.torch import load_file

from finetrainers.training import staging as module
from finetrainers.training.staging import Staging, tensors_in

_SIDE = 2048


@pytest.mark.parametrize("device", devices())
def test_copies_are_of_the_values_at_the_call(device: str) -> None:
    side = _SIDE if device == "cuda" else 64
    weight = torch.zeros(side, side, device=device)
    table = torch.arange(16.0, device=device)
    state = {"weight": weight, "turned": weight.t(), "tables": [table, table], "step": torch.tensor(3.0)}
    product = torch.eye(side, device=device)
    for _ in range(100 if device == "cuda" else 2):  # the host is far ahead of the device
        product = product @ product
    weight.add_(product)
    staging = Staging()
    copied, fill = staging.begin_copy(state)
    thread = threading.Timer(0.1, fill)
    thread.start()
    staging.wait()
    weight.fill_(-1.0)
    table.fill_(-1.0)
    assert all(tensor.device.type == "cpu" and not tensor.is_pinned() for tensor in tensors_in(copied))
    assert torch.equal(copied["weight"], torch.eye(side))
    assert copied["turned"].untyped_storage().data_ptr() == copied["weight"].untyped_storage().data_ptr()
    assert copied["turned"].stride() == (1, side)
    assert copied["tables"][0] is copied["tables"][1]
    assert copied["tables"][0].tolist() == list(range(16))
    assert copied["step"].item() == 3.0


@pytest.mark.gpu
def test_page_locked_memory_is_bounded() -> None:
    """Two buffers, whatever is copied; more than both of them, in odd pieces."""
    torch.cuda.init()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    generator = torch.Generator("cuda").manual_seed(0)
    state = {n: torch.randint(256, (n,), dtype=torch.uint8, device="cuda", generator=generator)
             for n in (100_000_000, 30_000_001, 17, 70_000_000)}  # fmt: skip
    staging = Staging()
    for _ in range(2):
        copied, fill = staging.begin_copy(state)
        fill()
        assert_equal({str(n): t for n, t in copied.items()}, {str(n): t.cpu() for n, t in state.items()})
    taken = torch.cuda.host_memory_stats()["allocated_bytes.peak"] - before
    assert taken <= 2 * module._BUFFER_BYTES + (1 << 20)


@pytest.mark.parametrize("device", devices(cpu=False))
def test_checkpoints_that_are_written_beside_the_steps_are_the_same(
    device: str, start: Callable[..., Run], deterministic: None
) -> None:
    options = {"use_ema": True, "checkpointing_steps": 1, "train_steps": 4}
    at_once, beside = start(device, **options), start(device, **options, async_checkpointing=True)
    assert beside.curve() == at_once.curve()
    for step in (1, 2, 3, 4):
        one, other = (run.root / "checkpoints" / f"step-{step}" for run in (at_once, beside))
        for name in ("pytorch_lora_weights.safetensors", "ema.safetensors"):
            assert_equal(load_file(other / name), load_file(one / name))
        states = [torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True) for path in (one, other)]
        flat = [dict(enumerate(tensors_in(state))) for state in states]
        assert_equal({str(n): t for n, t in flat[1].items()}, {str(n): t for n, t in flat[0].items()})
