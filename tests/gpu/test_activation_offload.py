"""Offloaded activations on CUDA: equal gradients, what stays on the GPU, and copies that overlap with computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_devices import devices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetrainers.memory.activation_offload import ActivationOffload

MIB = 1 << 20
WIDTH, TOKENS, BLOCKS = 2048, 8192, 24  # a hidden tensor of 32 MiB


class Block(nn.Module):
    """Some matrix products; what it needs for backward is computed again from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(4))

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y) + shared)
        return x + y


def passes(blocks: Any, offload: ActivationOffload | None, device: str, *, seed: int) -> tuple[list[Tensor], int]:
    """Gradients of two micro-batches, and the peak of allocated bytes."""
    torch.manual_seed(seed)
    blocks.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        x, shared = (torch.randn(n, WIDTH, device=device, dtype=torch.bfloat16) for n in (TOKENS, 1))
        for block in blocks:
            if offload is None:
                x = checkpoint(block, x, shared, use_reentrant=False)
                continue
            with offload.open_store(block, (x, shared)).saving_inputs():
                x = checkpoint(block, x, shared, use_reentrant=False)
        x.float().square().mean().backward()
        del x
    peak = torch.cuda.max_memory_allocated() - before
    return [parameter.grad.clone() for parameter in blocks.parameters()], peak


@pytest.mark.parametrize("device", devices(cpu=False))
def test_gradients_are_the_same_and_the_inputs_are_gone(device: str) -> None:
    """Nothing reads a result before the end of a pass: reading waits for the GPU, which would hide a race."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS)).to(device)
    offload = ActivationOffload(list(blocks), torch.device(device))
    for seed in range(10):
        wanted, most = passes(blocks, None, device, seed=seed)
        found, peak = passes(blocks, offload, device, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), seed
        assert offload.arena.used == 0
        assert offload.arena.peak == (BLOCKS - 3) * TOKENS * WIDTH * 2
        # All inputs but those of five blocks, and one more that is being copied back.
        assert most - peak > (BLOCKS - 8) * 32 * MIB
