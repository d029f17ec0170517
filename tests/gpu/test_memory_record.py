"""Peaks of CUDA's allocator by phase, and an optimizer that steps in backward with the fused kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from finetrainers.config.sections import OptimizerSection
from finetrainers.memory.recorder import MemoryRecorder
from finetrainers.optim.factory import create_optimizer
from finetrainers.utils.phases import LOADING, TRAINING_STEP, phase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def test_each_phase_has_peaks_of_its_own() -> None:
    device = torch.device("cuda")
    recorder = MemoryRecorder(device)
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    with recorder.running():
        with phase(LOADING):
            torch.empty(512 << 20, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()
        with phase(TRAINING_STEP):
            torch.empty(128 << 20, dtype=torch.uint8, device=device)
    loading, training = recorder.peaks[LOADING], recorder.peaks[TRAINING_STEP]
    assert loading["allocated"] - training["allocated"] == pytest.approx(384 / 1024, abs=0.01)
    assert training["reserved"] >= training["allocated"] >= (64 + 128) / 1024
    assert loading["host"] > 0
    del held


def test_fused_steps_in_backward_are_those_after_it() -> None:
    def train(early: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        network = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).cuda()
        config = OptimizerSection(optimizer="adamw", max_grad_norm=0.0, optimizer_in_backward=early)
        optimizer = create_optimizer(network.parameters(), config=config, lr=1e-3, device_type="cuda")
        for step in range(3):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(step)).cuda()
            network(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        return [p.detach().clone() for p in network.parameters()], peak

    plain, most = train(False)
    early, less = train(True)
    assert all(a.equal(b) for a, b in zip(early, plain, strict=True))
    assert less < 0.6 * most
