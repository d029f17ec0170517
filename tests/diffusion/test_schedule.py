"""The sampler's noise levels are those of the families' pipelines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SASolverScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift
from refusals import refused

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


MULTISTEP = [UniPCMultistepScheduler, DPMSolverMultistepScheduler, DEISMultistepScheduler, SASolverScheduler]


@pytest.mark.parametrize("cls", MULTISTEP)
def test_multistep_solvers_take_a_shift_under_their_name(cls: Any) -> None:
    """Their option is `flow_shift`; whoever gives none gets the checkpoint's."""
    options = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    scheduler = cls(**options, flow_shift=3.0)
    own = cls(**options, flow_shift=5.0)
    own.set_timesteps(12)
    t = own.sigmas[:-1].double() if cls is not UniPCMultistepScheduler else None
    found = sampling_times(scheduler, 12, num_tokens=100, shift=5.0)
    if t is None:  # it takes levels: those of rectified flow
        t = torch.linspace(1, 0, 13, dtype=torch.float64)[:-1]
        t = 5 * t / (1 + 4 * t)
    torch.testing.assert_close(found.double(), t, rtol=2e-6, atol=0)
    kept = sampling_times(scheduler, 12, num_tokens=100)
    assert (kept[1:] < found[1:] - 0.005).all()
    assert scheduler.config.flow_shift == 3.0


def test_a_multistep_solver_of_a_variance_preserving_model_has_no_shift() -> None:
    scheduler = UniPCMultistepScheduler(prediction_type="v_prediction", timestep_spacing="trailing")
    assert sampling_times(scheduler, 4, num_tokens=100).tolist() == [999, 749, 499, 249]
    with refused("unsupported", type(scheduler).__name__, " shift 3"):
        sampling_times(scheduler, 4, num_tokens=100, shift=3.0)


def test_a_variance_preserving_schedulers_timesteps() -> None:
    scheduler = CogVideoXDDIMScheduler(timestep_spacing="trailing")
    assert sampling_times(scheduler, 4, num_tokens=100).tolist() == [999, 749, 499, 249]
    with refused("unsupported", type(scheduler).__name__, " shift 3"):
        sampling_times(scheduler, 4, num_tokens=100, shift=3.0)
