"""Functions and modules as rewards: what they declare, and the class that calls them. Imports no torch at its top."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from finetrainers.utils.failures import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from .base import ImageUse, Reward

#: Clips of a call that a score may depend on; see `Reward.scope`.
SCOPES = ("clip", "group")
Scorer = TypeVar("Scorer", bound="Callable[..., Any] | str")


def reward_function(
    *, scope: Literal["clip", "group"] = "clip", differentiable: bool = False, patience: float | None = None
) -> Callable[[Scorer], Scorer]:
    """Declare what kind of reward a function is; a decorator.

        @reward_function(scope="group")
        def ranks(videos, prompts):
            return videos.mean(dim=(1, 2, 3, 4)).argsort().argsort()

    Args:
        scope: the clips that a score may depend on; `group` means all clips of a prompt, which one call has then.
        differentiable: whether gradients of the scores reach the pixels.
        patience: seconds for which a call is repeated that fails for its connection; default: that of `Reward`.

    Raises:
        ValueError: an unknown scope.
    """
    if scope not in SCOPES:
        raise InputError(f"scope must be 'clip' or 'group', got {scope!r}", "unknown")

    def declare(function: Any) -> Any:
        function.scope, function.differentiable = scope, differentiable
        if patience is not None:
            function.patience = patience
        return function

    return declare


def class_from_function(function: Callable[..., Any]) -> type[Reward]:
    """Return the class of a function, or of a module, which gets the clips on its own device."""
    from torch import nn

    from .base import Reward
    from .calls import Columns, is_async

    is_module = isinstance(function, nn.Module)
    signed = function.forward if isinstance(function, nn.Module) else function  # whose arguments are read

    async def answer(*arguments: Any, **keywords: Any) -> Mapping[str, Any]:
        return {"score": await function(*arguments, **keywords)}

    class FunctionReward(Reward):
        __doc__ = function.__doc__
        called = staticmethod(signed)
        differentiable = getattr(function, "differentiable", False)
        scope = getattr(function, "scope", "clip")
        patience = getattr(function, "patience", Reward.patience)
        columns = Columns.from_function(signed)
        asynchronous = is_async(function)
        images = _image_use(signed)

        def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float, **keywords: Any) -> Mapping[str, Any]:
            keywords |= {"fps": fps} if takes_fps else {}
            if is_module and (weight := next(function.parameters(), None)) is not None:  # type: ignore[attr-defined]
                videos = videos.to(weight.device)
            if self.asynchronous:
                return answer(videos, prompts, **keywords)  # type: ignore[return-value]
            return {"score": function(videos, prompts, **keywords)}

        differentiate = score

    takes_fps = _takes(signed, "fps") or FunctionReward.columns.takes_all
    return FunctionReward


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:
        return False


def _image_use(function: Callable[..., Any]) -> ImageUse:
    """Return how a function uses images, by its keyword `images`; none if Python does not know its arguments."""
    try:
        keyword = inspect.signature(function).parameters.get("images")
    except ValueError:
        return "none"
    if keyword is None:
        return "none"
    return "required" if keyword.default is inspect.Parameter.empty else "optional"
