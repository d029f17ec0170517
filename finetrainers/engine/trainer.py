"""The loop: when to step, log, save and stop. It knows no loss and no model family."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.config.root import TrainConfig
from finetrainers.methods.base import Method, Step
from finetrainers.models.spec import ModelSpec
from finetrainers.optim.ema import EMA
from finetrainers.optim.schedules import set_lr
from finetrainers.parallel.engine import Parallel
from finetrainers.utils.seeding import derive_seed

from .callbacks.base import Callback, Record
from .checkpoint import save_checkpoint
from .run_dir import RunDirectory


class Trainer:
    """Trains a wrapped network with a method for a number of optimizer steps."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        spec: ModelSpec,
        method: Method,
        parallel: Parallel,
        transformer: nn.Module,
        optimizer: Any,
        lr_at: Callable[[int], float],
        total_steps: int,
        run_dir: RunDirectory,
        critical: dict[str, Any],
        ema: EMA | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Args:
        config: the resolved configuration.
        spec: the model's description.
        method: what loss.
        parallel: ranks and gradient exchange.
        transformer, optimizer: as `parallel.prepare` returned them.
        lr_at: learning rate of optimizer step n, from 0.
        total_steps: optimizer steps in all.
        run_dir: where records go.
        critical: settings that a checkpoint must share.
        ema: moving average of the trained weights.
        callbacks: watchers, in order.
        """
        self.config = config
        self.spec = spec
        self.method = method
        self.parallel = parallel
        self.transformer = transformer
        self.optimizer = optimizer
        self.lr_at = lr_at
        self.total_steps = total_steps
        self.run_dir = run_dir
        self.critical = critical
        self.ema = ema
        self.callbacks = list(callbacks)
        self.step = 0
        self.steps_done_here = 0

    def run(self) -> None:
        """Train from the current step to the last, then save."""
        self.transformer.train()
        for callback in self.callbacks:
            callback.on_start(self)
        remaining = max(0, self.total_steps - self.step)
        busy, started = 0.0, time.perf_counter()
        for step in islice(self.method.steps(self.step, self.transformer), remaining):
            metrics = self.train_step(step)
            del step  # the method needs the room for the next one
            is_log_step = self.step % self.config.run.logging_steps == 0 or self.step == self.total_steps
            record = self.parallel.mean(metrics) if is_log_step else {}  # waits for the device
            busy += time.perf_counter() - started  # fetching and stepping, without saving and sampling
            if is_log_step:
                self.log({**record, "lr": self.lr_at(self.step - 1), "step_s": busy / self._steps_since_log()})
                busy = 0.0
            if self._is_checkpoint_step():  # before sampling, say, runs out of memory
                save_checkpoint(self)
            for callback in self.callbacks:
                callback.on_step(self)
            started = time.perf_counter()

    def train_step(self, step: Step[Any]) -> dict[str, Tensor]:
        """One optimizer step; its metrics, still on the device. One that is empty only counts."""
        totals = self._learn(step) if len(step) else {}
        self.step += 1
        self.steps_done_here += 1
        return {**totals, **{name: torch.tensor(value) for name, value in step.metrics.items()}}

    def _learn(self, micro_batches: Sequence[Any]) -> dict[str, Tensor]:
        """Forward and backward of each micro-batch, then the optimizer and the moving average."""
        # Dropout draws from the global generator; seeding it per step makes it resumable.
        _seed_global(
            self.parallel.device, derive_seed(self.config.training.seed, "step", self.step, self.parallel.rank)
        )
        set_lr(self.optimizer, self.lr_at(self.step))
        self.parallel.begin_step(len(micro_batches))
        totals: dict[str, Tensor] = {}
        for batch in micro_batches:
            with self.parallel.accumulate(self.transformer):
                loss, metrics = self.method.loss(self.transformer, batch)
                self.parallel.backward(loss)
            for name, value in metrics.items():
                totals[name] = totals[name] + value if name in totals else value
            del batch, loss, metrics  # before the next one is made
        grad_norm = self.parallel.clip()
        if grad_norm is not None:
            totals["grad_norm"] = grad_norm
        # Stochastic rounding draws too, and ranks that round differently would hold different weights.
        _seed_global(self.parallel.device, derive_seed(self.config.training.seed, "optimizer", self.step))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None and not getattr(self.optimizer, "step_was_skipped", False):
            self.ema.update()
        return totals

    def log(self, record: Record) -> None:
        """Hand numbers of the current step to all callbacks; every rank must call it with the same names."""
        record = {"step": self.step, **record}
        for callback in self.callbacks:
            callback.on_log(self, record)

    def finish(self) -> None:
        """Tell the callbacks that the results are on disk."""
        for callback in self.callbacks:
            callback.on_end(self)

    def _steps_since_log(self) -> int:
        every = self.config.run.logging_steps
        return min(self.steps_done_here, (self.step - 1) % every + 1)

    def _is_checkpoint_step(self) -> bool:
        every = self.config.training.checkpointing_steps
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)


def _seed_global(device: torch.device, seed: int) -> None:
    """Seed the global generators that layers and optimizers on `device` draw from."""
    if device.type == "cpu":
        # The same stream as `torch.manual_seed`, which without CUDA formats the call stack each time, 0.4 ms of a step.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
