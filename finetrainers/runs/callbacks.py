"""A user's callbacks: their checks before anything is loaded, and the numbers of their hooks. Imports no torch."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.parallel.sharding import expected_split
from finetrainers.training.callbacks.base import Callback, Record
from finetrainers.utils.failures import Kind
from finetrainers.utils.text import nearest

if TYPE_CHECKING:
    from finetrainers.training.state import TrainState

logger = logging.getLogger(__name__)

#: Names that records of every run may have, besides those of its method.
_RECORD_NAMES = ("step", "time", "loss", "grad_norm", "lr", "step_s", "steps")
#: Hooks whose numbers are logged.
_LOGGED = ("on_start", "on_step", "on_samples")
#: Functions whose call runs nothing yet.
_LAZY = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
_HOOKS = {name: value for name, value in vars(Callback).items() if name.startswith("on_")}


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Check callbacks of a user before anything is loaded.

    Raises:
        ConfigError: a callback is not an instance of `Callback`, or has hooks that are not called or cannot be.
    """
    if not isinstance(callbacks, Sequence):
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
        if any(is_lazy(getattr(callback, name)) for is_lazy in _LAZY):
            yield f"{_type_name(callback)}.{name} must be neither async nor a generator: its body never runs", "invalid"
            continue
        parameters = list(inspect.signature(_HOOKS[name]).parameters)[1:]
        try:
            inspect.signature(getattr(callback, name)).bind(*parameters)
        except TypeError as error:
            yield f"{_type_name(callback)}.{name} must take ({', '.join(parameters)}): {error}", "invalid"


def hooks_of_user(callbacks: Sequence[Callback], state: TrainState) -> list[Callback]:
    """Return a user's callbacks as the trainer calls them."""
    state.wants_samples = any(type(callback).on_samples is not Callback.on_samples for callback in callbacks)
    reserved = {*_RECORD_NAMES, *state.method.headline, *state.method.summaries}
    users: set[str] = set()
    return [UserHooks(callback, reserved=reserved, users=users) for callback in callbacks]


class UserHooks(Callback):
    """The hooks of a user's callback, which return floats; other values are left out with a warning."""

    def __init__(self, callback: Callback, *, reserved: set[str], users: set[str]) -> None:
        """Make hooks of a callback, with sets that those of all callbacks share.

        Args:
            callback: of the user.
            reserved: names of the run's own records, as far as known; they are learned.
            users: names that callbacks of the user have returned.
        """
        self._callback, self._reserved, self._users = callback, reserved, users
        self._warned: set[str] = set()
        for hook in _HOOKS:
            setattr(self, hook, partial(self._call, hook))

    def _call(self, hook: str, state: TrainState, *arguments: Any) -> Record | None:
        if hook == "on_log":
            self._reserved.update(arguments[0].keys() - self._users)
        returned = getattr(self._callback, hook)(state, *arguments)
        if returned is None:
            return None
        problems = [f"returned a value, which is ignored; only {', '.join(_LOGGED)} return numbers"]
        numbers: Record = {}
        if hook in _LOGGED:
            numbers, problems = self._read(returned)
        for text in (f"{type(self._callback).__name__}.{hook} {problem}" for problem in problems):
            if text not in self._warned and state.parallel.is_main:
                logger.warning(text)
            self._warned.add(text)
        self._users.update(numbers)
        return numbers or None

    def _read(self, returned: Any) -> tuple[Record, list[str]]:
        """Return the numbers that a hook has returned, and why others are left out."""
        if not isinstance(returned, Mapping):
            return {}, [f"returned a {type(returned).__name__}, which is ignored; expected numbers by name"]
        numbers: Record = {}
        problems = []
        for name, value in returned.items():
            try:
                if isinstance(value, (str, bytes)):
                    raise TypeError
                number = float(value.detach() if hasattr(value, "detach") else value)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                problems.append(f"returned a {type(value).__name__} as {name!r}, which is left out; expected a number")
                continue
            if not isinstance(name, str) or name in self._reserved:
                problems.append(f"returned {name!r}, which is left out: records of the run have it; use another name")
            elif not math.isfinite(number):
                problems.append(f"returned {number} as {name!r}, which is left out of the records")
            else:
                numbers[name] = number
        return numbers, problems


def _type_name(value: Any) -> str:
    return f"{'an' if type(value).__name__[0] in 'AEIOUaeiou' else 'a'} {type(value).__name__}"
