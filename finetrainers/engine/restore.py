"""Loads a checkpoint into a trainer that has been built and wrapped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from finetrainers.optim.factory import safe_globals

if TYPE_CHECKING:
    from .trainer import Trainer


def load_checkpoint(trainer: Trainer, directory: Path) -> None:
    """Restore optimizer, moving average, scaler, method and step. Weights are loaded before wrapping.

    That it is whole (`find_checkpoint`) and fits the run (`check_resumable`) was checked before anything was loaded.
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
    if parallel.accelerator.scaler is not None:
        if state["scaler"] is None:
            raise ValueError(
                f"{directory} was saved without an fp16 gradient scaler, and this run uses one; use the same "
                "--mixed_precision and kind of device"
            )
        parallel.accelerator.scaler.load_state_dict(state["scaler"])
    method_file = directory / "method.safetensors"
    method_tensors = load_file(method_file) if method_file.is_file() else {}
    trainer.method.load_state_dict(join_state(method_tensors, state["method"]))
    trainer.step = state["step"]


def _load_optimizer(trainer: Trainer, state: dict[str, Any]) -> None:
    if trainer.parallel.is_fsdp:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        set_optimizer_state_dict(trainer.transformer, trainer.optimizer.optimizer, state, options=options)
        return
    trainer.optimizer.load_state_dict(state)


def join_state(tensors: Mapping[str, Tensor], values: dict[str, Any]) -> dict[str, Any]:
    """Undo `split_state`."""
    for path, tensor in tensors.items():
        *parents, key = path.split("/")
        place = values
        for parent in parents:
            place = place[parent]
        place[key] = tensor
    return values
