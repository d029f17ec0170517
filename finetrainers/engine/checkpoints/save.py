"""Checkpoints of the whole training state: snapshot, write under a temporary name, seal, rename, prune older ones.

With `--async_checkpointing` all from the writing on happens in a thread, on a copy of the snapshot in host memory. The
thread makes that copy too, and training waits for it before it changes what is copied.

A checkpoint `checkpoints/step-N/` holds the trained weights in diffusers layout, the optimizer, the moving average,
what the method keeps, `state.json`, and `manifest.json` over all of these. Every weight is in a safetensors file. There
is no random state to keep: every draw is derived from its step or sample.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from finetrainers.parallel.strategy import below_wrapper
from finetrainers.utils.failures import ExpectedError
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import write_json_atomic
from finetrainers.utils.hashed_files import HashedFile, Written, save_safetensors

from ..run_dir import package_versions
from ..state import TrainState
from ..trainable import save_weights, trainable_parameters
from .async_save import BackgroundSave
from .find import FORMAT, checkpoints_dir
from .publish import discarded_on_error, prune, publish, published_size, reserve, temporary_of
from .staging import Staging, parts_of, tensors_in

logger = logging.getLogger(__name__)

#: Room asked for beyond the tensors' own bytes: headers, JSON, what the file system takes.
_SPARE = 1 << 20
#: What DeepSpeed writes by itself, per trained weight: fp32 weight and two moments.
_DEEPSPEED_BYTES = 12
_METHOD_FILE = "method.safetensors"


class DivergedError(ExpectedError, FloatingPointError):
    """Weights or averages are no numbers any more."""


@dataclass(frozen=True)
class Snapshot:
    """What rank 0 writes. Writing and publishing need nothing else of the run.

    Attributes:
        state: `state.json`.
        trained: the trained weights by name, as they are written.
        write_weights: see `trainable.save_weights`; its `tensors` are these, or a copy.
        files: the other tensors, by the safetensors file that they go to.
        optimizer: its state; None where the strategy writes its own.
        facts: what the manifest says besides the files.
    """

    state: dict[str, Any]
    trained: dict[str, Tensor]
    write_weights: Callable[..., dict[Path, Written]]
    files: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any] | None
    facts: dict[str, Any]

    @property
    def content(self) -> tuple[Any, ...]:
        """What refers to the training's own tensors."""
        return self.state, self.trained, self.files, self.optimizer

    def on_host(self, staging: Staging, *, spare: Iterable[Tensor] = ()) -> tuple[Snapshot, Callable[[], None]]:
        """A copy in host memory, which no later step changes; the snapshot itself refers to the training's own tensors.

        Args:
            staging: has the memory.
            spare: see `Staging.begin`.

        Returns:
            The copy, and what fills it; see `Staging.begin`.
        """
        # A method changes its tensors when it likes, the others change in the update and for sampling.
        copied, fill = staging.begin(self.content, at_once=self.files.get(_METHOD_FILE, {}), spare=spare)
        state, trained, files, optimizer = copied
        return replace(self, state=state, trained=trained, files=files, optimizer=optimizer), fill

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = tensors_in([self.trained, self.files, self.optimizer])
        return sum(part.nbytes for tensor in tensors for part in parts_of(tensor))

    def check_finite(self) -> None:
        """Refuse to save weights or averages that are not numbers: such a checkpoint is worth less than an older one.

        Raises:
            DivergedError: naming the first tensor that holds NaN or an infinity.
        """
        for place, tensors in {"weights": self.trained, **self.files}.items():
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
                    raise DivergedError(
                        f"{name} ({place}) holds NaN or Inf at step {self.state['step']}: training has diverged, and no "
                        "checkpoint of it is published. Continue from an earlier one with a lower --lr or --max_grad_norm"
                    )

    def write(self, directory: Path) -> dict[Path, Written]:
        """Write everything but the manifest into an existing directory.

        Returns:
            What was hashed on the way: all that is large.
        """
        written = dict(self.write_weights(directory, tensors=self.trained))
        fault_point("save.write")
        if self.optimizer is not None:
            path = directory / "optimizer.pt"
            with HashedFile(path) as file:
                torch.save(self.optimizer, cast(IO[bytes], file))  # it only writes and flushes
            written[path] = file.written()
        for name, tensors in self.files.items():
            on_host = {key: tensor.detach().cpu() for key, tensor in tensors.items()}
            written[directory / name] = save_safetensors(on_host, directory / name)
        write_json_atomic(directory / "state.json", self.state)
        return written


