"""Restore the state of a run from a checkpoint; weights are loaded before wrapping."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetrainers.config.errors import ConfigError
from finetrainers.optim.table import OPTIMIZERS, resolve_name
from finetrainers.parallel.ranks import DistributedContext
from finetrainers.parallel.slices import SLICES_FOLDER
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.init_distributed import layout_problem
from finetrainers.plan.parts import has_part
from finetrainers.plan.resume_plan import Start
from finetrainers.rundir.find import read_state
from finetrainers.rundir.manifest import MANIFEST, damage, read_manifest
from finetrainers.utils.failures import InputError
from finetrainers.utils.faults import fault_point
from finetrainers.utils.headers import load_tensors

from ..state import TrainState

_METHOD_FILE = "method.safetensors"


def check_restorable(start: Start, parallel: Strategy) -> None:
    """Check, before loading, that all ranks have the same checkpoint and this strategy can read its optimizer state.

    Raises:
        ConfigError: the state was saved by another strategy.
        RuntimeError: the ranks have found different checkpoints.
    """
    checkpoint = str(start.checkpoint)
    agreed = parallel.broadcast_object(checkpoint)
    error = None
    if checkpoint != agreed:
        error = RuntimeError(
            f"rank {parallel.rank} would start from {checkpoint}, rank 0 from {agreed}; all ranks must see the same "
            "disk"
        )
    parallel.raise_if_any_failed(error, "choosing a checkpoint")
    if (problem := layout_problem(start, parallel)) is not None:
        raise ConfigError([problem])


def find_damage(start: Start, parallel: DistributedContext) -> dict[Path, str]:
    """Return the damage of the checkpoint that a run of several processes starts from; every rank must call it.

    Each byte is read by one of all ranks, or, if each machine has its own disk, by one rank of each machine.

    Returns:
        The checkpoint and the reason, the same on all ranks; empty if it is as it was saved.
    """
    directory = start.checkpoint
    if directory is None or parallel.world_size == 1:
        return {}
    facts = (directory / MANIFEST).stat()
    identity = (platform.node(), facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns)
    identities = parallel.gather_objects([identity])
    # A copy on another machine has been made at another time.
    is_shared = len({other[1:] for other in identities}) == 1
    readers = [rank for rank, other in enumerate(identities) if is_shared or other[0] == identity[0]]
    problem = damage(directory, contents=True, share=(readers.index(parallel.rank), len(readers)))
    problems = parallel.gather_objects([] if problem is None else [problem])
    return {directory: problems[0]} if problems else {}


def restore(state: TrainState, start: Start) -> None:
    """Restore everything except the weights and the parts named by --reset; a new run has nothing to restore."""
    if start.checkpoint is not None:
        load_checkpoint(state, start.checkpoint, resets=start.resets)
        if start.resets & {"optimizer", "ema"}:
            state.oldest_rollback_step = start.step + 1
    state.step = start.step


def load_checkpoint(state: TrainState, directory: Path, *, resets: frozenset[str] = frozenset()) -> None:
    """Restore optimizer, moving average, scaler, method and step. Weights are loaded before wrapping.

    Earlier checks have shown that it is complete (`find_checkpoint`) and fits the run (`resume_run`).

    Args:
        state: of this run, with a wrapped network.
        directory: the checkpoint.
        resets: parts that stay as in a new run: `optimizer`, with the gradient scaler, `ema`, and the position in the
            `data`.
    """
    fault_point("resume")
    saved = read_state(directory)
    if "optimizer" not in resets:
        _restore_optimizer(state, directory, saved)
    if state.ema is not None and "ema" not in resets:
        averages = load_tensors(directory / "ema.safetensors")
        state.ema.load_state_dict({"shadow": averages, "num_updates": saved["ema_updates"]})
    # A file that the manifest does not list is not the checkpoint's.
    has_tensors = _METHOD_FILE in read_manifest(directory)["files"]
    method_tensors = load_tensors(directory / _METHOD_FILE) if has_tensors else {}
    state.method.load_state_dict(join_state(method_tensors, saved["method"]))
    state.guards.load_state_dict(saved["guards"])
    state.data_ahead = 0 if "data" in resets else saved["guards"]["data_ahead"]
    state.step = saved["step"]


def _restore_optimizer(state: TrainState, directory: Path, saved: Mapping[str, Any]) -> None:
    """Restore the optimizer's state and the fp16 gradient scaler's."""
    parallel = state.parallel
    parallel.load_own_files(directory)
    if (directory / SLICES_FOLDER).is_dir():
        parallel.load_optimizer_slices(
            state.transformer, state.optimizer, directory / SLICES_FOLDER, saved["optimizer"]
        )
    elif not parallel.saves_optimizer_itself:
        # Torchao allows the classes of its state when it is imported, as it was to make the optimizer.
        loaded = torch.load(directory / "optimizer.pt", map_location="cpu", weights_only=True)
        parallel.load_optimizer(state.transformer, state.optimizer, loaded)
    # The state brings the options of the run that saved it; this run's options count. A user's optimizer is the same.
    if not has_part(state.config, "optimizer"):
        settings = state.config.optimizer
        arguments = OPTIMIZERS[resolve_name(settings)].arguments(settings)
        for group in state.optimizer.param_groups:
            group.update({name: value for name, value in arguments.items() if name in group})
    if parallel.scaler is None:
        return
    if saved["scaler"] is None:
        raise InputError(
            f"{directory} was saved without an fp16 gradient scaler, and this run uses one; use the same "
            "--mixed_precision and type of device, or start the optimizer from scratch with --reset optimizer",
            "mismatch",
        )
    parallel.scaler.load_state_dict(saved["scaler"])


def join_state(tensors: Mapping[str, Tensor], values: dict[str, Any]) -> dict[str, Any]:
    """Undo `split_state`."""
    for path, tensor in tensors.items():
        *parents, key = path.split("/")
        node = values
        for parent in parents:
            node = node[parent]
        node[key] = tensor
    return values
