"""Checkpoints of the whole training state: snapshot, write under a temporary name, seal, rename, prune older ones.

A checkpoint `checkpoints/step-N/` holds the trained weights in diffusers layout, the optimizer, the moving average,
what the method keeps, `state.json`, and `manifest.json` over all of these. Every weight is in a safetensors file. There
is no random state to keep: every draw is derived from its step or sample.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetrainers.config.load import NOT_DUMPED
from finetrainers.optim.factory import safe_globals
from finetrainers.parallel.engine import Parallel
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import write_json_atomic

from .publish import discard, prune, publish, published_size, reserve
from .resume import FORMAT, checkpoints_dir
from .run_dir import package_versions
from .trainable import save_weights, trainable_parameters

if TYPE_CHECKING:
    from .trainer import Trainer

#: Room asked for beyond the tensors' own bytes: headers, JSON, what the file system takes.
_SPARE = 1 << 20
#: What DeepSpeed writes by itself, per trained weight: fp32 weight and two moments.
_DEEPSPEED_BYTES = 12


@dataclass(frozen=True)
class Snapshot:
    """What rank 0 writes, as references to the training's own tensors.

    Writing and publishing need this and nothing else of the trainer. A writer in the background would take a copy of the
    tensors on the host, and training would go on meanwhile.

    Attributes:
        state: `state.json`.
        trained: the trained weights by name, as they are written.
        write_weights: writes them in diffusers layout into a directory.
        files: the other tensors, by the safetensors file that they go to.
        optimizer: its state; None where the engine writes its own.
        facts: what the manifest says besides the files.
    """

    state: dict[str, Any]
    trained: dict[str, Tensor]
    write_weights: Callable[[Path], None]
    files: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any] | None
    facts: dict[str, Any]

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return _num_bytes(self.trained) + _num_bytes(self.files) + _num_bytes(self.optimizer)

    def check_finite(self) -> None:
        """Refuse to save weights or averages that are not numbers: such a checkpoint is worth less than an older one.

        Raises:
            FloatingPointError: naming the first tensor that holds NaN or an infinity.
        """
        for place, tensors in {"weights": self.trained, **self.files}.items():
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
                    raise FloatingPointError(
                        f"{name} ({place}) holds NaN or Inf at step {self.state['step']}: training has diverged, and no "
                        "checkpoint of it is published. Continue from an earlier one with a lower --lr or --max_grad_norm"
                    )

    def write(self, directory: Path) -> None:
        """Write everything but the manifest into an existing directory."""
        self.write_weights(directory)
        fault_point("save.write")
        if self.optimizer is not None:
            torch.save(self.optimizer, directory / "optimizer.pt")
        for name, tensors in self.files.items():
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, directory / name)
        write_json_atomic(directory / "state.json", self.state)


def save_checkpoint(trainer: Trainer) -> Path:
    """Save the state after the trainer's current step; every rank must call it.

    Raises:
        FloatingPointError: a weight or an average is NaN or infinite.
        OSError: the disk has no room, or cannot be written.
        Exception: whatever else kept any rank from writing. On every rank; older checkpoints are left alone.
    """
    parallel = trainer.parallel
    final = checkpoints_dir(trainer.run_dir.root) / f"step-{trainer.step}"
    temporary = final.with_name(f".{final.name}.tmp")
    with _all_or_none(parallel, f"saving {final}"):
        fault_point("save")
        snapshot = take_snapshot(trainer)
        if parallel.is_main:
            snapshot.check_finite()
            reserve(final, needed=_bytes_needed(trainer, snapshot))
    try:
        with _all_or_none(parallel, f"saving {final}"):
            if parallel.is_deepspeed:
                engine = parallel.accelerator.deepspeed_engine_wrapped.engine
                engine.save_checkpoint(str(temporary / "deepspeed"), tag="state", exclude_frozen_parameters=True)
            if parallel.is_main:
                snapshot.write(temporary)
        with _all_or_none(parallel, f"publishing {final}"):
            if parallel.is_main:
                publish(temporary, final, facts=snapshot.facts)
                trainer.run_dir.event("checkpoint", step=trainer.step, path=str(final))
    except Exception:
        if parallel.is_main:
            discard(final)  # room for the next try; no rank writes any more
        raise
    with _all_or_none(parallel, f"removing checkpoints older than {final}"):
        if parallel.is_main:
            limit = trainer.config.training.checkpointing_limit
            for path in prune(trainer.run_dir.root, step=trainer.step, limit=limit):
                trainer.run_dir.event("checkpoint_removed", path=str(path))
    return final


@contextmanager
def _all_or_none(parallel: Parallel, what: str) -> Iterator[None]:
    """A failure within the block, on any rank, is raised on all; it also waits for all of them."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    parallel.raise_if_any_failed(error, what)


