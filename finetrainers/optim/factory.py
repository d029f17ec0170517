"""Create the optimizer of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.sections import OptimizerSection
from finetrainers.utils.deepspeed_operators import note_compiling
from finetrainers.utils.failures import InputError

from .in_backward import StepInBackward
from .table import OPTIMIZERS, OptimizerSpec, missing_library, resolve_name

#: Settings of a group that belong to its device, and not to the run.
_IMPLEMENTATION = ("foreach", "fused", "capturable")


def create_optimizer(
    parameters: Iterable[Parameter],
    *,
    config: OptimizerSection,
    lr: float,
    device_type: str,
    stochastic_rounding: bool = False,
) -> Optimizer:
    """Return the configured optimizer over `parameters`, as one group; its options have passed `optimizer_problems`.

    Args:
        parameters: the trainable weights.
        config: the optimizer section.
        lr: learning rate, after any scaling.
        device_type: device type that the weights are trained on: `cpu`, `cuda`, `xpu`.
        stochastic_rounding: the weights are bf16 and each update is rounded up or down at random, so that updates
            smaller than half a bf16 step are right on average (torchao). It draws from torch's global generators, which
            the trainer seeds before each update.

    Raises:
        ValueError: the optimizer cannot update these parameters.
        ImportError: its package is not installed; the message names the pip extra.
    """
    weights = [p for p in parameters if p.requires_grad]
    check_weights(weights, config)
    name = resolve_name(config)
    recipe = OPTIMIZERS[name]
    arguments, target = recipe.arguments(config), recipe.target
    if config.use_cpu_offload_optimizer:  # torchao's, whose state and step are on the CPU
        arguments |= {"offload_gradients": config.offload_gradients, "fused": True}
        offloader = _import_class(name, recipe, "torchao.optim:CPUOffloadOptimizer")
        return offloader(weights, _import_class(name, recipe, target), lr=lr, **arguments)
    if stochastic_rounding:
        assert recipe.stochastic is not None
        target = recipe.stochastic
        arguments["bf16_stochastic_round"] = True
    elif recipe.fused and device_type == "cuda":
        arguments["fused"] = True
    if recipe.library == "deepspeed":
        note_compiling(["cpu_adam"])
    optimizer = _import_class(name, recipe, target)(weights, lr=lr, **arguments)
    _keep_implementation(optimizer)
    if recipe.keeps_fp32_state:
        _load_state_in_saved_dtype(optimizer)
    if config.optimizer_in_backward:
        StepInBackward(optimizer)
    return optimizer


def custom_optimizer(make: Callable[[list[Parameter]], Optimizer], parameters: Iterable[Parameter]) -> Optimizer:
    """Return the optimizer that a user's function makes over `parameters`.

    Raises:
        ConfigError: it is not an optimizer, or one of other weights.
    """
    weights = [p for p in parameters if p.requires_grad]
    optimizer, problem = make(weights), None
    if not isinstance(optimizer, Optimizer):
        problem = f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
    elif (updated := {id(p) for group in optimizer.param_groups for p in group["params"]}) != set(map(id, weights)):
        problem = f"must update all of the {len(weights)} trainable parameters and no others, got {len(updated)}"
    if problem is not None:
        raise ConfigError([Problem("optimizer", problem)])
    _keep_implementation(optimizer)
    _load_state_in_saved_dtype(optimizer)
    return optimizer


def optimizer_class_problem(config: OptimizerSection) -> str | None:
    """Return why the class of an optimizer cannot be imported, or None if it can; imports its library."""
    name = resolve_name(config)
    try:
        _import_class(name, OPTIMIZERS[name], OPTIMIZERS[name].target)
    except ImportError as error:
        return str(error)
    return None


def check_weights(parameters: Iterable[Parameter], config: OptimizerSection) -> None:
    """Check that an optimizer can update these weights; only their shapes are read.

    Raises:
        ValueError: it cannot.
    """
    weights, name = [p for p in parameters if p.requires_grad], resolve_name(config)
    if not weights:
        raise ValueError("no trainable parameters: check target_modules and training_type")
    others = sum(p.ndim != 2 for p in weights)
    if OPTIMIZERS[name].matrices_only and others:
        raise InputError(
            f"optimizer {name!r} supports only matrices, and {others} of {len(weights)} trainable parameters are not "
            "two-dimensional; train a LoRA of linear layers, or use another optimizer",
            "unsupported",
        )


def _import_class(name: str, recipe: OptimizerSpec, target: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        optimizer_class = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the package is installed and lacks a dependency
        raise ImportError(missing_library(name, recipe)) from error
    if optimizer_class is None:
        raise ImportError(
            f"optimizer {name!r} requires a newer {recipe.library}: the installed one has no {module}.{attribute}"
        )
    return optimizer_class


def _keep_implementation(optimizer: Optimizer) -> None:
    """Let `load_state_dict` keep this optimizer's implementation of its step.

    Torch loads the implementation with the saved groups, and decides by it where the step counters belong: a checkpoint
    of a CPU, continued on CUDA, would train unfused from then on.
    """

    def before(loading: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [
            {**saved, **{name: own[name] for name in _IMPLEMENTATION if name in own}}
            for saved, own in zip(state_dict["param_groups"], loading.param_groups, strict=False)
        ]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(before)


def _load_state_in_saved_dtype(optimizer: Optimizer) -> None:
    """Let `load_state_dict` keep each state tensor's dtype.

    Torch casts loaded state to the weight's dtype, which rounds the fp32 state of bf16 weights: a resumed run would
    differ from an uninterrupted one.
    """
    saved: dict[int, dict[str, Any]] = {}

    def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
        saved.update(state_dict["state"])

    def after(loaded: Optimizer) -> None:
        weights = [p for group in loaded.param_groups for p in group["params"]]
        for index, values in saved.items():
            weight = weights[index]
            for key, value in values.items():
                current = loaded.state[weight].get(key)
                if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
                    loaded.state[weight][key] = value.to(current.device, copy=True)
        saved.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