def save_checkpoint(state: TrainState, background: BackgroundSave) -> Path:
    """Save the state after its current step, or begin to; every rank must call it.

    With `--async_checkpointing` a thread of `background` writes a copy, unless the run ends here.

    Returns:
        Where the checkpoint is, or will be.

    Raises:
        DivergedError: a weight or an average is NaN or infinite.
        OSError: the disk has no room, or cannot be written.
        Exception: whatever else kept any rank from writing, this time or in the background at the save before. On every
            rank; older checkpoints are left alone.
    """
    started = time.perf_counter()
    parallel = state.parallel
    final = checkpoints_dir(state.run_dir.root) / f"step-{state.step}"
    what = f"saving {final}"
    in_background = _in_background(state)
    _wait_for_previous(state, background)
    with parallel.raise_on_all_ranks(what):
        fault_point("save")
        snapshot = take_snapshot(state)
        if parallel.is_main:
            reserve(final, needed=_bytes_needed(state, snapshot))
    job = None
    with discarded_on_error(final), parallel.raise_on_all_ranks(what):  # in this order: then no rank writes any more
        parallel.save_own_files(temporary_of(final))
        if parallel.is_main:
            job = _job(state, snapshot, final, started=started, in_background=in_background)
    if in_background:
        background.start(job, what=what)
        return final
    with parallel.raise_on_all_ranks(what):
        if job is not None:
            job()
    return final


def reserve_memory(state: TrainState, background: BackgroundSave) -> None:
    """Let the thread of the rank that writes get host memory for the first copy, while training goes on; after an update.

    What is gathered from other processes is not copied, so that there is little to get. Other ranks need not call this: where
    weights are whole, a snapshot asks nobody.
    """
    if state.parallel.is_main and state.parallel.weights_are_whole:
        background.prepare(state.staging.reserve(take_snapshot(state).content))


def _in_background(state: TrainState) -> bool:
    """Whether a thread writes; training ends with the last checkpoint of a run, so that nothing would be gained."""
    if not state.config.training.async_checkpointing:
        return False
    return state.step < state.total_steps and state.requests.stop is None


def _wait_for_previous(state: TrainState, background: BackgroundSave) -> None:
    """Wait for the save in flight: there is one at a time, so that host memory holds one copy at most."""
    started = time.perf_counter()
    if background.wait():
        waited = time.perf_counter() - started
        state.run_dir.event("checkpoint_waited", step=state.step, seconds=round(waited, 3))
        if state.parallel.is_main:
            logger.info("step %d waited %.1f s until the checkpoint before was written", state.step, waited)


def _job(
    state: TrainState, snapshot: Snapshot, final: Path, *, started: float, in_background: bool
) -> Callable[[], None]:
    """All that rank 0 does with a snapshot. In the background with a copy, and no part of the state that changes."""
    run_dir, step, limit = state.run_dir, state.step, state.config.training.checkpointing_limit
    fill: Callable[[], None] | None = None
    if in_background:
        spare: list[Tensor] = []
        if not state.parallel.weights_are_whole:
            sources = [state.transformer.state_dict(), below_wrapper(state.optimizer).state_dict()]
            spare = gathered(snapshot, sources)
        snapshot, fill = snapshot.on_host(state.staging, spare=spare)
    begun = time.perf_counter()

    def write() -> None:
        with discarded_on_error(final):
            if fill is not None:
                fill()
            snapshot.check_finite()
            written = snapshot.write(temporary_of(final))
            publish(temporary_of(final), final, facts=snapshot.facts, written=written)
        now = time.perf_counter()
        blocked = begun + state.staging.waited_s if in_background else now
        times = {"blocked_s": round(blocked - started, 3), "write_s": round(now - begun, 3)}
        run_dir.event("checkpoint", step=step, path=str(final), **times)
        for path in prune(run_dir.root, step=step, limit=limit):
            run_dir.event("checkpoint_removed", path=str(path))

    return write