def take_snapshot(trainer: Trainer) -> Snapshot:
    """Gather what is to be saved; every rank must call it, the result is complete on rank 0 only."""
    parallel, training = trainer.parallel, trainer.config.training
    weights = parallel.full_state(trainer.transformer)
    optimizer = _optimizer_state(trainer)
    network = parallel.unwrap(trainer.transformer)
    trained = weights
    if training.training_type == "lora":
        trained = {name: weights[name] for name in trainable_parameters(network) if name in weights}

    def write_weights(directory: Path) -> None:
        save_weights(
            directory, spec=trainer.spec, transformer=network, state_dict=weights, training=training, dtype=None
        )

    files = {}
    ema = None if trainer.ema is None else trainer.ema.state_dict()
    if ema is not None:
        files["ema.safetensors"] = ema["shadow"]
    method_tensors, method_values = _split(trainer.method.state_dict())
    if method_tensors:
        files["method.safetensors"] = method_tensors
    scaler = parallel.accelerator.scaler
    critical = trainer.critical
    return Snapshot(
        state={
            "format": FORMAT,
            "step": trainer.step,
            "total_steps": trainer.total_steps,
            "critical": critical,
            "ema_updates": None if ema is None else ema["num_updates"],
            "scaler": None if scaler is None else scaler.state_dict(),
            "method": method_values,
        },
        trained=trained,
        write_weights=write_weights,
        files=files,
        optimizer=optimizer,
        facts={
            "format": FORMAT,
            "step": trainer.step,
            "saved_at": round(time.time(), 3),
            "packages": package_versions(),
            "config": {k: v for section in trainer.config.model_dump(mode="json").values() for k, v in section.items()
                       if k not in NOT_DUMPED},
            "data": critical["data"],
            "tracker_run": trainer.run_dir.tracker_run,
        },
    )  # fmt: skip


def _bytes_needed(trainer: Trainer, snapshot: Snapshot) -> int:
    """About what the checkpoint will take: its tensors, or, where an engine adds its own files, what the last one took."""
    known = snapshot.num_bytes()
    if trainer.parallel.is_deepspeed:
        count = sum(tensor.numel() for tensor in snapshot.trained.values())
        known = published_size(trainer.run_dir.root) or known + _DEEPSPEED_BYTES * count
    return known + known // 50 + _SPARE


def _num_bytes(value: Any) -> int:
    """Bytes of the tensors anywhere in nested dictionaries and lists."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):  # torchao's states are smaller than the tensors that they stand for
            return sum(_num_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0


def _is_finite(tensor: Tensor) -> bool:
    """Whether all of a tensor is finite; the extremes carry NaN, and take no second tensor to find."""
    low, high = torch.aminmax(tensor.detach() if tensor.element_size() > 1 else tensor.detach().float())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _split(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A nested state as tensors by path (`old/weight`), and the rest in its nested form, for JSON."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        assert "/" not in key, f"{key!r}: paths are joined by slashes"
        if isinstance(value, Tensor):
            tensors[prefix + key] = value
        elif isinstance(value, Mapping):
            inner, values[key] = _split(value, f"{prefix}{key}/")
            tensors.update(inner)
        else:
            values[key] = value
    return tensors, values


def _join(tensors: Mapping[str, Tensor], values: dict[str, Any]) -> dict[str, Any]:
    """Undo `_split`."""
    for path, tensor in tensors.items():
        *parents, key = path.split("/")
        place = values
        for parent in parents:
            place = place[parent]
        place[key] = tensor
    return values


def _optimizer_state(trainer: Trainer) -> dict[str, Any] | None:
    """The optimizer's state on rank 0; DeepSpeed has written its own, FSDP gathers shards (on all ranks)."""
    if trainer.parallel.is_deepspeed:
        return None
    if trainer.parallel.is_fsdp:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(trainer.transformer, trainer.optimizer.optimizer, options=options)
    return trainer.optimizer.state_dict()


def load_checkpoint(trainer: Trainer, directory: Path) -> None:
    """Restore optimizer, moving average, scaler, method and step. Weights are loaded before wrapping.

    That it is whole (`find_checkpoint`) and fits the run (`check_resumable`) was checked before anything was loaded.
    """
    fault_point("resume")
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
    trainer.method.load_state_dict(_join(method_tensors, state["method"]))
    trainer.step = state["step"]


def _load_optimizer(trainer: Trainer, state: dict[str, Any]) -> None:
    if trainer.parallel.is_fsdp:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        set_optimizer_state_dict(trainer.transformer, trainer.optimizer.optimizer, state, options=options)
        return
    trainer.optimizer.load_state_dict(state)
