"""Checkpoints of the whole training state: snapshot, write under a temporary name, seal, rename, prune older ones.

Where processes share the weights of a full finetuning, each of them writes and hashes its part
(`--sharded_checkpoints`): complete weight files, and its slices of the optimizer's state. Rank 0 publishes the
checkpoint when all have ended.

With `--async_checkpointing` writing and all that follows happens in a thread, on a copy of the snapshot in host memory.
The thread also makes that copy, and training waits for it before it changes the tensors that are copied.

A checkpoint `checkpoints/step-N/` holds the trained weights in diffusers layout, the optimizer, the moving average,
the method's state, `state.json`, and `manifest.json` over all of these. All weights are in safetensors files. No random
state needs to be stored: every draw is derived from its step or sample.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from finetrainers.config.root import TrainConfig
from finetrainers.methods.registry import method_spec
from finetrainers.parallel.slices import Slices
from finetrainers.parallel.strategy import DEEPSPEED_FOLDER, Strategy, below_wrapper
from finetrainers.plan.trainable import trainable_parameters
from finetrainers.rundir.find import FORMAT, SLICED_FORMAT, checkpoints_dir
from finetrainers.rundir.identity import RUN
from finetrainers.rundir.links import link_weights, unlink_weights
from finetrainers.rundir.publish import discarded_on_error, prune, publish, published_size, reserve, staging_path
from finetrainers.rundir.run_dir import package_versions
from finetrainers.utils.failures import ExpectedError
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import file_sha256, fsync_file, write_json_atomic
from finetrainers.utils.hashed_files import HashedFile, Written, save_safetensors

from ..staging import Staging, plain_tensors, tensors_in
from ..state import TrainState
from ..trained_weights import save_weights, select_rank_weights, shared_files
from .async_save import BackgroundSave, SaveJob

logger = logging.getLogger(__name__)

#: Bytes reserved beyond those of the tensors: headers, JSON, the file system's own.
_SPARE = 1 << 20
#: Bytes that DeepSpeed writes by itself, per trainable parameter: fp32 weight and two moments.
_DEEPSPEED_BYTES = 12
_METHOD_FILE = "method.safetensors"


class DivergedError(ExpectedError, FloatingPointError):
    """Error for weights or averages that are no longer finite."""


@dataclass(frozen=True)
class Snapshot:
    """State that a rank writes: rank 0 everything, unless ranks share the saving.

    Writing needs nothing else of the run.

    Attributes:
        state: content of `state.json`, or None if another rank writes it.
        trained: the trained weights by name, as they are written.
        write_weights: see `trainable.save_weights`; its `tensors` are these, or a copy.
        files: the other tensors, by the safetensors file that they go to.
        optimizer: its state, or None if it is in slices or the strategy writes it.
        slices: this rank's slices of the optimizer's state, where ranks share the saving.
        facts: entries of the manifest beside the files.
    """

    state: dict[str, Any] | None
    trained: dict[str, Tensor]
    write_weights: Callable[..., dict[Path, Written]]
    files: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any] | None
    facts: dict[str, Any]
    slices: Slices | None = None

    @property
    def content(self) -> tuple[Any, ...]:
        """Everything that refers to the training's own tensors."""
        return self.state, self.trained, self.files, self.optimizer, self.slices and self.slices.tensors

    def on_host(self, staging: Staging, *, unshared: Iterable[Tensor] = ()) -> tuple[Snapshot, Callable[[], None]]:
        """Begin a copy in host memory that no later step changes; the snapshot refers to the training's own tensors.

        Args:
            staging: has the memory.
            unshared: see `Staging.begin_copy`.

        Returns:
            The copy, and the function that fills it; see `Staging.begin_copy`.
        """
        # A method may change its tensors at any time; the others change in the update and for sampling only.
        copied, fill = staging.begin_copy(
            self.content, copied_first=self.files.get(_METHOD_FILE, {}), unshared=unshared
        )
        state, trained, files, optimizer, tensors = copied
        slices = None if self.slices is None else replace(self.slices, tensors=tensors)
        return replace(self, state=state, trained=trained, files=files, optimizer=optimizer, slices=slices), fill

    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(part.nbytes for tensor in tensors_in(self.content) for part in plain_tensors(tensor))

    def check_finite(self) -> None:
        """Refuse to save weights or averages that are not numbers: such a checkpoint is worth less than an older one.

        Raises:
            DivergedError: naming the first tensor that holds NaN or an infinity.
        """
        for file, tensors in {"weights": self.trained, **self.files}.items():
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
                    raise DivergedError(
                        f"{name} ({file}) holds NaN or Inf at step {self.facts['step']}: training has diverged, and "
                        "its checkpoint is not published. Continue from an earlier one with a lower --lr or "
                        "--max_grad_norm"
                    )

    def write(self, directory: Path) -> dict[Path, Written]:
        """Write everything but the manifest into an existing directory.

        Returns:
            Size and hash of the files that were hashed while writing: all large ones.
        """
        written = dict(self.write_weights(directory, tensors=self.trained))
        fault_point("save.write")
        if self.optimizer is not None:
            path = directory / "optimizer.pt"
            with HashedFile(path) as file:
                torch.save(self.optimizer, cast(IO[bytes], file))  # it only writes and flushes
            written[path] = file.written()
        for name, tensors in self.files.items():
            written[directory / name] = save_safetensors(_on_host(tensors), directory / name)
        if self.slices is not None and self.slices.tensors:
            path = directory / self.slices.file
            path.parent.mkdir(exist_ok=True)
            written[path] = save_safetensors(_on_host(self.slices.tensors), path, metadata=self.slices.metadata)
        if self.state is not None:
            write_json_atomic(directory / "state.json", self.state)
        return written


