"""Sharding of weights, gradients and optimizer state, from options and `accelerate launch`. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.parallel import ParallelSection
from finetrainers.utils.launch import is_enabled, launched_processes, local_world_size

#: Environment variables of accelerate's launcher.
USE_FSDP = "ACCELERATE_USE_FSDP"
USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
#: Settings of accelerate that would split the work in a way that does not exist here.
_OTHER_DIMENSIONS = ("TP", "CP", "SP")


@dataclass(frozen=True)
class ShardingSpec:
    """Numbers of parts that a strategy cuts what processes hold into, for the memory estimate; 1 means whole.

    Attributes:
        weights, gradients, optimizer: number of parts of each.
        gathers: whether a block's weights are gathered to compute.
        reshards: whether they are freed after its forward pass, not only after its backward pass.
        keeps_gradients: whether gradients are whole, in fp32, between the micro-batches of a step.
        copies_gradients: whether there is a copy of the gradients, which is averaged during backward (DDP).
        zero_stage: stage of DeepSpeed, where fp32 weights are part of the optimizer's state; 0: another strategy.
        weights_on_host, optimizer_on_host: whether each lies in host memory.
        live_weights: numbers that may be gathered at once; 0: a block and the next.
        buffer_numbers: size of the buffer that collects gradients to be reduced, in numbers.
        update_numbers: numbers of a process's part that are updated at once.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    gathers: bool = False
    reshards: bool = True
    keeps_gradients: bool = False
    copies_gradients: bool = False
    zero_stage: int = 0
    weights_on_host: bool = False
    optimizer_on_host: bool = False
    live_weights: int = 0
    buffer_numbers: int = 0
    update_numbers: float = inf


#: Defaults of DeepSpeed: `reduce_bucket_size`, which every backward pass allocates; and of stage 3
#: `stage3_max_live_parameters` and `sub_group_size`.
_ZERO_BUCKET, _ZERO_LIVE, _ZERO_SUB_GROUP = 500_000_000, 1_000_000_000, 1_000_000_000
#: Every process holds everything.
WHOLE = ShardingSpec()


def expected_split(options: ParallelSection) -> ShardingSpec:
    """Return the split by the strategy that the options and the launcher select; joins no process.

    Raises:
        ConfigError: see `with_launcher`.
    """
    options, processes = with_launcher(options), launched_processes()
    if options.fsdp is not None:
        parts, offload = options.fsdp_group_size or processes, options.fsdp_cpu_offload
        return ShardingSpec(
            weights=parts,
            gradients=parts,
            optimizer=parts,
            gathers=True,
            reshards=options.fsdp_reshard_after_forward,
            keeps_gradients=not options.sync_each_batch,
            weights_on_host=offload,
            optimizer_on_host=offload,
        )
    if not options.deepspeed:
        return ShardingSpec(copies_gradients=processes > 1 and options.overlap_gradient_exchange)
    stage, offload = options.zero_stage, options.zero_offload
    return ShardingSpec(
        weights=processes if stage == 3 else 1,
        gradients=processes if stage >= 2 else 1,
        optimizer=processes,
        gathers=stage == 3,
        zero_stage=stage,
        # ZeRO-3 with offloading also has the weights on the host, unless a launcher's file disables it.
        weights_on_host=stage == 3
        and offload
        and (not is_enabled(USE_DEEPSPEED) or _is_set("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")),
        optimizer_on_host=offload,
        live_weights=_ZERO_LIVE if stage == 3 else 0,
        buffer_numbers=_ZERO_BUCKET,
        update_numbers=_ZERO_SUB_GROUP if stage == 3 else inf,
    )


def _is_set(device_variable: str) -> bool:
    return os.environ.get(device_variable, "none") != "none"


def with_launcher(options: ParallelSection) -> ParallelSection:
    """Return the options, completed by the launcher's file.

    With FSDP2 they take precedence over that file, which cannot mark settings as defaults. Then `fsdp_group_size` has a
    value if groups hold copies of each other.

    Raises:
        ConfigError: the options contradict the file or each other, or the file's settings are not supported here.
    """
    launched = is_enabled(USE_FSDP)
    if options.fsdp is None and not launched:
        return _with_deepspeed(options) if is_enabled(USE_DEEPSPEED) else options
    problems = list(_launcher_problems()) if launched else []
    if options.deepspeed or is_enabled(USE_DEEPSPEED):
        problems.append(
            Problem(
                "--deepspeed",
                "DeepSpeed and FSDP2 cannot be combined: both shard the network; remove one of them",
                "conflict",
            )
        )
    # Transformers would leave the text encoders of all ranks but one empty.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    kind, group_size = options.fsdp, options.fsdp_group_size
    if kind is None:
        copies = int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        hybrid = copies > 1 or os.environ.get("FSDP_SHARDING_STRATEGY", "") in ("HYBRID_SHARD", "4")
        kind = "hybrid" if hybrid else "full"
        if copies > 1 and group_size is None:
            group_size = launched_processes() // copies
    if kind == "full" and group_size is not None:
        problems.append(
            Problem("--fsdp_group_size", "requires --fsdp hybrid; `full` shards over all processes", "conflict")
        )
    if problems:
        raise ConfigError(problems)
    updates = {
        "fsdp": kind,
        "fsdp_group_size": (group_size or local_world_size()) if kind == "hybrid" else None,
        "fsdp_reshard_after_forward": options.fsdp_reshard_after_forward
        and not (launched and os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() in ("false", "0")),
        "fsdp_cpu_offload": options.fsdp_cpu_offload or (launched and is_enabled("FSDP_OFFLOAD_PARAMS")),
    }
    return options.model_copy(update=updates)


def _with_deepspeed(options: ParallelSection) -> ParallelSection:
    message = "the launcher's DeepSpeed file sets this; change it there, or launch without that file"
    own = options.model_dump(include={"zero_stage", "zero_offload"}, exclude_defaults=True)
    if own:
        raise ConfigError([Problem(f"--{name}", message, "conflict") for name in own])
    updates = {
        "deepspeed": True,
        "zero_stage": int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")),
        "zero_offload": _is_set("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
    }
    return options.model_copy(update=updates)


def _launcher_problems() -> Iterator[Problem]:
    """Yield problems with the launcher's FSDP settings that are made in another way here, or not supported."""
    if os.environ.get("FSDP_VERSION", "1") != "2":
        yield Problem(
            "fsdp_version",
            "FSDP1 is not supported; write `fsdp_version: 2`, as accelerate_configs/fsdp2.yaml",
            "unsupported",
        )
    strategy = os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    if strategy not in ("FULL_SHARD", "1", "HYBRID_SHARD", "4"):
        yield Problem(
            "fsdp_sharding_strategy",
            f"{strategy} belongs to FSDP1; use fsdp_reshard_after_forward, or DDP without sharding",
            "unsupported",
        )
    if is_enabled("FSDP_ACTIVATION_CHECKPOINTING"):
        yield Problem("fsdp_activation_checkpointing", "use --gradient_checkpointing instead", "unsupported")
    if os.environ.get("FSDP_IGNORED_MODULES"):
        yield Problem("fsdp_ignored_modules", "is not supported: all modules are sharded; remove it", "unsupported")
    for name in _OTHER_DIMENSIONS:
        if int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) > 1:
            remedy = "remove it" if name == "TP" else "remove it, and split clips over processes with --sp_size"
            yield Problem(f"parallelism_config_{name.lower()}_size", f"is not supported; {remedy}", "unsupported")
