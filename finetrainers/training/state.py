"""The state of a training run, which checkpoints, guards, export and callbacks take."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from finetrainers.config.root import TrainConfig
from finetrainers.memory.recorder import MemoryRecorder
from finetrainers.methods.base import Method
from finetrainers.methods.registry import method_spec
from finetrainers.models.spec import FlopMeter, ModelSpec
from finetrainers.optim.ema import EMA
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.init_distributed import retry_refusal
from finetrainers.rundir.run_dir import RunDirectory

from .control import Requests
from .guards.hacking import HackingGuard
from .guards.memory import MemoryGuard
from .guards.nonfinite import NonFiniteGuard
from .guards.spikes import SpikeDetector
from .guards.straggler import StragglerMonitor
from .staging import Staging
from .watchdog import Watchdog


class Guards:
    """All guards of a run.

    Attributes:
        nonfinite, spikes, memory, straggler: the guards of every run, see their classes.
        hacking: the guard of a run that can detect reward hacking, else None.
    """

    def __init__(self, config: TrainConfig, *, parallel: Strategy, run_dir: RunDirectory) -> None:
        training = config.training
        self.nonfinite = NonFiniteGuard(
            policy=training.on_nonfinite,
            limit=training.max_nonfinite_steps,
            loss_scaling=parallel.scales_loss,
            run_dir=run_dir,
        )
        self.spikes = SpikeDetector(window=training.spike_window, sigma=training.spike_sigma, run_dir=run_dir)
        refusal = retry_refusal(
            config.memory.oom_retry, parallel=parallel, in_backward=config.optimizer.optimizer_in_backward
        )
        self.memory = MemoryGuard(parallel=parallel, run_dir=run_dir, refusal=refusal)
        self.straggler = StragglerMonitor(parallel=parallel, run_dir=run_dir)
        rule = method_spec(config).hacking_rule(config)
        self.hacking = None if rule is None else HackingGuard(rule)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that an exact resume needs, as JSON values."""
        hacking = {} if self.hacking is None else {"hacking": self.hacking.state_dict()}
        return {"spikes": self.spikes.state_dict(), "fits": self.memory.state_dict(), **hacking}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.spikes.load_state_dict(state["spikes"])
        self.memory.load_state_dict(state["fits"])
        if self.hacking is not None:
            self.hacking.load_state_dict(state.get("hacking", {}))


@dataclass(frozen=True)
class Sample:
    """A sample of the current weights.

    Attributes:
        prompt: its prompt.
        frames: `[T, H, W, 3]` uint8.
        fps: frames per second.
        path: its file.
        number: position among the samples of all processes.
    """

    prompt: str
    frames: np.ndarray
    fps: float
    path: Path
    number: int


@dataclass(slots=True)  # so that a hook cannot set what nothing reads
class TrainState:
    """State of a run: the network that it trains, its progress, and its records.

    Attributes:
        config: the resolved configuration.
        spec: the model's description.
        method: computes the loss.
        parallel: ranks and gradient exchange.
        transformer, optimizer: as `parallel.prepare` returned them.
        total_steps: optimizer steps in all.
        run_dir: directory of the records.
        watchdog: limits how long a section of the run may take.
        memory: measures peaks by phase.
        checkpoint_fields: facts about the start of the run that checkpoints store; see `Start.checkpoint_fields`.
        ema: moving average of the trainable weights.
        meter: counts operations and tokens of the network's calls.
        step: optimizer steps taken.
        shares_saving: whether each rank writes its part of the weights and of the optimizer's state.
        data_ahead: how many steps the data position is ahead of `step`, since a rollback skips data.
        oldest_rollback_step: the first step whose checkpoint has all parts that this run has.
        stopped_by: name of the signal, file or guard that stopped the run before its last step, or None.
        finished_by: reason that a callback gave for making this step the last one, or None.
        wants_samples: whether a callback uses `on_samples`, so that frames stay in host memory until then.
        samples: the samples that a callback has just drawn on this process, or None; see `Callback.on_samples`.
        doing: what a callback does between two steps, for the progress line.
        requests: requests from outside: a stop, a checkpoint, samples.
        guards: checks of every step, with state that checkpoints store.
        staging: copies of the state that asynchronous checkpoints are written from; code that changes weights waits
            for it.
    """

    config: TrainConfig
    spec: ModelSpec
    method: Method
    parallel: Strategy
    transformer: nn.Module
    optimizer: Any
    total_steps: int
    run_dir: RunDirectory
    watchdog: Watchdog
    memory: MemoryRecorder
    checkpoint_fields: Mapping[str, Any]
    ema: EMA | None = None
    meter: FlopMeter | None = None
    step: int = 0
    shares_saving: bool = False
    data_ahead: int = 0
    oldest_rollback_step: int = 0
    stopped_by: str | None = None
    finished_by: str | None = None
    wants_samples: bool = False
    samples: list[Sample] | None = None
    doing: str = ""
    requests: Requests = field(init=False)
    guards: Guards = field(init=False)
    staging: Staging = field(init=False, default_factory=Staging)

    def __post_init__(self) -> None:
        self.requests = Requests(run_dir=self.run_dir, parallel=self.parallel)
        self.guards = Guards(self.config, parallel=self.parallel, run_dir=self.run_dir)

    @property
    def is_last_step(self) -> bool:
        """True if all steps are taken, or the run ends with results after this one."""
        return self.step >= self.total_steps or self.finished_by is not None

    @property
    def network(self) -> Any:
        """The transformer below what distributes or compiles it."""
        return self.parallel.unwrap(self.transformer)

    def ema_applied(self) -> AbstractContextManager[None]:
        """Give the network the weights of the moving average within the block, if there is one."""
        if self.ema is None:
            return nullcontext()
        self.staging.wait()
        return self.ema.applied()
