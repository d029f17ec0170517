"""Disk space that a run needs, estimated before anything is loaded, so that a full disk does not end it hours later."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.data.buckets.windows import windows_by_item
from finetrainers.memory.casting import castable_layers
from finetrainers.memory.estimate import optimizer_state_bytes
from finetrainers.methods.registry import method_spec
from finetrainers.models.spec import DTYPES
from finetrainers.optim.factory import check_weights
from finetrainers.parallel.ranks import DistributedContext
from finetrainers.utils.launch import launched_processes
from finetrainers.utils.text import file_size

from .initial_weights import INITIAL_LORA
from .preflight import ResolvedRun, collecting_problems
from .trainable import network_without_weights, num_quantizable, trainable_parameters

#: Bytes per pixel and frame of a sampled H.264 video, and of the eight frames of its contact sheet.
_VIDEO_BYTES, _SHEET_BYTES, _SHEET_FRAMES = 0.1, 1.5, 8
_SPARE = 1 << 20  # records, and the file system's own data


@dataclass(frozen=True)
class Needs:
    """Bytes that a run writes, without the cache of precomputed tensors.

    `data.precompute.check_room` estimates the cache by its first entries.

    Attributes:
        checkpoint: each checkpoint.
        num_checkpoints: the largest number of new checkpoints at a time.
        result: the weights at the end.
        samples: all validation samples.
        initial_lora: the LoRA of the reference model.
    """

    checkpoint: int
    num_checkpoints: int
    result: int
    samples: int
    initial_lora: int = 0

    @property
    def least(self) -> int:
        """Minimum space for the run to end well."""
        return (
            (self.checkpoint if self.num_checkpoints else 0) + self.result + self.samples + self.initial_lora + _SPARE
        )

    @property
    def most(self) -> int:
        """Space for all checkpoints that the run keeps."""
        return self.least + self.checkpoint * max(0, self.num_checkpoints - 1)


def disk_needs(checked: ResolvedRun, transformer: nn.Module) -> Needs:
    """Return the disk space that a run needs.

    Args:
        checked: the run.
        transformer: with its adapter, if any; may lie on the meta device.
    """
    config, training = checked.config, checked.config.training
    trained = sum(p.numel() for p in trainable_parameters(transformer).values())
    weight = 2 if training.master_weights == "stochastic_rounding" else 4
    result = 4 * trained
    if training.training_type == "full-finetune":
        result = DTYPES[config.model.transformer_dtype].itemsize * sum(p.numel() for p in transformer.parameters())
    lora, stored, initial_lora = checked.start.initial_lora, (config.run.output_dir / INITIAL_LORA).resolve(), 0
    if lora is not None and lora.is_file() and lora.resolve().parent != stored:
        initial_lora = lora.stat().st_size
    return Needs(
        checkpoint=round(trained * (weight + optimizer_state_bytes(config) + (4 if training.use_ema else 0))),
        num_checkpoints=_new_checkpoints(checked),
        result=result,
        samples=_samples_size(checked),
        initial_lora=initial_lora,
    )


def room_warnings(checked: ResolvedRun, transformer: nn.Module) -> list[str]:
    """Return warnings about the disk space; `transformer`: see `disk_needs`.

    Raises:
        ConfigError: there is too little for the run to end well.
    """
    needs, root = disk_needs(checked, transformer), checked.config.run.output_dir.resolve()
    folder = next(path for path in (root, *root.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    parts = {
        "a checkpoint": needs.checkpoint, "the result": needs.result, "samples": needs.samples,
        "the initial LoRA": needs.initial_lora,
    }  # fmt: skip
    details = ", ".join(f"{name} {file_size(size)}" for name, size in parts.items() if size)
    if free < needs.least:
        message = (
            f"{folder} has {file_size(free)} free, and the run needs about {file_size(needs.least)} there "
            f"({details}); free up space, or set another --output_dir"
        )
        raise ConfigError([Problem("--output_dir", message, "too_large")])
    if free < needs.most:
        return [
            f"{folder} has {file_size(free)} free, and the {needs.num_checkpoints} checkpoints of this run take "
            f"about {file_size(needs.most)} with its results; --checkpointing_limit bounds their number"
        ]
    return []


def check_trainable(checked: ResolvedRun, network: nn.Module) -> None:
    """Check by its layers that a network can be trained with the options; it may lie on the meta device.

    Raises:
        ConfigError: it cannot.
    """
    config, memory = checked.config, checked.config.memory
    try:
        check_weights(network.parameters(), config.optimizer)
    except ValueError as error:
        raise ConfigError([Problem.from_error("--optimizer", error)]) from error
    skip = memory.layerwise_upcasting_skip_modules_pattern
    if memory.layerwise_upcasting_modules and not castable_layers(network, skip_modules_pattern=skip):
        message = f"leaves no layer to store in 8 bits: {' '.join(skip)}; list fewer modules"
        raise ConfigError([Problem("--layerwise_upcasting_skip_modules_pattern", message)])
    if memory.quantize_frozen != "none":
        num_quantizable(network, config, checked.spec)


def check_room(checked: ResolvedRun, parallel: DistributedContext) -> list[str]:
    """Refuse a run that does not fit rank 0's disk, and return warnings. Every rank must call it.

    Raises:
        ConfigError: the disk has too little space, LoRA targets match nothing, or the optimizer cannot update their
            weights; on every rank.
    """
    warnings: list[str] = []
    problems: list[Problem] = []
    if parallel.is_main:
        with collecting_problems(problems):
            network = network_without_weights(checked)
            check_trainable(checked, network)
            warnings = room_warnings(checked, network)
    problems = parallel.broadcast_object(problems)
    if problems:
        raise ConfigError(problems)
    return warnings


def _new_checkpoints(checked: ResolvedRun) -> int:
    """Return the largest number of new checkpoints that exist at a time."""
    training = checked.config.training
    todo = _total_steps(checked) - checked.start.step
    saves = math.ceil(todo / training.checkpointing_steps) if training.checkpointing_steps else 1
    if training.checkpointing_limit is None or todo <= 0:
        return max(saves, 0)
    # An old checkpoint is removed only after a new one exists.
    remaining = training.checkpointing_limit + 1 - len(checked.checkpoints)
    return min(saves, max(1, remaining))


def _total_steps(checked: ResolvedRun) -> int:
    config = checked.config
    if config.training.train_steps:
        return config.training.train_steps
    per_process = config.dataloader.batch_size * config.training.gradient_accumulation_steps
    per_step = per_process * config.parallel.data_size(launched_processes())
    count = checked.plan.count
    if config.data.sliding_window_batching == "clip" and config.data.is_named:
        count = len(windows_by_item(getattr(checked.plan, "clips", ())))
    return math.ceil(count * config.training.train_epochs / per_step)


def _samples_size(checked: ResolvedRun) -> int:
    validation, todo = checked.config.validation, max(0, _total_steps(checked) - checked.start.step)
    times, evaluations = 1 + (todo // validation.validation_steps if validation.validation_steps else 0), 0
    times += validation.samples_at_start and not checked.start.step
    if validation.eval_reward and validation.eval_steps and not method_spec(checked.config).samples:
        evaluations = 1 + todo // validation.eval_steps  # including one before training
    videos = validation.num_validation_videos
    size = _sample_bytes(checked, checked.prompts) * videos * (times + (0 if checked.scored else evaluations))
    return round(size + _sample_bytes(checked, checked.scored) * (1 + evaluations))


def _sample_bytes(checked: ResolvedRun, prompts: Sequence[ValidationPrompt]) -> float:
    """Return the bytes of a video of each prompt with its contact sheet."""
    size = 0.0
    for prompt in prompts:
        frames, height, width = prompt.size or checked.plan.size
        sheet = _SHEET_BYTES * min(frames, _SHEET_FRAMES)
        size += (_VIDEO_BYTES * frames + sheet) * height * width
    return size
