"""The sampler's noise levels are those of the families' pipelines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift

from finetrainers.diffusion.schedule import sampling_times


def test_static_shift_is_the_schedulers() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, 13)[:-1])
    found = sampling_times(FlowMatchEulerDiscreteScheduler(shift=7.0), 12, num_tokens=100)
    torch.testing.assert_close(found, scheduler.sigmas[:-1].float(), rtol=1e-6, atol=0)


def test_dynamic_shift_goes_by_the_tokens() -> None:
    options = {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1,
               "base_image_seq_len": 1024, "max_image_seq_len": 4096}  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(**options)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 8, 8), mu=calculate_shift(2000, 1024, 4096, 0.95, 2.05))
    found = sampling_times(FlowMatchEulerDiscreteScheduler(**options), 8, num_tokens=2000)
    torch.testing.assert_close(found, scheduler.sigmas[:-1].float(), rtol=1e-6, atol=0)


def test_a_shift_of_ones_own() -> None:
    """DanceGRPO's schedule: linspace(1, 0, 17) shifted by 5."""
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1)
    t = torch.linspace(1, 0, 17)[:-1]
    found = sampling_times(scheduler, 16, num_tokens=2000, shift=5.0)
    torch.testing.assert_close(found, 5 * t / (1 + 4 * t), rtol=1e-5, atol=0)
    assert scheduler.config.shift == 1.0


def test_a_variance_preserving_schedulers_timesteps() -> None:
    scheduler = CogVideoXDDIMScheduler(timestep_spacing="trailing")
    assert sampling_times(scheduler, 4, num_tokens=100).tolist() == [999, 749, 499, 249]
    with pytest.raises(ValueError, match="no flow-matching scheduler"):
        sampling_times(scheduler, 4, num_tokens=100, shift=3.0)
