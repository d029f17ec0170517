"""Rollback: restore the newest checkpoint within a run, and continue with other data."""

from __future__ import annotations

import logging
from pathlib import Path

from finetrainers.plan.trainable import trainable_dtype
from finetrainers.rundir.find import find_checkpoint, read_state

from .checkpoints.restore import load_checkpoint
from .guards.nonfinite import AS_LOADED, NonFiniteError
from .state import TrainState
from .trained_weights import load_lora_weights

logger = logging.getLogger(__name__)


def roll_back(state: TrainState) -> None:
    """Restore the newest verified checkpoint on all ranks, and skip the data from there to the step that failed.

    Everything random in a step follows from its position in the data, so the same data would fail in the same way.
    Weights, optimizer, averages, the step and with it the learning rate are restored; the data continues after that of
    the failed step. The number of updates of the run stays the same.

    Raises:
        NonFiniteError: there is no checkpoint yet that could be used.
    """
    failed, ahead = state.step + 1, state.data_ahead
    fits = state.guards.memory.fitting_samples
    directory = _find_newest(state)
    restore_weights(state, directory)
    load_checkpoint(state, directory)
    ahead += failed - state.step
    while not state.method.can_stop_after(state.step + ahead):  # a rollout is skipped as a whole
        ahead += 1
    state.data_ahead = ahead
    state.guards.memory.fitting_samples = fits  # sizes that were learned since still hold
    if state.parallel.is_main:
        state.run_dir.rewind(state.step)
    state.run_dir.event("rollback", step=state.step, failed=failed, data_ahead=ahead, path=str(directory))
    logger.warning(
        "rolled back from step %d to the checkpoint of step %d; the data in between is skipped", failed, state.step
    )


def _find_newest(state: TrainState) -> Path:
    """Return the newest checkpoint that rank 0 finds complete."""
    path, problem = None, ""
    if state.parallel.is_main:
        try:
            path = find_checkpoint("latest", state.run_dir.root)
            if path is not None and read_state(path)["step"] < state.oldest_rollback_step:
                path, problem = None, f"{path} was saved before --reset took effect"
        except ValueError as error:
            problem = str(error)
    path, problem = state.parallel.broadcast_object((path, problem))
    if path is None:
        advice = AS_LOADED if state.step == 0 else "Lower --lr, or save more often with --checkpointing_steps"
        raise NonFiniteError(
            f"step {state.step + 1} was not finite, and there is no checkpoint to roll back to: {problem}. {advice}"
        )
    return path


def restore_weights(state: TrainState, directory: Path) -> None:
    """Load a checkpoint's trained weights into the network as it is, wrapped; every rank reads them for itself."""
    network = state.network
    if state.config.training.training_type == "lora":
        load_lora_weights(directory, network)
    else:
        folder = directory / state.spec.facts.trained  # host memory holds a second network meanwhile
        saved = state.spec.load_transformer(trainable_dtype(state.config), folder=folder)
        network.load_state_dict(saved.state_dict())
