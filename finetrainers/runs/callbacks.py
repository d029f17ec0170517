"""Checks of a user's callbacks before anything is loaded. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.parallel.sharding import expected_split
from finetrainers.training.callbacks.base import Callback
from finetrainers.utils.failures import Kind
from finetrainers.utils.text import nearest

_HOOKS = {name: value for name, value in vars(Callback).items() if name.startswith("on_")}


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Check callbacks of a user before anything is loaded.

    Raises:
        ConfigError: a callback is not an instance of `Callback`, or has hooks that are not called or cannot be.
    """
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise ConfigError([Problem(_WHERE, f"expected a list of callbacks, got {_type_name(callbacks)}")])
    problems = [
        Problem(f"{_WHERE}[{index}]", message, kind)
        for index, callback in enumerate(callbacks)
        for message, kind in _callback_problems(callback)
    ]
    if problems:
        raise ConfigError(problems)


def check_gradient_hooks(callbacks: Sequence[Callback], config: TrainConfig) -> None:
    """Check that gradients are there for callbacks that use them.

    Raises:
        ConfigError: an option frees them earlier, or DeepSpeed keeps them.
    """
    options = config.optimizer
    reasons = {
        "--optimizer_in_backward": options.optimizer_in_backward,
        "--offload_gradients": options.offload_gradients,
        "DeepSpeed ZeRO": expected_split(config.parallel).zero_stage > 0,
    }
    problems = [
        Problem(
            f"{_WHERE}[{index}]",
            f"{_type_name(callback)}.on_gradients is not supported with {reason}, which leaves no gradients in `.grad`",
            "unsupported",
        )
        for index, callback in enumerate(callbacks)
        if type(callback).on_gradients is not Callback.on_gradients
        for reason, applies in reasons.items()
        if applies
    ]
    if problems:
        raise ConfigError(problems)


_WHERE = "callbacks"


def _callback_problems(callback: Any) -> Iterator[tuple[str, Kind]]:
    if isinstance(callback, type):
        yield f"expected an instance, got the class {callback.__name__}; write {callback.__name__}(...)", "invalid"
        return
    if not isinstance(callback, Callback):
        message = (
            f"expected an instance of finetrainers.Callback, got {_type_name(callback)}; derive its class from Callback"
        )
        yield message, "invalid"
        return
    for name in [name for name in dir(type(callback)) if name.startswith("on_")]:
        if name not in _HOOKS:
            hint = nearest(name, _HOOKS)
            yield f"{_type_name(callback)} has no hook {name}{hint}; rename methods that are not hooks", "unknown"
            continue
        parameters = list(inspect.signature(_HOOKS[name]).parameters)[1:]
        try:
            inspect.signature(getattr(callback, name)).bind(*parameters)
        except TypeError as error:
            yield f"{_type_name(callback)}.{name} must take ({', '.join(parameters)}): {error}", "invalid"


def _type_name(value: Any) -> str:
    return f"{'an' if type(value).__name__[0] in 'AEIOUaeiou' else 'a'} {type(value).__name__}"
