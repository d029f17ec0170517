"""The sampler's transitions for a group of a rollout: stochastic where its window says, deterministic elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Facts
from finetrainers.config.grpo import GRPOSection, kernel
from finetrainers.config.methods import trait
from finetrainers.config.root import TrainConfig
from finetrainers.diffusion.policy import Transitions, levels, only, step_lengths, transitions
from finetrainers.diffusion.process import Process
from finetrainers.models.spec import ModelSpec
from finetrainers.utils.failures import InputError

from ..prompts.plan import PromptPlan
from .sde_schedule import SDEWindows, step_weights

#: Default amount of noise by kernel: published values; see docs/explanation/grpo.md.
DEFAULT_ETA = {"flow": 0.7, "dance": 0.25, "cps": 0.7, "ddim": 0.3}


class StepTables:
    """Transitions, trained steps and step weights of every group; pure functions of rollout and slot."""

    def __init__(self, config: TrainConfig, process: Process, times: Tensor, facts: Facts) -> None:
        """Args:
            config: the run; if its method does not train steps, no transition is stochastic.
            process, times: the noise process, and the process times of the steps, `[S]`.
            facts: facts of the checkpoint; one of two experts is trained only at its own steps.

        Raises:
            ConfigError: the sampler's noise, or the window, does not fit these noise levels; with the option.
        """
        section = config.grpo
        alpha, sigma = levels(process, times)
        own = [step for step, time in enumerate(times.tolist()) if facts.trains_at(time)]
        with _naming("sampling_sigmas" if section.sampling_sigmas else "sampling_steps"):
            if not own:
                message = "none of the sampling steps is within the noise levels of the trained expert; use more"
                raise InputError(message, "conflict")
            self.deterministic = self.stochastic = transitions("ode", alpha, sigma, eta=0.0)
        self.own = range(own[0], own[-1] + 1)
        self.lengths = step_lengths(alpha, sigma)
        self.weights = torch.zeros(len(times), dtype=torch.float64)
        self.windows = None
        if not trait(config.training.method, "trains_steps"):
            return
        with _naming("window_size" if section.window_size else "sampling_steps"):
            self.windows = SDEWindows(section, config.training.seed, self.own)
        name, pool = kernel(section, is_flow=process.is_flow), self.windows.pool()
        eta = DEFAULT_ETA[name] if section.eta is None else section.eta
        with _naming("sampler" if section.eta is None else "eta"):
            self.stochastic = transitions(name, alpha, sigma, eta=eta, noisy=pool)
            self.weights = step_weights(section.step_weight, self.stochastic, alpha, sigma, over=pool)

    @property
    def num_trained(self) -> int:
        """Number of trained steps of every clip."""
        return 0 if self.windows is None else self.windows.num_trained

    def group_transitions(self, rollout: int, slot: int) -> Transitions:
        """Return the transitions of a group."""
        if self.windows is None:
            return self.deterministic
        return only(self.stochastic, self.deterministic, torch.tensor(self.windows.stochastic(rollout, slot)))

    def first_stochastic(self, rollout: int, slot: int) -> int:
        """Return the first step at which the clips of a group get noise."""
        assert self.windows is not None
        return self.windows.stochastic(rollout, slot)[0]

    def trained(self, rollout: int, slot: int) -> tuple[int, ...]:
        """Return the trained steps of a group, ascending."""
        return () if self.windows is None else self.windows.trained(rollout, slot)


def rollout_times(section: GRPOSection, spec: ModelSpec, scheduler: Any, *, num_tokens: int) -> Tensor:
    """Return the process times of a rollout's steps, `[S]`: `--sampling_sigmas`, or the checkpoint's schedule.

    Raises:
        ValueError: a shift for a process that has none.
    """
    if section.sampling_sigmas:
        return torch.tensor(section.sampling_sigmas)
    return spec.sampling_times(scheduler, section.sampling_steps, num_tokens=num_tokens, shift=section.shift)


def check_noise(plan: PromptPlan, config: TrainConfig, *, spec: ModelSpec) -> None:
    """Check the configured sampler against the checkpoint's scheduler, reading only its small file.

    Raises:
        ConfigError: they do not fit.
    """
    section, scheduler = config.grpo, spec.load_scheduler()
    with _naming("sampling_steps" if section.shift is None else "shift"):
        times = rollout_times(section, spec, scheduler, num_tokens=plan.num_tokens)
    with _naming("pretrained_model_name_or_path"):
        process = spec.process(scheduler)
    StepTables(config, process, times, spec.facts)


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Report an error within the block as a problem of an option."""
    try:
        yield
    except ValueError as error:
        raise ConfigError([Problem.from_error(f"--{option}", error)]) from error
