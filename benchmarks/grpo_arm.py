"""A run of reward finetuning on the embedded model that is trained step by step, and what it has cost so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from finetrainers.demo.rewarded import reward_config
from finetrainers.memory.recorder import MemoryRecorder
from finetrainers.plan.init_distributed import make_strategy
from finetrainers.plan.preflight import preflight
from finetrainers.training.assemble import assemble
from finetrainers.training.trainer import Trainer
from finetrainers.training.watchdog import Watchdog


@dataclass
class Cost:
    """What training has cost.

    Attributes:
        passes: clips that went through the network, backward passes counted as two more.
        cpu_s, wall_s: seconds of the updates, rollouts included.
        network_s: of the latter, in the network's forward and backward passes.
    """

    passes: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    network_s: float = 0.0

    def towards(self, other: Cost, share: float) -> Cost:
        """A point on the line between two."""
        at = (getattr(self, f.name) + share * (getattr(other, f.name) - getattr(self, f.name)) for f in fields(self))
        return Cost(*at)


@dataclass
class Arm:
    """One configuration in training.

    Attributes:
        cost: of its updates; evaluations cost nothing.
        metrics: of the last update.
    """

    trainer: Trainer
    steps: Iterator[Any]
    cost: Cost = field(default_factory=Cost)
    metrics: Mapping[str, float] = field(default_factory=dict)
    _measuring: bool = False

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.trainer.state.step

    def update(self) -> None:
        """One optimizer step, with a rollout if one is due."""
        wall, cpu, self._measuring = time.perf_counter(), time.process_time(), True
        step = next(self.steps)
        self.trainer.train_step(step)
        self._measuring = False
        self.cost.wall_s += time.perf_counter() - wall
        self.cost.cpu_s += time.process_time() - cpu
        self.metrics = step.metrics

    def evaluate(self, judge: Arm | None = None) -> Mapping[str, float]:
        """Held-out scores of its network, sampled as `judge` samples; by default, as it samples itself."""
        found = (judge or self).trainer.state.method.evaluate(self.trainer.state.transformer)
        assert found is not None
        return found.record

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """Time of the block is the network's."""
        started = time.perf_counter()
        yield
        if self._measuring:
            self.cost.network_s += time.perf_counter() - started

    def went_through(self, clips: int) -> None:
        """Count clips that go through the network."""
        if self._measuring:
            self.cost.passes += clips * (3 if torch.is_grad_enabled() else 1)


def build(directory: Path, name: str, options: dict[str, Any]) -> Arm:
    """An arm at its first step; `shares_starts` is whether the equal start of a prompt's clips is sampled once."""
    shares_starts = options.pop("shares_starts", True)
    config = reward_config(directory / name, steps=10_000, **options)
    parallel = make_strategy(config)
    trainer = assemble(
        preflight(config), parallel, Watchdog.of_run(config.run, rank=parallel.rank), MemoryRecorder(parallel.device)
    )
    trainer.state.method.collector.shares_starts &= shares_starts
    arm = Arm(trainer, trainer.state.method.steps(0, trainer.state.transformer))
    _watch(arm)
    return arm


def _watch(arm: Arm) -> None:
    """Count and time what goes through the arm's network."""
    state = arm.trainer.state
    open_calls: list[Any] = []

    def before(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        arm.went_through(len(kwargs["hidden_states"]))
        open_calls.append(arm.in_network())
        open_calls[-1].__enter__()

    def after(*_: Any) -> None:
        open_calls.pop().__exit__(None, None, None)

    state.network.register_forward_pre_hook(before, with_kwargs=True)
    state.network.register_forward_hook(after)
    backward = state.parallel.backward

    def timed_backward(loss: torch.Tensor) -> None:
        with arm.in_network():
            backward(loss)

    state.parallel.backward = timed_backward  # type: ignore[method-assign]
