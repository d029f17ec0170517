"""Joining the processes of a run, and the options that their device and strategy do not support."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate.utils import DynamoBackend

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.target import TargetDevice, target_device
from finetrainers.methods.registry import method_spec
from finetrainers.parallel.select import open_strategy, planned_strategy
from finetrainers.parallel.strategy import Strategy
from finetrainers.rundir.find import read_state
from finetrainers.utils.device import device_problem
from finetrainers.utils.gpus import Capability
from finetrainers.utils.launch import launched_processes
from finetrainers.utils.process_state import leave_groups, process_groups

from .preflight import device_findings
from .resume_plan import Start


def join(config: TrainConfig) -> Strategy:
    """Join the other processes of the launcher.

    Raises:
        ConfigError: a GPU that torch cannot use.
    """
    check_device()
    torch.backends.cuda.matmul.allow_tf32 = config.run.allow_tf32
    torch.backends.cudnn.allow_tf32 = config.run.allow_tf32
    groups = process_groups()
    try:
        return open_strategy(config)
    except BaseException:
        leave_groups(groups)
        raise


def make_strategy(config: TrainConfig) -> Strategy:
    """Join the other processes, and check what depends on the device.

    Raises:
        ConfigError: options that this device does not support, or a GPU that torch cannot use.
    """
    parallel = join(config)
    capability = torch.cuda.get_device_capability(parallel.device) if parallel.device.type == "cuda" else None
    problems = [*_problems(config, parallel, capability=capability)]
    if problems:
        parallel.close()
        raise ConfigError(problems)
    return parallel


def check_device() -> None:
    """Refuse to train on the CPU of a machine whose GPU torch cannot use.

    Raises:
        ConfigError: it cannot.
    """
    unusable = device_problem()
    if unusable is not None:
        raise ConfigError([Problem("GPU", unusable, "unavailable")])


def check_strategy(config: TrainConfig, start: Start | None = None) -> Strategy:
    """Check what `make_strategy` would, as far as that is possible without joining other processes.

    Args:
        config: the run.
        start: the run's start, or None if nothing is resumed.

    Returns:
        The strategy, which has joined no process, so that only its attributes can be used.

    Raises:
        ConfigError: see `make_strategy`; or the optimizer's state is that of another strategy.
    """
    device = target_device(config)
    parallel = planned_strategy(config, device_type=device.type)
    problems = [
        problem
        for problem in _problems(config, parallel, capability=device.capability)
        if not (device.is_elsewhere and problem.is_local)  # these are warnings already
    ]
    # A single process may only be planning for processes that are launched together.
    if start is not None and launched_processes() > 1 and (problem := layout_problem(start, parallel)) is not None:
        problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return parallel


def layout_problem(start: Start, parallel: Strategy) -> Problem | None:
    """Return the problem that a strategy cannot read the optimizer's state of a checkpoint, or None if it can."""
    if start.checkpoint is None or "optimizer" in start.resets:
        return None
    then, now = read_state(start.checkpoint)["engine"], parallel.optimizer_layout
    if parallel.reads_optimizer_of(then):
        return None
    message = (
        f"the optimizer's state in {start.checkpoint} is that of {then}, and this run is {now}; launch it in the "
        "same way, or start the optimizer from scratch with --reset optimizer"
    )
    return Problem("--resume_from_checkpoint", message, "mismatch")


def retry_refusal(option: str, *, parallel: Strategy, in_backward: bool = False) -> str | None:
    """Return the reason why a step that ran out of memory cannot be retried, or None if it can.

    Args:
        option: `--oom_retry`.
        parallel: the processes of the run.
        in_backward: whether weights are updated during backward.
    """
    if option == "off":
        return "--oom_retry is off"
    if in_backward:
        return "--optimizer_in_backward has changed weights in this step already"
    return parallel.why_no_retry


def _problems(config: TrainConfig, parallel: Strategy, *, capability: Capability | None = None) -> Iterator[Problem]:
    """Yield the options that this device and this strategy do not support."""
    # Preflight guessed the device and knew one process; its warnings have been shown.
    device, shards = TargetDevice(parallel.device.type, capability), parallel.updates_shards
    yield from device_findings(config, device, num_processes=parallel.world_size, updates_parts=shards).errors
    yield from _unsupported_options(config, parallel)
    yield from method_spec(config).strategy_problems(config, parallel)
    yield from _swap_problems(config, parallel)


def _unsupported_options(config: TrainConfig, parallel: Strategy) -> Iterator[Problem]:
    training, memory, samples = config.training, config.memory, config.validation
    refusal = parallel.why_no_retry
    for option, is_set, is_supported, message in (
        (
            "--compile", memory.compile != "none", parallel.compiles_blocks,
            "regional: ZeRO-3 gathers weights within a block; use --fsdp full, or ZeRO-2",
        ),
        (
            "--on_nonfinite rollback", training.on_nonfinite == "rollback", parallel.weights_are_movable,
            "sharded weights cannot be restored within a run; use DDP, or raise and resume",
        ),
        (
            "--async_checkpointing", training.async_checkpointing, not parallel.saves_optimizer_itself,
            "DeepSpeed writes its own files, while training waits; use DDP or FSDP2, or remove it",
        ),
        (
            "--dry_batches on", memory.dry_batches == "on", parallel.can_drop_gradients,
            "DeepSpeed sums gradients in its own buffers, where those of a trial would stay; remove it",
        ),
        ("--oom_retry on", memory.oom_retry == "on", refusal is None, refusal or ""),
        (
            "--use_ema", training.use_ema, parallel.weights_are_whole,
            "the EMA requires unsharded weights, and this strategy shards them; use DDP or DeepSpeed ZeRO-2, or "
            "remove it",
        ),
        (
            "--enable_model_cpu_offload", samples.enable_model_cpu_offload and samples.validation_prompts,
            parallel.weights_are_movable,
            ("it moves complete weights between GPU and host, and this strategy keeps its own shards or copies; use "
             "DDP, or remove it: --enable_tiling reduces the memory for decoding"),
        ),
        (
            "--layerwise_upcasting_modules", memory.layerwise_upcasting_modules, parallel.weights_are_whole,
            "8-bit storage changes weights in place, and this strategy shards them; use DDP or DeepSpeed ZeRO-2",
        ),
        (
            "--quantize_frozen", memory.quantize_frozen != "none", parallel.takes_integer_weights,
            "ZeRO-3 shards only floating-point weights; use --fsdp full, which also shards quantized ones, or ZeRO-2",
        ),
        (
            "--no-lora_autocast", not memory.lora_autocast, parallel.uses_autocast,
            "DeepSpeed always computes in 16 bits without autocast; remove it",
        ),
    ):  # fmt: skip
        if is_set and not is_supported:
            yield Problem(option, message, "unsupported")


def _swap_problems(config: TrainConfig, parallel: Strategy) -> Iterator[Problem]:
    if not config.memory.blocks_to_swap:
        return
    option = "--blocks_to_swap"
    if parallel.why_no_swap is not None:
        yield Problem(option, parallel.why_no_swap, "unsupported")
    if parallel.device.type not in ("cuda", "cpu"):
        message = f"copies on streams of CUDA, and the device is {parallel.device.type}; remove it"
        yield Problem(option, message, "unsupported")
    if parallel.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        message = (
            "compiled blocks do not wait for their weights; launch without torch.compile (dynamo_backend), or remove it"
        )
        yield Problem(option, message, "conflict")
