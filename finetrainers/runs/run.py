"""A training run from a checked configuration: start, steps, results."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from finetrainers.config.errors import ConfigError
from finetrainers.memory.recorder import MemoryRecorder
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.automatic import within_budget
from finetrainers.plan.dry_run import dry_run_report
from finetrainers.plan.init_distributed import make_strategy
from finetrainers.plan.memory_plan import planned_peaks, print_planned
from finetrainers.plan.parts import missing_part_problems
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.plan.ready import examine_weights, get_ready, network_problems
from finetrainers.plan.room import check_room
from finetrainers.plan.start_report import print_memory, print_results, print_stopped, print_warnings
from finetrainers.results.export import export, upload
from finetrainers.results.model_card import comfyui_reads
from finetrainers.results.reports.page import write_run_report
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.rundir.lock import exclusive
from finetrainers.training.assemble import assemble
from finetrainers.training.callbacks.base import Callback
from finetrainers.training.checkpoints.restore import find_damage
from finetrainers.training.guards.hacking import HACKING_GUARD
from finetrainers.training.memory_failure import MemoryFailures
from finetrainers.training.state import TrainState
from finetrainers.training.trainer import Trainer
from finetrainers.training.watchdog import Watchdog
from finetrainers.utils.exit_codes import DONE, GUARDED, STOPPED
from finetrainers.utils.exit_in_time import leave_stacks_in
from finetrainers.utils.faults import arm_faults, fault_point
from finetrainers.utils.phases import CHECKPOINT, LOADING, phase
from finetrainers.utils.progress import working
from finetrainers.utils.train_log import train_log

from .callbacks import check_gradient_hooks, hooks_of_user


def run(
    checked: ResolvedRun,
    *,
    handle_signals: bool = False,
    second_exits: bool = True,
    callbacks: Sequence[Callback] = (),
) -> TrainState | None:
    """Train a checked configuration; return the state of the finished or stopped run, or None after a dry run.

    Args:
        checked: the run to train.
        handle_signals: whether a signal (`control.SIGNALS`) stops the run with a checkpoint; only in the main thread.
        second_exits: see `StopSignals.listen`.
        callbacks: further callbacks, called after the run's own.
    """
    checked = within_budget(checked)
    config = checked.config
    check_gradient_hooks(callbacks, config)
    if problems := [*missing_part_problems(checked.parts, config), *network_problems(checked)]:
        raise ConfigError(problems)
    if config.run.dry_run:
        dry_run_report(checked)
        return None
    checked = examine_weights(checked)
    with contextlib.closing(make_strategy(config)) as parallel:
        watchdog = Watchdog.of_run(
            config.run, rank=parallel.rank, num_ranks=parallel.world_size, owns_process=handle_signals
        )
        leave_stacks_in(watchdog.file)
        memory = MemoryRecorder(parallel.device)
        failures = MemoryFailures(checked, memory, rank=parallel.rank)
        log = config.run.output_dir / "train.log" if config.run.train_log and parallel.is_main else None
        with (
            exclusive(config.run.output_dir, parallel),
            train_log(log),
            watchdog.running(),
            contextlib.closing(parallel),  # within the watchdog: closing a process group may hang
            memory.running(),
            failures.write_on_oom(),
        ):
            watchdog.enter("loading")
            arm_faults()
            fault_point("start")
            checked = _choose_checkpoint_again(checked, parallel)
            print_warnings(check_room(checked, parallel))
            if parallel.is_main:
                print_planned(checked)
            with phase(LOADING):
                trainer = assemble(checked, parallel, watchdog, memory)
            state = failures.state = trainer.state
            trainer.callbacks.extend(hooks_of_user(callbacks, state))
            watchdog.on_slow = partial(_note_slow, state)
            if parallel.is_main and (planned := planned_peaks(checked)):
                state.run_dir.event("memory_planned", step=state.step, gib=planned)
            # Before this point a signal ends the process as usual: there is nothing to save yet.
            signals = state.requests.signals.listen(second_exits=second_exits)
            with signals if handle_signals else contextlib.nullcontext():
                trainer.run()
                _conclude(trainer, checked)
    return state


def _choose_checkpoint_again(checked: ResolvedRun, parallel: Strategy) -> ResolvedRun:
    """Return the run, checked again if checkpoints have changed or the chosen one is damaged; all ranks call it."""
    config = checked.config
    # Another run may have saved, and ended, between the choice of a checkpoint and the lock.
    has_changed = parallel.is_main and scan_checkpoints(config.run.output_dir) != checked.checkpoints
    if parallel.broadcast_object(has_changed):
        checked = examine_weights(within_budget(get_ready(config, earlier=checked)))
    damaged: dict[Path, str] = {}
    while damage := find_damage(checked.start, parallel):
        damaged |= damage
        checked = examine_weights(within_budget(get_ready(config, damaged=damaged, earlier=checked)))
    return checked


def _conclude(trainer: Trainer, checked: ResolvedRun) -> None:
    """Export the results and close the records; for a stopped run, only close the records."""
    state = trainer.state
    state.watchdog.enter("exporting")
    trainer.record_memory()
    if state.stopped_by is None:
        with phase(CHECKPOINT), working("writing the results"):
            export(state, checked)
        state.run_dir.event("finished", step=state.step)
        state.watchdog.exit_code = DONE
        trainer.finish()
        state.watchdog.enter("closing")
        fault_point("close")
        _write_report(state)
        print_results(state.run_dir.root, comfyui=comfyui_reads(state.config, checked.facts))
        print_memory(state.memory.all_peaks)
        upload(state)
        return
    # Programs that restart stopped runs look for this event, and must not restart a run that a guard stopped.
    by_guard = state.stopped_by == HACKING_GUARD
    state.run_dir.event("stopped_by_guard" if by_guard else "stopped", step=state.step, by=state.stopped_by)
    state.watchdog.exit_code = GUARDED if by_guard else STOPPED
    trainer.finish()
    state.watchdog.enter("closing")
    _write_report(state)
    # Launchers end all processes once one has exited with a code other than 0, and rank 0 has records to close.
    state.parallel.barrier()
    guard = state.guards.hacking if by_guard else None
    command = state.run_dir.resume_command if guard is None else state.run_dir.resume_from(guard.way_back)
    print_stopped(step=state.step, by=state.stopped_by, resume_command=command)


def _note_slow(state: TrainState, section: str, seconds: float, median: float) -> None:
    """Record that a section takes much longer than usual."""
    state.run_dir.event(
        "slow_section", step=state.step, section=section, seconds=round(seconds, 3), median=round(median, 3)
    )


def _write_report(state: TrainState) -> None:
    if state.parallel.is_main:
        write_run_report(state.run_dir.root)
