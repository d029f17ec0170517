"""Block swap on CUDA: equal results, what lies on the GPU, and copies that overlap with computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_devices import Run, assert_equal, devices
from torch import Tensor, nn

from finetrainers.memory.block_swap import swap_blocks

Start = Callable[..., Run]
GIVEN = {
    "gradient_checkpointing": True, "blocks_to_swap": 4, "use_ema": True, "validation_prompts": "a ball@@@9x64x64",
    "validation_inference_steps": 2, "validation_guidance_scale": 3.0,
}  # fmt: skip
MIB = 1 << 20


@pytest.mark.parametrize("device", devices(cpu=False))
def test_a_run_is_the_same_bit_for_bit(device: str, start: Start, deterministic: None) -> None:
    """With and without checkpointing, with samples, and with offloading of the pipeline while they are drawn."""
    for changes in ({}, {"gradient_checkpointing": False}, {"enable_model_cpu_offload": True}):
        given = {**GIVEN, **changes}
        expected = start(device, "hunyuan_video", **{**given, "blocks_to_swap": 0})
        found = start(device, "hunyuan_video", **given)
        assert found.curve() == expected.curve()
        assert found.curve("grad_norm") == expected.curve("grad_norm")
        assert_equal(found.trained, expected.trained)
        samples = [sorted(run.root.rglob("samples/*/*.mp4")) for run in (found, expected)]
        assert len(samples[0]) == 1
        assert samples[0][0].read_bytes() == samples[1][0].read_bytes()
        if device == "cpu":  # the other cases are those of tests/memory
            return


class Block(nn.Module):
    """Some matrix products with one weight of 32 MiB."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            x = torch.tanh(self.linear(x))
        return x


def network_of(repeats: int, blocks: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(repeats) for _ in range(blocks))).requires_grad_(False)


def step(network: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    network(x).float().square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.gpu
def test_the_device_holds_two_slots() -> None:
    """Nor do all blocks lie there while the network is placed."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    network = network_of(1)
    swap = swap_blocks(network, list(network), 12, device)
    network.to(device)
    assert torch.cuda.max_memory_allocated() - before <= 2 * 32 * MIB + MIB
    assert swap.host_bytes == 12 * 32 * MIB
    x = torch.randn(4, 4096, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = network(x)
        network.to("cpu")  # a copy is on its way
        assert torch.cuda.memory_allocated() - before <= MIB
        network.to(device)
        assert torch.equal(network(x), expected)
    assert torch.cuda.max_memory_allocated() - before <= 2 * 32 * MIB + MIB


@pytest.mark.gpu
@pytest.mark.parametrize("repeats", [1, 16])
def test_gradients_are_the_same_however_fast_blocks_compute(repeats: int) -> None:
    """Copies that are slower than the blocks, and faster: a copy that came too early or too late would show."""
    device = torch.device("cuda")
    x = torch.randn(256, 4096, device=device, dtype=torch.bfloat16)
    plain = network_of(repeats).to(device)
    expected = step(plain, x)
    del plain
    network = network_of(repeats)
    swap_blocks(network, list(network), 12, device)
    for _ in range(20):  # without waiting in between, so that the host runs ahead
        found = step(network, x)
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_copies_overlap_with_computation() -> None:
    """Blocks that compute for longer than their copy takes are hardly slower: at most a quarter of the copies' time is
    added."""
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def seconds(run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 10 / 1000

    pinned = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(pinned, device=device)
    copy = seconds(lambda: on_device.copy_(pinned, non_blocking=True))
    one = seconds(lambda: network_one(x))
    repeats = max(1, int(2 * copy / one) + 1)
    network = network_of(repeats).to(device)
    alone = seconds(lambda: step(network, x))
    network = network_of(repeats)
    swap = swap_blocks(network, list(network), 12, device)
    before = swap.copied_bytes
    swapped = seconds(lambda: step(network, x))
    copies = (swap.copied_bytes - before) / 13 / (32 * MIB) * copy
    print(f"a step: {alone:.4f} s, swapped {swapped:.4f} s, copies alone {copies:.4f} s")
    assert swapped - alone < copies / 4


def network_one(x: Tensor) -> Tensor:
    """One product of the size that blocks compute."""
    return torch.tanh(x @ x)
