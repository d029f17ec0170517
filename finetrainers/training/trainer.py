"""The training loop: when to step, log, save and stop. It knows no loss and no model family."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from finetrainers.methods.base import Step, micro_batch_loss
from finetrainers.optim.in_backward import StepInBackward, get_step_in_backward
from finetrainers.optim.schedules import Schedule
from finetrainers.parallel.hardware import hardware_monitor
from finetrainers.plan.start_report import print_stopped
from finetrainers.plan.throughput import peak_flops, with_rates
from finetrainers.rundir.find import checkpoints_dir
from finetrainers.utils.alive import begin_work
from finetrainers.utils.failures import ExpectedError
from finetrainers.utils.faults import fault_point
from finetrainers.utils.phases import CHECKPOINT, TRAINING_STEP, phase
from finetrainers.utils.seeding import derive_seed

from .activation_memory import ActivationPlanner
from .callbacks.base import Callback, Record
from .callbacks.metrics import summarize_records
from .checkpoints.async_save import BackgroundSave
from .checkpoints.save import reserve_memory, save_checkpoint
from .guards.memory import Attempt, advise_on_oom
from .memory_probe import probe_memory, wants_memory_probe
from .rollback import roll_back
from .state import TrainState

logger = logging.getLogger(__name__)

_SAVE_MEMORY_ADVICE = (
    "A checkpoint is put together in host memory: with --no-sharded_checkpoints under FSDP2 that of all ranks on rank "
    "0; --async_checkpointing takes a copy of what each rank writes"
)


@dataclass(eq=False)
class Trainer:
    """Training loop over the optimizer steps of a state's network.

    Attributes:
        state: the run, new or restored from a checkpoint.
        schedule: learning rates.
        callbacks: watchers, in order.
        activations: chooses what blocks store, or None if the options decide it.
    """

    state: TrainState
    schedule: Schedule
    callbacks: list[Callback] = field(default_factory=list)
    activations: ActivationPlanner | None = None
    _may_reserve_memory = True  # until the first step or save
    _is_updating = False  # weights and step do not belong together
    _blocked_s = 0.0  # how long training has waited for checkpoints since the last record

    def __post_init__(self) -> None:
        state = self.state
        self.saving = BackgroundSave(parallel=state.parallel, watchdog=state.watchdog)
        self._peak_flops = peak_flops(state.parallel.device)
        self._hardware = hardware_monitor(state.parallel)
        self._saved_step = state.step  # of the checkpoint that the run resumed from, or wrote last

    def run(self) -> None:
        """Train from the current step to the last, then save; a stop request ends the run earlier with a checkpoint."""
        state = self.state
        state.transformer.train()
        with self._running():
            self._begin()
            while not state.is_last_step and state.stopped_by is None:
                state.watchdog.enter("step")
                self._run_until_rollback()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Watch requests, hardware, interrupts and memory within the block; at its end, call `on_stop` of callbacks."""
        hardware_monitoring = contextlib.nullcontext() if self._hardware is None else self._hardware.running()
        with (
            self._call_on_stop(),
            self.state.requests.watched(),
            self.saving.running(),
            hardware_monitoring,
            phase(TRAINING_STEP),
            self._save_on_interrupt(),
            advise_on_oom("training"),
        ):
            yield

    @contextlib.contextmanager
    def _call_on_stop(self) -> Iterator[None]:
        """Call `on_stop` of every callback at the end of the block; an error of the block takes precedence."""
        try:
            yield
        except BaseException as error:
            for callback in self.callbacks:
                try:
                    callback.on_stop(self.state)
                except Exception as stop_error:
                    name = type(callback).__name__
                    logger.error("on_stop of %s failed after %s: %r", name, type(error).__name__, stop_error)
            raise
        for callback in self.callbacks:
            callback.on_stop(self.state)

    @contextlib.contextmanager
    def _save_on_interrupt(self) -> Iterator[None]:
        """Save the last complete step if an exception ends the block that leaves it intact.

        That is one of the host program's signal handlers, or an error between steps, on all ranks.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as interrupt:
            # A second signal ends the run at once.
            if self.state.requests.signals.received is None:
                self._save_interrupted(type(interrupt).__name__, self._interrupted_problem())
            raise
        except ExpectedError as error:
            if error.is_resumable and not self._is_updating:
                can_stop = self.state.method.can_stop_after(self.state.step)
                self._save_interrupted(type(error).__name__, None if can_stop else self._rollouts_only)
            raise

    def _save_interrupted(self, by: str, problem: str | None) -> None:
        """Save the last complete step, or log which steps are lost for which problem."""
        state, step = self.state, self.state.step
        if step > self._saved_step and problem is None:
            logger.warning("%s: saving a checkpoint of step %d; a second interrupt stops at once", by, step)
            state.requests.stop = by  # not in the background
            try:
                self._save()
            except Exception as error:  # the interrupt is what ends the run
                problem = repr(error)
                logger.error("saving %s failed", checkpoints_dir(state.run_dir.root) / f"step-{step}", exc_info=error)
        if step > self._saved_step:
            lost = f"steps {self._saved_step + 1} to {step} are not saved: {problem}"
            newest = (
                f"the newest checkpoint is of step {self._saved_step}" if self._saved_step else "there is no checkpoint"
            )
            logger.warning("%s within step %d; %s; %s", by, step + 1, lost, newest)
        elif not step:
            logger.warning("%s before the first step was complete; there is nothing to save yet", by)
        else:
            state.run_dir.event("stopped", step=step, by=by)
            print_stopped(step=step, by=by, resume_command=state.run_dir.resume_command)

    def _interrupted_problem(self) -> str | None:
        """Return why an interrupted step leaves a state that cannot be saved, or None if it can."""
        state, parallel = self.state, self.state.parallel
        if parallel.world_size > 1 or not parallel.weights_are_movable or parallel.saves_optimizer_itself:
            return "other processes have continued; let the run handle signals (handle_signals=True)"
        if self._is_updating or (state.ema is not None and state.ema.is_applied):
            return "weights were being changed"
        fits = getattr(state.method, "fits_last_step", not state.method.state_dict())  # else it may be that of the next
        if not state.method.can_stop_after(state.step) or not fits:
            return self._rollouts_only
        return None

    @property
    def _rollouts_only(self) -> str:
        return f"--method {self.state.config.training.method} resumes between rollouts only"

    def _begin(self) -> None:
        """Probe memory if the options ask for it, and call `on_start` of callbacks."""
        state = self.state
        if state.step < state.total_steps and wants_memory_probe(state.config.memory.dry_batches, state.parallel):
            state.watchdog.enter("step")
            probe_memory(state, accumulate_gradients)
        state.memory.begin_training()
        state.wants_samples |= any(type(each).on_samples is not Callback.on_samples for each in self.callbacks)
        state.watchdog.enter("sampling")
        self._call_samplers("on_start")

    def _run_until_rollback(self) -> None:
        """Train until the last step, a stop, or a rollback."""
        state, every = self.state, self.state.config.run.logging_steps
        records: list[Record] = []  # since the last one that was logged
        seconds = 0.0  # of fetching and stepping, without saving and sampling
        steps = state.method.steps(state.step + state.data_ahead, state.transformer)
        started = self._begin_interval()
        for step in islice(steps, state.total_steps - state.step):
            blocked_s = self._blocked_s
            begin_work(_largest_latent_size(step))
            record = self.train_step(step)
            begin_work(None)  # callbacks also run below
            del step  # the method needs the memory for the next one
            if record is None:
                self._roll_back()
                return
            records.append(record)
            seconds += time.perf_counter() - started - (self._blocked_s - blocked_s)
            if state.step % every == 0 or state.step == state.total_steps:
                self._log_interval(records, seconds)
                records, seconds = [], 0.0
            self._poll()
            self._finish_if_requested()
            if state.is_last_step and records:
                self._log_interval(records, seconds)
            self._save_if_due()  # before sampling, which may run out of memory
            if state.stopped_by is not None:
                return
            self._sample_if_due()
            if _is_save_requested(state):  # by the hooks that have just run
                self._save(replace=True)
            if state.stopped_by is not None or state.is_last_step:
                return
            state.watchdog.enter("step")
            started = self._begin_interval()

    def _begin_interval(self) -> float:
        """Return the start time of a step, and forget the operations that sampling and probing took before it."""
        if self.state.meter is not None:
            self.state.meter.take()
        return time.perf_counter()

    def train_step(self, step: Step[Any]) -> Record | None:
        """Take an optimizer step: gradients, all-reduce, clipping, the check for NaN, the update.

        A step without micro-batches changes no weight.

        Returns:
            The step's metrics, averaged over all ranks, or None if the run must be rolled back.
        """
        state, parallel, guards = self.state, self.state.parallel, self.state.guards
        for event in step.events:
            state.run_dir.event(step=state.step + 1, **event)
        fault_point("step")
        totals: dict[str, Tensor | float] = {}
        started = time.perf_counter()
        if len(step):
            self.schedule.apply(state.optimizer, state.step)
            step_in_backward = get_step_in_backward(state.optimizer)
            if step_in_backward is not None:  # weights change from here on
                self._is_updating = True
                self._blocked_s += state.staging.wait()
            for attempt in self._attempts(step):
                started = time.perf_counter()
                with attempt:
                    totals = {**accumulate_gradients(state, attempt)}
            grad_norm = self._exchange_and_clip(step_in_backward)
            if grad_norm is not None:
                totals["grad_norm"] = grad_norm
        totals |= step.metrics
        if state.meter is not None:
            totals |= state.meter.take()
        # The step's one wait for the device, before the update: NaN must not get into the weights.
        record = parallel.mean(totals)
        self._replan_activations(step, record, seconds=time.perf_counter() - started)
        self._is_updating = True
        action = guards.nonfinite.choose_action(state.step + 1, record)
        if action == "update" and len(step):
            record |= guards.spikes.check_step(state.step + 1, record)
            self._update()
        elif action != "update":
            record = {name: value for name, value in record.items() if math.isfinite(value)}
            record["nonfinite_steps"] = float(guards.nonfinite.count)
            self._skip_update()
        if action == "rollback":
            return None
        state.step += 1
        self._is_updating = False
        return record

    @advise_on_oom("exchanging and clipping gradients")
    def _exchange_and_clip(self, step_in_backward: StepInBackward | None) -> Tensor | None:
        """Average gradients over ranks, pass them to callbacks, and clip them; return their norm before clipping."""
        parallel = self.state.parallel
        with record_function("exchange and clip"):
            parallel.all_reduce()
            fault_point("backward", parallel.gradients())
            if step_in_backward is not None:
                return step_in_backward.take_norm()
            parallel.unscale_gradients()
            for callback in self.callbacks:
                callback.on_gradients(self.state)
            return parallel.clip_grad_norm()

    def _attempts(self, step: Step[Any]) -> Iterable[Attempt]:
        """Return attempts at a step, which an OOM repeats in smaller micro-batches; the meter counts the last one."""
        attempts, meter = self.state.guards.memory.attempts(step, flags=self._collect_flags), self.state.meter
        return attempts if meter is None else meter.count_last(attempts)

    def _collect_flags(self) -> list[int]:
        """Return this rank's stop, save and sample requests, and whether its thread is writing a save."""
        return [*self.state.requests.collect_pending(), int(self.saving.is_writing)]

    def _poll(self) -> None:
        """Apply requests from outside, and conclude a save that has ended on all ranks.

        The ranks exchange their flags with the step's OOM check, or here if the step has none, as with FSDP2. A single
        process exchanges nothing, and applies requests that came while the weights were updated.
        """
        guard, parallel = self.state.guards.memory, self.state.parallel
        agreed, guard.agreed_flags = guard.agreed_flags, None  # None after a step without micro-batches
        if agreed is None or parallel.world_size == 1:
            agreed = parallel.max_on_host(self._collect_flags())
        *requests, writing = agreed
        self.state.requests.apply(requests)
        self.saving.poll(writing)

    def _finish_if_requested(self) -> None:
        """Make this step the last one if a callback has requested it, and the run can be resumed from here."""
        state = self.state
        if state.requests.finish is not None and not state.is_last_step and state.method.can_stop_after(state.step):
            state.finished_by = state.requests.finish
            state.run_dir.event("finish_requested", step=state.step, by=state.finished_by)

    def _replan_activations(self, step: Step[Any], record: Record, *, seconds: float) -> None:
        """Let the planner adapt what blocks store to the measured step."""
        if self.activations is not None:
            self.activations.replan(self.state, step, seconds=seconds, operations=record.get("flops"))

    @advise_on_oom("updating the weights")
    def _update(self) -> None:
        """Step the optimizer and the moving average."""
        state = self.state
        fault_point("update")
        self._blocked_s += state.staging.wait()
        # Stochastic rounding draws too, and ranks that round differently would hold different weights.
        _seed_global(state.parallel.device, derive_seed(state.config.training.seed, "optimizer", state.step))
        with record_function("update weights"):
            state.optimizer.step()
        state.optimizer.zero_grad()
        if state.ema is not None and not getattr(state.optimizer, "step_was_skipped", False):
            state.ema.update()

    def _skip_update(self) -> None:
        """Drop the gradients of a step that must not become an update."""
        scaler = self.state.parallel.scaler
        if scaler is not None:
            # Not `step`: it skips only if gradients are not finite, and perhaps only the loss is not.
            scaler.update()
        self.state.optimizer.zero_grad()

    def _roll_back(self) -> None:
        self.state.watchdog.enter("checkpoint")  # it is waited for, verified and read
        self.saving.wait()  # it may be the newest
        roll_back(self.state)
        self._saved_step, self._is_updating = self.state.step, False
        for callback in self.callbacks:
            callback.on_back(self.state)
        self.state.parallel.barrier()

    @advise_on_oom("saving a checkpoint", _SAVE_MEMORY_ADVICE)
    def _save_if_due(self) -> None:
        """Save every N steps and at the end; on a request or a stop, after the next step that can be resumed from."""
        state = self.state
        every = state.config.training.checkpointing_steps
        is_due = state.is_last_step or (every > 0 and state.step % every == 0)
        if is_due or _is_save_requested(state):
            self._save()
        else:
            self._reserve_save_memory()

    @advise_on_oom("saving a checkpoint", _SAVE_MEMORY_ADVICE)
    def _save(self, *, replace: bool = False) -> None:
        """Save this step, and end the run if a stop was requested.

        Args:
            replace: whether to replace this step's checkpoint, because hooks have changed state since, such as that of
                a guard.
        """
        state, requests = self.state, self.state.requests
        stops = _is_save_requested(state) and requests.stop is not None
        if replace or self._saved_step != state.step:
            state.watchdog.enter("checkpoint", "save")
            started = time.perf_counter()
            with phase(CHECKPOINT):
                save_checkpoint(state, self.saving)
            self._blocked_s += time.perf_counter() - started
            self._saved_step = state.step
        requests.save = self._may_reserve_memory = False
        if stops and not state.is_last_step:
            state.stopped_by = requests.stop

    def _reserve_save_memory(self) -> None:
        """Reserve host memory for asynchronous saves, once: after the first step, unless that step was saved."""
        training, step = self.state.config.training, self.state.step
        every = training.checkpointing_steps
        follows = every > 0 and step // every * every + every < self.state.total_steps
        if self._may_reserve_memory and follows and training.async_checkpointing:
            reserve_memory(self.state, self.saving)
        self._may_reserve_memory = False

    @advise_on_oom("sampling or evaluating")
    def _sample_if_due(self) -> None:
        """Let the callbacks sample and evaluate."""
        state, requests = self.state, self.state.requests
        requested = requests.sample
        if requested and not any(callback.samples for callback in self.callbacks):
            logger.warning("samples requested, but there are no validation prompts and no held-out items")
        state.watchdog.enter("sampling")
        self._call_samplers("on_step")
        # A request by these hooks is fulfilled after the next step: some of the callbacks have had their turn.
        # After the last step everything is sampled anyway.
        requests.sample = requests.sample and not requested and not state.is_last_step
        self._log(state.memory.take_validation_record(is_last=state.is_last_step))

    def _call_samplers(self, hook: Literal["on_start", "on_step"]) -> None:
        """Call a hook of all callbacks, log the numbers that they return, and pass on the samples that they draw."""
        state = self.state
        for callback in self.callbacks:
            begin_work(None)
            self._log(getattr(callback, hook)(state))
            samples, state.samples = state.samples, None
            if samples is not None:
                for listener in self.callbacks:
                    self._log(listener.on_samples(state, samples))

    def _log_interval(self, records: list[Record], seconds: float) -> None:
        """Log the steps since the last record, with the seconds of saving and those of waiting for a slow rank."""
        state, every = self.state, self.state.config.run.logging_steps
        record = summarize_records(records, seconds=seconds, every=every, summaries=state.method.summaries)
        record = with_rates(record, num_ranks=state.parallel.data_size, peak=self._peak_flops)
        record |= self.schedule.record(state.step - 1)
        if self._blocked_s:
            record["checkpoint_s"] = self._blocked_s
            self._blocked_s = 0.0
        waiting = state.guards.straggler.check_interval(state.step, steps=len(records), step_s=record["step_s"])
        hardware = {} if self._hardware is None else self._hardware.take_record()
        self._log({**record, **waiting, **hardware, **state.memory.take_record()})

    def _log(self, record: Record | None) -> None:
        """Pass numbers of the current step, if any, to all callbacks; the names are the same on every rank."""
        if record is None:
            return
        record = {"step": self.state.step, **record}
        for callback in self.callbacks:
            callback.on_log(self.state, record)

    def record_memory(self) -> None:
        """Record the peak memory of all processes in each phase; every rank must call it."""
        state = self.state
        state.memory.gather_peaks(state.parallel)
        tiled_sizes = sorted("x".join(map(str, size)) for size in state.spec.vae_too_large)
        tiled = {"vae_tiled_from": tiled_sizes} if tiled_sizes else {}
        state.run_dir.event("memory", step=state.step, gib=state.memory.all_peaks, **tiled)

    def finish(self) -> None:
        """Tell the callbacks that the results, or the checkpoint of a run that was stopped, are on disk."""
        for callback in self.callbacks:
            if self.state.watchdog.section != "exporting":
                self.state.watchdog.enter("exporting")
            callback.on_end(self.state)
        if self.state.requests.sample and self.state.parallel.is_main:
            logger.warning("samples requested, but the run has ended")


