"""Optimizer in backward: each gradient updates its weight as soon as it is complete, and is freed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from finetrainers.utils.process_state import call_weakly

#: Bytes of gradients that are stepped together: enough that the optimizer's own overhead is small.
_AT_ONCE = 32 * 2**20


class StepInBackward:
    """Hooks that run an optimizer's step within backward, by `register_post_accumulate_grad_hook`.

    It stays one optimizer: its state, groups and `state_dict` do not change. `optimizer.step` updates the weights that
    remain after backward.
    """

    def __init__(self, optimizer: Optimizer, *, at_once: int | None = None) -> None:
        """Args:
        optimizer: optimizer of one group, whose updates of different weights do not depend on each other.
        at_once: bytes of gradients that are stepped together; default: 32 MiB.
        """
        self._optimizer = optimizer
        self._at_once = at_once or _AT_ONCE
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._pending: list[nn.Parameter] = []
        self._bytes = 0
        self._norms: dict[int, Tensor] = {}  # norm of each gradient, by the position of its weight
        self._is_paused = False
        [group] = optimizer.param_groups
        self._positions = {id(weight): position for position, weight in enumerate(group["params"])}
        for weight in group["params"]:
            weight.register_post_accumulate_grad_hook(partial(call_weakly, WeakMethod(self._handle_gradient)))
        optimizer.step = self._finish  # type: ignore[method-assign, assignment]
        optimizer.zero_grad = self._drop  # type: ignore[method-assign]
        optimizer.in_backward = self  # type: ignore[attr-defined]

    def take_norm(self) -> Tensor | None:
        """Return the norm of all gradients since the last call, or None if there were none."""
        norms = [self._norms[position] for position in sorted(self._norms)]
        self._norms = {}
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    @contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Free gradients without an update within the block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _handle_gradient(self, weight: Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        if self._is_paused:
            weight.grad = None
            return
        self._norms[self._positions[id(weight)]] = torch.linalg.vector_norm(weight.grad.detach())
        self._pending.append(weight)
        self._bytes += weight.grad.nbytes
        if self._bytes >= self._at_once:
            self._finish()

    def _finish(self, closure: Any = None) -> None:
        """Update the weights that have gradients, and free these."""
        assert closure is None
        if not self._pending:
            return
        [group] = self._optimizer.param_groups  # another object after a state was loaded
        everything = group["params"]
        group["params"] = self._pending
        try:
            self._step()
        finally:
            group["params"] = everything
            self._drop()

    def _drop(self, set_to_none: bool = True) -> None:
        for weight in self._pending:
            weight.grad = None
        self._pending, self._bytes = [], 0
        self._zero_grad(set_to_none)


def get_step_in_backward(optimizer: Any) -> StepInBackward | None:
    """Return the object that runs an optimizer's step in backward, or None if its step is separate."""
    return getattr(optimizer, "in_backward", None)