def save_checkpoint(state: TrainState, background: BackgroundSave) -> Path:
    """Save the state after its current step, or begin to; every rank must call it.

    With `--async_checkpointing` a thread of `background` writes a copy, unless the run ends here.

    Returns:
        The path of the checkpoint, which may still have to be written.

    Raises:
        DivergedError: a weight or an average is NaN or infinite.
        OSError: the disk is full, or cannot be written.
        Exception: any other error that kept a rank from writing, now or in the background at the previous save. On
            every rank; older checkpoints are left alone.
    """
    started = time.perf_counter()
    parallel = state.parallel
    final = checkpoints_dir(state.run_dir.root) / f"step-{state.step}"
    description = f"saving {final}"
    training = state.config.training
    # After the last checkpoint of a run, training has ended.
    in_background = training.async_checkpointing and not state.is_last_step and state.requests.stop is None
    _wait_for_previous(state, background)
    with parallel.raise_on_all_ranks(description):
        fault_point("save")
        snapshot = take_snapshot(state)
    sizes = [(snapshot.num_bytes(), sum(tensor.numel() for tensor in snapshot.trained.values()))]
    if state.shares_saving:
        sizes = parallel.gather_objects(sizes)
    with parallel.raise_on_all_ranks(description):
        if parallel.is_main:
            reserve(final, needed=_bytes_needed(state, sizes))
    # In this order, no rank is still writing when the files are discarded.
    with discarded_on_error(final), parallel.raise_on_all_ranks(description):
        parallel.save_own_files(staging_path(final))
        job = _build_job(state, snapshot, final, started=started, in_background=in_background)
    if in_background:
        background.start(job)
    else:
        job.run(parallel)
    return final


def reserve_memory(state: TrainState, background: BackgroundSave) -> None:
    """Reserve host memory for the first copy, in the thread of a rank that writes; call it after an update.

    Every rank must call it. Tensors gathered from other processes are not copied, so they need no memory.
    """
    if state.shares_saving:
        slices = state.parallel.optimizer_slices(state.transformer, state.optimizer)
        if slices is not None:
            background.prepare(state.staging.reserve(slices.tensors))
    elif state.parallel.is_main and state.parallel.weights_are_whole:  # then a snapshot needs no other rank
        background.prepare(state.staging.reserve(take_snapshot(state).content))