def take_snapshot(state: TrainState) -> Snapshot:
    """Gather what is to be saved; every rank must call it, the result is complete on rank 0 only."""
    parallel = state.parallel
    trained = parallel.full_state(state.transformer)
    optimizer = parallel.optimizer_state(state.transformer, state.optimizer)
    if state.config.training.training_type == "lora":
        trained = {name: trained[name] for name in trainable_parameters(state.network) if name in trained}
    files = {}
    ema = None if state.ema is None else state.ema.state_dict()
    if ema is not None:
        files["ema.safetensors"] = ema["shadow"]
    method_tensors, method_values = split_state(state.method.state_dict())
    if method_tensors:
        files[_METHOD_FILE] = method_tensors
    scaler = parallel.scaler
    return Snapshot(
        state={
            "format": FORMAT,
            "step": state.step,
            "total_steps": state.total_steps,
            **state.checkpoint_fields,
            "engine": parallel.optimizer_layout,
            "ema_updates": None if ema is None else ema["num_updates"],
            "scaler": None if scaler is None else scaler.state_dict(),
            "method": method_values,
            "guards": {**state.guards.state_dict(), "data_ahead": state.data_ahead},
        },
        trained=trained,
        write_weights=partial(save_weights, state=state),
        files=files,
        optimizer=optimizer,
        facts={
            "format": FORMAT,
            "step": state.step,
            "saved_at": round(time.time(), 3),
            "packages": package_versions(),
            "config": state.config.plain(),
            "data": state.checkpoint_fields["critical"]["data"],
            "tracker_run": state.run_dir.tracker_run,
        },
    )  # fmt: skip


def gathered(snapshot: Snapshot, sources: Any) -> list[Tensor]:
    """Weights and optimizer state that were put together from several processes, in host memory that nothing else uses.

    Args:
        snapshot: which has them.
        sources: the tensors that they were gathered from; what one process has alone may be the same tensor.
    """
    used = {part.untyped_storage().data_ptr() for tensor in tensors_in(sources) for part in parts_of(tensor)}
    return [
        tensor
        for tensor in tensors_in([snapshot.trained, snapshot.optimizer])
        if not is_traceable_wrapper_subclass(tensor)
        and tensor.device.type == "cpu"
        and tensor.untyped_storage().data_ptr() not in used
    ]


def _bytes_needed(state: TrainState, snapshot: Snapshot) -> int:
    """About what the checkpoint will take: its tensors, or, where the strategy adds files of its own, what the last one took."""
    known = snapshot.num_bytes()
    if state.parallel.writes_own_files:
        count = sum(tensor.numel() for tensor in snapshot.trained.values())
        known = published_size(state.run_dir.root) or known + _DEEPSPEED_BYTES * count
    return known + known // 50 + _SPARE


def _is_finite(tensor: Tensor) -> bool:
    """Whether all of a tensor is finite; the extremes carry NaN, and take no second tensor to find."""
    low, high = torch.aminmax(tensor.detach() if tensor.element_size() > 1 else tensor.detach().float())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def split_state(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A nested state as tensors by path (`old/weight`), and the rest in its nested form, for JSON."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        assert "/" not in key, f"{key!r}: paths are joined by slashes"
        if isinstance(value, Tensor):
            tensors[prefix + key] = value
        elif isinstance(value, Mapping):
            inner, values[key] = split_state(value, f"{prefix}{key}/")
            tensors.update(inner)
        else:
            values[key] = value
    return tensors, values