def _is_save_requested(state: TrainState) -> bool:
    """Return whether a checkpoint or a stop was requested, and the run can be resumed from this step."""
    requests = state.requests
    return (requests.save or requests.stop is not None) and state.method.can_stop_after(state.step)


def _largest_latent_size(step: Step[Any]) -> tuple[int, ...] | None:
    """Return the latent size of a step's largest micro-batch, which decides its duration, or None if it has none."""
    sizes = [(math.prod(item.latent_size) * len(item), item.latent_size) for item in step.items]
    return max(sizes)[1] if sizes else None


def accumulate_gradients(state: TrainState, micro_batches: Attempt) -> dict[str, Tensor]:
    """Run forward and backward of each micro-batch, and return their summed metrics, still on the device."""
    parallel = state.parallel
    parallel.begin_step(len(micro_batches))
    totals: dict[str, Tensor] = {}
    for position, batch in enumerate(micro_batches):
        # Dropout draws from the global generator: seeded by the index in the step, whichever rank has the micro-batch.
        index = position * parallel.data_size + parallel.data_rank
        _seed_global(parallel.device, derive_seed(state.config.training.seed, "step", state.step, index))
        with parallel.accumulate(state.transformer):
            with record_function("loss"):
                loss, metrics = micro_batch_loss(state.method, state.transformer, batch)
            fault_point("loss", (loss, *metrics.values()))
            with record_function("backward"):
                parallel.backward(loss)
        for name, value in metrics.items():
            totals[name] = totals[name] + value if name in totals else value
        del batch, loss, metrics  # before the next one is made
    return totals


def _seed_global(device: torch.device, seed: int) -> None:
    """Seed the global generators that layers and optimizers on `device` draw from."""
    if device.type == "cpu":
        # The same stream as `torch.manual_seed`, which without CUDA formats the call stack each time, 0.4 ms of a step.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
