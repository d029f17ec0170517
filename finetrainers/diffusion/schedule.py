"""The sampling schedule: timesteps of the checkpoint's own scheduler, as times of the noise process."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetrainers.utils.failures import InputError

from .timesteps import resolution_mu


def sampling_times(
    scheduler: Any, steps: int, *, num_tokens: int, shift: float | None = None, own_sigmas: bool = False
) -> Tensor:
    """Return process times of `steps` denoising steps, `[S]`, from pure noise down to, but without, the clean end.

    Rectified flow visits equal parts of [0, 1], shifted as the checkpoint's scheduler says: statically, or by the
    number of video tokens, as the families' pipelines do. Other schedulers give their timesteps.

    Args:
        scheduler: scheduler of the checkpoint; it is not changed.
        steps: number of steps.
        num_tokens: video tokens of the clip, for schedulers that shift by it.
        shift: a static shift instead of the checkpoint's.
        own_sigmas: whether the family's pipelines leave the parts to the scheduler, whose last one ends at its lowest
            training level.

    Raises:
        ValueError: a shift for a process that has none.
    """
    config = dict(scheduler.config)
    # Multistep solvers serve both kinds of process and name it; the others have a shift if they are of flow matching.
    if not config.get("use_flow_sigmas", "shift" in config):
        if shift is not None:
            raise InputError(
                f"{type(scheduler).__name__} is not a flow-matching scheduler, so it has no shift {shift:g}",
                "unsupported",
            )
        fresh = type(scheduler).from_config(config)
        fresh.set_timesteps(steps)
        return fresh.timesteps.clone()
    # As arguments: in the config, values that were defaults when it was made count as unset.
    own: dict[str, Any] = {}
    if shift is not None:
        # Multistep solvers name it `flow_shift`.
        own = {"shift": shift, "flow_shift": shift, "use_dynamic_shifting": False, "shift_terminal": None}
        own = {name: value for name, value in own.items() if name in config}
    fresh = type(scheduler).from_config(config, **own)
    arguments: dict[str, Any] = {}
    if fresh.config.get("use_dynamic_shifting"):
        arguments["mu"] = resolution_mu(num_tokens, config)
    if not own_sigmas and "sigmas" in inspect.signature(fresh.set_timesteps).parameters:
        fresh.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), **arguments)
    else:  # it has its own equal parts
        fresh.set_timesteps(steps, **arguments)
    return fresh.sigmas[:-1].to(torch.float32).clone()