def _wait_for_previous(state: TrainState, background: BackgroundSave) -> None:
    """Wait for the save in flight, so that host memory holds one copy at most."""
    started = time.perf_counter()
    if background.wait():
        waited = time.perf_counter() - started
        state.run_dir.event("checkpoint_waited", step=state.step, seconds=round(waited, 3))
        if state.parallel.is_main:
            logger.info("step %d waited %.1f s for the previous checkpoint to be written", state.step, waited)


def _build_job(state: TrainState, snapshot: Snapshot, final: Path, *, started: float, in_background: bool) -> SaveJob:
    """Return the job that saves a snapshot; in the background it uses a copy, and no state that training changes."""
    run_dir, step, limit = state.run_dir, state.step, state.config.training.checkpointing_limit
    is_shared, staging, config = state.shares_saving, state.staging, state.config
    folder = "" if config.training.training_type == "lora" else state.spec.facts.trained

    def links(step: int) -> list[Path]:
        return [run_dir.root / name for name in method_spec(config).weight_links(config, step)]

    writes = is_shared or state.parallel.is_main
    fill = _nothing
    if in_background and writes:
        snapshot, fill = snapshot.on_host(staging, unshared=_unshared(state, snapshot))
    staged = time.perf_counter()

    def write() -> dict[Path, Written]:
        fill()
        snapshot.check_finite()
        written = snapshot.write(staging_path(final))
        if is_shared:  # rank 0 may be on another machine, where it would read and flush its own view of the disk
            written |= _hash_own_files(state.parallel, staging_path(final))
            for path in written:
                fsync_file(path)
        return written

    def publish_parts(parts: Iterable[Mapping[Path, Written]]) -> None:
        files = {path: file for rank_files in parts for path, file in rank_files.items()}
        publish(staging_path(final), final, facts=snapshot.facts, written=files)
        now = time.perf_counter()
        blocked = staged + staging.waited_s if in_background else now
        times = {"blocked_s": round(blocked - started, 3), "write_s": round(now - staged, 3)}
        run_dir.event("checkpoint", step=step, path=str(final), **times)
        link_weights(final / folder, links(step))
        for path in prune(run_dir.root, step=step, limit=limit):
            run_dir.event("checkpoint_removed", path=str(path))
            unlink_weights(links(int(path.name.removeprefix("step-"))))

    def write_all() -> None:
        with discarded_on_error(final):
            publish_parts([write()])

    description = f"saving {final}"
    if is_shared:
        return SaveJob(description, write, publish=publish_parts, discarded=lambda: discarded_on_error(final))
    return SaveJob(description, write_all if writes else None)


def _hash_own_files(parallel: Strategy, directory: Path) -> dict[Path, Written]:
    """Return size and SHA-256 of this rank's share of the files that the strategy has written; all must exist."""
    files = sorted(path for path in (directory / DEEPSPEED_FOLDER).rglob("*") if path.is_file())
    return {
        path: Written(path.stat().st_size, file_sha256(path)) for path in files[parallel.rank :: parallel.world_size]
    }


def shares_saving(config: TrainConfig, parallel: Strategy) -> bool:
    """Return whether each rank writes its part of a checkpoint: with full finetuning, to a disk that all see.

    Every rank must call it; the run's directory must exist, and belong to this run only.
    """
    is_full = config.training.training_type == "full-finetune"
    if not (is_full and config.training.sharded_checkpoints and parallel.shares_saving and parallel.world_size > 1):
        return False
    probe = config.run.output_dir / ".seen_by_all"
    if parallel.is_main:
        probe.touch()
    parallel.barrier()
    unseen = parallel.gather_objects([] if probe.exists() else [parallel.rank])
    if parallel.is_main:
        probe.unlink()
    if unseen and parallel.is_main:
        logger.warning(
            "%s is not on a disk that all machines share (rank %d does not see it): rank 0 gathers and writes each "
            "checkpoint alone", config.run.output_dir, unseen[0],
        )  # fmt: skip
    return not unseen


