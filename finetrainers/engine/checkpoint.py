"""Checkpoints of the whole training state: written under a temporary name, then renamed, then old ones pruned.

A checkpoint `checkpoints/step-N/` holds the trained weights in diffusers layout, the optimizer, the moving average,
the gradient scaler and `state.json`. There is no random state to keep: every draw is derived from its step or sample.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from finetrainers.optim.factory import safe_globals
from finetrainers.utils.files import fsync_dir, fsync_tree, write_json_atomic

from .resume import FORMAT, checkpoints_dir, list_checkpoints
from .trainable import save_weights

if TYPE_CHECKING:
    from .trainer import Trainer


def save_checkpoint(trainer: Trainer) -> Path:
    """Save the state after the trainer's current step; every rank must call it.

    Raises:
        Exception: whatever kept any rank from writing, on every rank; older checkpoints are left alone.
    """
    parallel = trainer.parallel
    final = checkpoints_dir(trainer.run_dir.root) / f"step-{trainer.step}"
    temporary = final.with_name(f".{final.name}.tmp")
    if parallel.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    parallel.barrier()

    error: Exception | None = None
    try:
        _write(trainer, temporary)
    except Exception as caught:
        error = caught
    parallel.raise_if_any_failed(error, f"saving {final}")
    if parallel.is_main:
        fsync_tree(temporary)
        replaced = final.with_name(f".{final.name}.old")
        if final.exists():  # the step was reached again; the old one goes only when the new one is there
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        fsync_dir(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        _prune(trainer)
        trainer.run_dir.event("checkpoint", step=trainer.step, path=str(final))
    parallel.barrier()
    return final


def _write(trainer: Trainer, directory: Path) -> None:
    parallel = trainer.parallel
    weights = parallel.full_state(trainer.transformer)
    if parallel.is_deepspeed:
        engine = parallel.accelerator.deepspeed_engine_wrapped.engine
        engine.save_checkpoint(str(directory / "deepspeed"), tag="state", exclude_frozen_parameters=True)
    optimizer_state = _optimizer_state(trainer)
    if not parallel.is_main:
        return
    save_weights(
        directory,
        spec=trainer.spec,
        transformer=parallel.unwrap(trainer.transformer),
        state_dict=weights,
        training=trainer.config.training,
        dtype=None,
    )
    if optimizer_state is not None:
        torch.save(optimizer_state, directory / "optimizer.pt")
    if trainer.ema is not None:
        save_file(trainer.ema.state_dict()["shadow"], directory / "ema.safetensors")
    if parallel.accelerator.scaler is not None:
        torch.save(parallel.accelerator.scaler.state_dict(), directory / "scaler.pt")
    method_state = trainer.method.state_dict()
    if method_state:
        torch.save(method_state, directory / "method.pt")
    write_json_atomic(
        directory / "state.json",
        {
            "format": FORMAT,
            "step": trainer.step,
            "total_steps": trainer.total_steps,
            "critical": trainer.critical,
            "ema_updates": None if trainer.ema is None else trainer.ema.state_dict()["num_updates"],
        },
    )


def _optimizer_state(trainer: Trainer) -> dict[str, Any] | None:
    """The optimizer's state on rank 0; DeepSpeed has written its own, FSDP gathers shards (on all ranks)."""
    if trainer.parallel.is_deepspeed:
        return None
    if trainer.parallel.is_fsdp:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(trainer.transformer, trainer.optimizer.optimizer, options=options)
    return trainer.optimizer.state_dict()


def _prune(trainer: Trainer) -> None:
    """Keep the newest `checkpointing_limit`; only after a new one has been published."""
    limit = trainer.config.training.checkpointing_limit
    if limit is None:
        return
    older = [entry for entry in list_checkpoints(trainer.run_dir.root) if entry[0] <= trainer.step]
    for _, path in older[:-limit]:
        shutil.rmtree(path)


def load_checkpoint(trainer: Trainer, directory: Path) -> None:
    """Restore optimizer, moving average, scaler, method and step. Weights are loaded before wrapping.

    That the checkpoint fits the run was checked before anything was loaded (`check_resumable`).
    """
    state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    parallel = trainer.parallel
    if parallel.is_deepspeed:
        engine = parallel.accelerator.deepspeed_engine_wrapped.engine
        engine.load_checkpoint(str(directory / "deepspeed"), tag="state", load_module_strict=False)
    else:
        with torch.serialization.safe_globals(safe_globals()):
            loaded = torch.load(directory / "optimizer.pt", map_location="cpu", weights_only=True)
        _load_optimizer(trainer, loaded)
    if trainer.ema is not None:
        trainer.ema.load_state_dict(
            {"shadow": load_file(directory / "ema.safetensors"), "num_updates": state["ema_updates"]}
        )
    scaler_file = directory / "scaler.pt"
    if parallel.accelerator.scaler is not None:
        if not scaler_file.is_file():
            raise ValueError(
                f"{directory} was saved without an fp16 gradient scaler, and this run uses one; use the same "
                "--mixed_precision and kind of device"
            )
        parallel.accelerator.scaler.load_state_dict(torch.load(scaler_file, weights_only=True))
    method_file = directory / "method.pt"
    method_state = torch.load(method_file, map_location="cpu", weights_only=True) if method_file.is_file() else {}
    trainer.method.load_state_dict(method_state)
    trainer.step = state["step"]


def _load_optimizer(trainer: Trainer, state: dict[str, Any]) -> None:
    if trainer.parallel.is_fsdp:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        set_optimizer_state_dict(trainer.transformer, trainer.optimizer.optimizer, state, options=options)
        return
    trainer.optimizer.load_state_dict(state)
