"""Rules between the options of optimizer and schedule, checked before anything is loaded. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from finetrainers.config.errors import Problem
from finetrainers.config.root import TrainConfig

from .table import OFFLOADABLE, OPTIMIZERS, SHARDABLE, OptimizerSpec, missing_library, resolve_name

_HIGH_LR = 1e-2  # ten times the usual learning rate of LoRAs


def optimizer_problems(
    config: TrainConfig, *, device_type: str, num_processes: int = 1, updates_parts: bool = False
) -> tuple[list[Problem], list[str]]:
    """Check the options of optimizer and schedule.

    Args:
        config: the run.
        device_type: device type that it will train on: `cpu`, `cuda`, `xpu`.
        num_processes: number of processes that train together.
        updates_parts: whether each process updates its shard of all weights (FSDP2).

    Returns:
        Errors, which make the run impossible or change its result; and warnings, which name options
        that have no effect or are likely mistakes.
    """
    try:
        name = resolve_name(config.optimizer)
    except ValueError as error:
        return [Problem.from_error("--use_8bit_bnb", error)], []
    recipe = OPTIMIZERS[name]
    errors = [
        *_recipe_errors(config, name, recipe, device_type),
        *_stochastic_rounding_errors(config, name, recipe),
        *_offload_errors(config, device_type, num_processes),
        *_in_backward_errors(config, name, recipe, num_processes),
    ]
    if updates_parts and name not in SHARDABLE:
        message = (
            f"{name} requires unsharded weights, or cannot assemble its state from shards, and FSDP2 shards them; use "
        )
        errors.append(Problem("--optimizer", f"{message}{' or '.join(SHARDABLE)}, or DDP", "unsupported"))
    warnings = [*_recipe_warnings(config, name, recipe, device_type), *_schedule_warnings(config)]
    return errors, warnings


def _recipe_errors(config: TrainConfig, name: str, recipe: OptimizerSpec, device_type: str) -> Iterator[Problem]:
    options = config.optimizer
    if not recipe.is_installed:
        yield Problem("--optimizer", missing_library(name, recipe), "not_installed", is_local=True)
    if options.beta3 is not None and "beta3" not in recipe.reads:
        takers = ", ".join(n for n, r in OPTIMIZERS.items() if "beta3" in r.reads)
        yield Problem(
            "--beta3",
            f"{options.beta3:g} is not a parameter of optimizer {name}; remove it or use one of {takers}",
            "unsupported",
        )
    if recipe.needs_positive_lr and options.lr == 0:
        yield Problem("--lr", f"optimizer {name} does not support 0; set a positive learning rate")
    if recipe.matrices_only and config.training.training_type == "full-finetune":
        yield Problem(
            "--optimizer",
            f"{name} supports only matrices, and full-finetune also trains biases and norms; use --training_type "
            "lora or another optimizer",
            "unsupported",
        )
    if recipe.matrices_only and config.training.use_dora:
        yield Problem(
            "--optimizer",
            f"{name} supports only matrices, and --use_dora trains vectors; remove one of them",
            "conflict",
        )
    if recipe.on_host and device_type != "cpu":
        yield Problem(
            "--optimizer",
            f"{name} updates weights on the CPU, and this run trains on {device_type}; use adamw with "
            "accelerate_configs/deepspeed_zero2_offload.yaml, which replaces it by DeepSpeed's CPU Adam",
            "unsupported",
        )


def _stochastic_rounding_errors(config: TrainConfig, name: str, recipe: OptimizerSpec) -> Iterator[Problem]:
    """Check that the optimizer supports stochastic rounding."""
    if config.training.master_weights != "stochastic_rounding":
        return
    if recipe.stochastic is None:
        valid = ", ".join(n for n, r in OPTIMIZERS.items() if r.stochastic)
        yield Problem(
            "--master_weights", f"stochastic_rounding requires one of {valid}, got --optimizer {name}", "unsupported"
        )
    if config.model.transformer_dtype != "bf16":
        yield Problem(
            "--master_weights",
            f"stochastic_rounding requires bf16 weights, got --transformer_dtype {config.model.transformer_dtype}; "
            "use --transformer_dtype bf16",
            "conflict",
        )
    if config.optimizer.use_cpu_offload_optimizer:
        yield Problem(
            "--master_weights",
            "cannot be combined with --use_cpu_offload_optimizer; use fp32, or remove --use_cpu_offload_optimizer",
            "conflict",
        )


def _offload_errors(config: TrainConfig, device_type: str, num_processes: int) -> Iterator[Problem]:
    options, training = config.optimizer, config.training
    offload, gradients = "--use_cpu_offload_optimizer", "--offload_gradients"
    if not options.use_cpu_offload_optimizer:
        if options.offload_gradients:
            yield Problem(gradients, f"requires {offload}; add it, or remove {gradients}", "required")
        return
    if device_type not in ("cuda", "xpu"):
        yield Problem(
            offload, f"requires a CUDA or XPU device, and this run is on {device_type}; remove it", "unsupported"
        )
    if num_processes > 1:
        yield Problem(
            offload,
            f"copies gradients before processes exchange them, so it requires one process, got {num_processes}; use "
            "accelerate_configs/deepspeed_zero2_offload.yaml instead",
            "conflict",
        )
    if options.optimizer not in OFFLOADABLE or options.use_8bit_bnb:
        variant = "--use_8bit_bnb" if options.use_8bit_bnb else f"--optimizer {options.optimizer}"
        yield Problem(offload, f"requires plain {' or '.join(OFFLOADABLE)}, got {variant}", "unsupported")
    if options.max_grad_norm > 0:
        yield Problem(
            offload,
            f"cannot be combined with --max_grad_norm {options.max_grad_norm:g}: it copies gradients to the host "
            "before their norm is known; use --max_grad_norm 0",
            "conflict",
        )
    if training.mixed_precision == "fp16":
        yield Problem(
            offload, "copies gradients before fp16 loss scaling is undone; use --mixed_precision bf16", "conflict"
        )
    if options.offload_gradients and training.gradient_accumulation_steps > 1:
        yield Problem(
            gradients,
            f"cannot be combined with --gradient_accumulation_steps {training.gradient_accumulation_steps}: it frees "
            f"each gradient at once; use 1, or remove {gradients}",
            "conflict",
        )


def _in_backward_errors(config: TrainConfig, name: str, recipe: OptimizerSpec, num_processes: int) -> Iterator[Problem]:
    options, training, option = config.optimizer, config.training, "--optimizer_in_backward"
    if not options.optimizer_in_backward:
        return
    if training.training_type != "full-finetune":
        yield Problem(option, "requires full-finetune; the gradients of a LoRA are small. Remove it", "conflict")
    if options.max_grad_norm > 0:
        yield Problem(
            option,
            f"cannot be combined with --max_grad_norm {options.max_grad_norm:g}: it updates weights before the norm "
            "of all gradients is known; use --max_grad_norm 0",
            "conflict",
        )
    if num_processes > 1 or config.parallel.fsdp is not None or config.parallel.deepspeed:
        yield Problem(
            option,
            "updates weights before processes have exchanged gradients, so it requires one process without FSDP2 or "
            "DeepSpeed; remove it: --fsdp full and ZeRO-2 shard gradients instead",
            "conflict",
        )
    if recipe.finds_step:
        yield Problem(
            option,
            f"--optimizer {name} computes its step size from all gradients; use adamw or a similar optimizer",
            "unsupported",
        )
    if options.use_cpu_offload_optimizer:
        yield Problem(
            option,
            "cannot be combined with --use_cpu_offload_optimizer; use --offload_gradients, which frees gradients there",
            "conflict",
        )
    if training.mixed_precision == "fp16":
        yield Problem(
            option, "updates weights before fp16 loss scaling is undone; use --mixed_precision bf16", "conflict"
        )
    if training.on_nonfinite == "skip":
        yield Problem(
            option,
            "a step with NaN has changed weights before it is detected, so it cannot be skipped; use --on_nonfinite "
            "rollback or raise",
            "conflict",
        )
    if config.memory.oom_retry == "on":
        yield Problem(option, "a step that ran out of memory has changed weights; remove --oom_retry on", "conflict")


def _recipe_warnings(config: TrainConfig, name: str, recipe: OptimizerSpec, device_type: str) -> Iterator[str]:
    for option in ("beta1", "beta2", "epsilon"):
        if option not in recipe.reads and config.changed(option):
            yield f"--{option} has no effect with --optimizer {name}"
    lr = config.optimizer.lr
    if recipe.finds_step and not 0.5 <= lr <= 2:
        yield f"--lr {lr:g} multiplies the step size that {name} estimates; 1.0 is usual"
    elif not recipe.finds_step and lr > _HIGH_LR:
        yield (
            f"--lr {lr:g} is far above the usual range for finetuning, 1e-6 to 1e-3; it may ruin the weights "
            "within a few steps"
        )
    if name.endswith("-paged") and device_type == "cpu":
        yield f"--optimizer {name} does not page on the CPU; it equals {name.removesuffix('-paged')} there"


def _schedule_warnings(config: TrainConfig) -> Iterator[str]:
    options = config.optimizer
    schedule, warmup, train_steps = options.lr_scheduler, options.lr_warmup_steps, config.training.train_steps
    if schedule == "constant":
        if config.changed("lr_warmup_steps") and warmup:
            yield (
                f"--lr_warmup_steps {warmup} has no effect with --lr_scheduler constant; constant_with_warmup warms up"
            )
    elif train_steps is not None and warmup >= train_steps:
        reached = "its peak" if schedule == "bump" else "--lr"
        yield (
            f"--lr_warmup_steps {warmup} is not below --train_steps {train_steps}: "
            f"the learning rate never reaches {reached}"
        )
    elif train_steps is not None and schedule == "bump":
        cooldown = warmup if options.lr_cooldown_steps is None else options.lr_cooldown_steps
        if warmup + cooldown >= train_steps:
            yield (
                f"--lr_warmup_steps {warmup} and {cooldown} steps of cooldown (--lr_cooldown_steps) "
                f"are not below --train_steps {train_steps}: the learning rate never comes down to --lr"
            )