def take_snapshot(state: TrainState) -> Snapshot:
    """Gather the state to be saved; every rank must call it, the result is complete on rank 0 only."""
    parallel = state.parallel
    files = shared_files(state)
    trained = parallel.full_state(state.transformer, wanted=select_rank_weights(files, parallel))
    slices = parallel.optimizer_slices(state.transformer, state.optimizer) if state.shares_saving else None
    optimizer = None if slices is not None else parallel.optimizer_state(state.transformer, state.optimizer)
    if state.config.training.training_type == "lora":
        trained = {name: trained[name] for name in trainable_parameters(state.network) if name in trained}
    tensors = {}
    ema = None if state.ema is None else state.ema.state_dict()
    writes_rest = parallel.is_main or not state.shares_saving
    if ema is not None and writes_rest:
        tensors["ema.safetensors"] = ema["shadow"]
    method_tensors, method_values = split_state(state.method.state_dict())
    if method_tensors and writes_rest:
        tensors[_METHOD_FILE] = method_tensors
    scaler = parallel.scaler
    layout = FORMAT if slices is None else SLICED_FORMAT
    return Snapshot(
        state={
            "format": layout,
            "step": state.step,
            "total_steps": state.total_steps,
            **state.checkpoint_fields,
            "engine": parallel.optimizer_layout,
            "ema_updates": None if ema is None else ema["num_updates"],
            "scaler": None if scaler is None else scaler.state_dict(),
            "method": method_values,
            "guards": {**state.guards.state_dict(), "data_ahead": state.data_ahead},
            **({} if slices is None else {"optimizer": slices.values}),
        } if writes_rest else None,
        trained=trained,
        write_weights=partial(save_weights, state=state, files=files),
        files=tensors,
        optimizer=optimizer if writes_rest else None,
        slices=slices,
        facts={
            "format": layout,
            "step": state.step,
            "saved_at": round(time.time(), 3),
            "packages": package_versions(),
            "config": state.config.plain(),
            "chosen": dict(state.config.chosen),
            "data": state.checkpoint_fields["critical"]["data"],
            "tracker_run": state.run_dir.tracker_run,
            RUN: state.run_dir.identity,
        },
    )  # fmt: skip


def _nothing() -> None:
    """Do nothing, as the function that fills a snapshot which is not a copy."""


def _unshared(state: TrainState, snapshot: Snapshot) -> list[Tensor]:
    """Return the tensors of a snapshot that no other code uses."""
    if state.parallel.weights_are_whole:
        return []
    return gathered(snapshot, [state.transformer.state_dict(), below_wrapper(state.optimizer).state_dict()])


def gathered(snapshot: Snapshot, sources: Any) -> list[Tensor]:
    """Return the weights and optimizer state gathered from several processes, in otherwise unused host memory.

    Args:
        snapshot: has them.
        sources: the tensors that they were gathered from; one that a single process holds may be the same tensor.
    """
    addresses = {part.untyped_storage().data_ptr() for tensor in tensors_in(sources) for part in plain_tensors(tensor)}
    return [
        tensor
        for tensor in tensors_in([snapshot.trained, snapshot.optimizer])
        if not is_traceable_wrapper_subclass(tensor)
        and tensor.device.type == "cpu"
        and tensor.untyped_storage().data_ptr() not in addresses
    ]


def _bytes_needed(state: TrainState, sizes: Sequence[tuple[int, int]]) -> int:
    """Estimate the size of a checkpoint: its tensors, or that of the last one if the strategy adds its own files.

    Args:
        state: the run.
        sizes: bytes that each rank writes, and the number of trainable parameters among them.
    """
    size, count = (sum(column) for column in zip(*sizes, strict=True))
    if state.parallel.saves_optimizer_itself:
        size = published_size(state.run_dir.root) or size + _DEEPSPEED_BYTES * count
    return size + size // 50 + _SPARE


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all of a tensor is finite; its extremes carry NaN, and need no second tensor."""
    low, high = torch.aminmax(tensor.detach() if tensor.element_size() > 1 else tensor.detach().float())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def split_state(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a nested state by path (`old/weight`), and the rest in its nested form, for JSON."""
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
