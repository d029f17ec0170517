"""The loop: when to step, log, save and stop. It knows no loss and no model family."""

from __future__ import annotations

import logging
import math
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
from finetrainers.utils.faults import fault_point
from finetrainers.utils.seeding import derive_seed

from .callbacks.base import Callback, Record
from .checkpoint import save_checkpoint
from .control import Requests
from .guards import NonFiniteGuard
from .run_dir import RunDirectory
from .watchdog import Watchdog

logger = logging.getLogger(__name__)


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
        self.stopped_by: str | None = None
        self.requests = Requests(run_dir=run_dir, parallel=parallel)
        self.guard = NonFiniteGuard(
            policy=config.training.on_nonfinite,
            limit=config.training.max_nonfinite_steps,
            loss_scaling=parallel.accelerator.mixed_precision == "fp16",
            updated=parallel.is_deepspeed,
            run_dir=run_dir,
        )
        self.watchdog = Watchdog(
            run_dir.root / "hangs",
            rank=parallel.rank,
            limits={
                "step": config.run.step_timeout,
                "checkpoint": config.run.checkpoint_timeout,
                "sampling": config.run.sampling_timeout,
            },
        )

    def run(self) -> None:
        """Train from the current step to the last, then save; or until a stop is asked for, which `stopped_by` names."""
        self.transformer.train()
        with self.requests.watched(), self.watchdog.running():
            self._run()

    def _run(self) -> None:
        self.watchdog.enter("sampling")
        for callback in self.callbacks:
            callback.on_start(self)
        self.watchdog.enter("step")
        remaining = max(0, self.total_steps - self.step)
        busy, started = 0.0, time.perf_counter()
        for step in islice(self.method.steps(self.step, self.transformer), remaining):
            record = self.train_step(step)
            del step  # the method needs the room for the next one
            busy += time.perf_counter() - started  # fetching and stepping, without saving and sampling
            if self.step % self.config.run.logging_steps == 0 or self.step == self.total_steps:
                self.log({**record, "lr": self.lr_at(self.step - 1), "step_s": busy / self._steps_since_log()})
                busy = 0.0
            self.requests.poll()
            self._save_if_due()  # before sampling, say, runs out of memory
            if self.stopped_by is not None:
                return
            self._sample_if_due()
            self.watchdog.enter("step")
            started = time.perf_counter()

    def train_step(self, step: Step[Any]) -> dict[str, float]:
        """One optimizer step; its metrics, over all ranks. One that is empty only counts."""
        fault_point("step")
        totals = self._gradients(step) if len(step) else {}
        values = {**totals, **{name: torch.tensor(value) for name, value in step.metrics.items()}}
        # The step's one wait for the device, before the update: what is not finite must not get into the weights.
        record = self.parallel.mean(values)
        if not self.guard.lets_through(self.step + 1, record):
            record = {name: value for name, value in record.items() if math.isfinite(value)}
            record["nonfinite_steps"] = float(self.guard.skipped)
            self._leave_out()
        elif len(step):
            self._update()
        self.step += 1
        self.steps_done_here += 1
        return record

    def _gradients(self, micro_batches: Sequence[Any]) -> dict[str, Tensor]:
        """Forward and backward of each micro-batch, then clipping; the metrics, still on the device."""
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
                fault_point("loss", (loss, *metrics.values()))
                self.parallel.backward(loss)
            for name, value in metrics.items():
                totals[name] = totals[name] + value if name in totals else value
            del batch, loss, metrics  # before the next one is made
        fault_point("backward", self.parallel.gradients())
        grad_norm = self.parallel.clip()
        if grad_norm is not None:
            totals["grad_norm"] = grad_norm
        return totals

    def _update(self) -> None:
        """The optimizer and the moving average."""
        fault_point("update")
        # Stochastic rounding draws too, and ranks that round differently would hold different weights.
        _seed_global(self.parallel.device, derive_seed(self.config.training.seed, "optimizer", self.step))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None and not getattr(self.optimizer, "step_was_skipped", False):
            self.ema.update()

    def _leave_out(self) -> None:
        """Drop the gradients of a step that must not become an update."""
        if self.parallel.accelerator.scaler is not None:
            self.optimizer.step()  # the scaler sees the same, skips the update, and lowers its scale
        self.optimizer.zero_grad()

    def _save_if_due(self) -> None:
        """Save every N steps and at the end; and when asked to, or to stop, at the next step that can be continued."""
        asked = self.requests.save or self.requests.stop is not None
        asked = asked and self.method.can_stop_after(self.step)
        if not (asked or self._is_checkpoint_step()):
            return
        self.watchdog.enter("checkpoint")
        save_checkpoint(self)
        self.requests.save = False
        if asked and self.requests.stop is not None and self.step < self.total_steps:
            self.stopped_by = self.requests.stop

    def _sample_if_due(self) -> None:
        """Let the callbacks sample and evaluate."""
        if self.requests.sample and not any(callback.samples for callback in self.callbacks):
            logger.warning("control/sample: nothing to sample; there are no validation prompts and no held-out items")
        self.watchdog.enter("sampling")
        for callback in self.callbacks:
            callback.on_step(self)
        self.requests.sample = False

    def log(self, record: Record) -> None:
        """Hand numbers of the current step to all callbacks; every rank must call it with the same names."""
        record = {"step": self.step, **record}
        for callback in self.callbacks:
            callback.on_log(self, record)

    def finish(self) -> None:
        """Tell the callbacks that the results, or the checkpoint of a run that was stopped, are on disk."""
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
