"""An exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from finetrainers.utils.failures import InputError

#: Bytes updated by one call: enough to keep a device busy, with little memory for the differences.
_BYTES_AT_ONCE = 64 << 20


class EMA:
    """Exponential moving average of named weights in fp32, and a context in which the model holds it.

    After optimizer step n (from 1), with s = n - update_after_step - 1, the average moves by `average += (1 - d) *
    (weight - average)`, where d = 0 for s <= 0 (the average is the weight itself), else d = min((1 + s) / (10 + s),
    decay): early averages span few steps, so the starting weights are forgotten.

    diffusers' `EMAModel` computes this average, tensor by tensor: its `foreach` variant rounds differently, and takes
    memory for the differences of all weights at once; and importing it imports every network of diffusers.
    """

    def __init__(self, parameters: Mapping[str, Parameter], *, decay: float, update_after_step: int = 0) -> None:
        if not parameters:
            raise ValueError("an EMA requires trainable parameters")
        self._parameters = dict(parameters)
        self._averages = [p.detach().to(torch.float32, copy=True) for p in self._parameters.values()]
        self._decay = decay
        self._start = update_after_step
        self._num_updates = 0
        self.is_applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights; call it once after every optimizer step."""
        assert not self.is_applied, "an average cannot be averaged"
        self._num_updates += 1
        s = self._num_updates - self._start - 1
        d = min((1 + s) / (10 + s), self._decay) if s > 0 else 0.0
        for averages, weights in _chunks(self._averages, list(self._parameters.values())):
            moves = torch._foreach_sub(averages, weights)
            torch._foreach_mul_(moves, 1 - d)
            torch._foreach_sub_(averages, moves)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Averages by name, fp32; views, not copies."""
        return dict(zip(self._parameters, self._averages, strict=True))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the model hold the averages, in its own dtype, within the block; then restore its weights bit for bit.

        The weights wait on the CPU, so that a swap needs no second copy on the device.
        """
        assert not self.is_applied, "already applied"
        weights = [p.detach().to("cpu", copy=True) for p in self._parameters.values()]
        self.is_applied = True
        try:
            self._load(self._averages)
            yield
        finally:
            self._load(weights)
            self.is_applied = False

    def _load(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters.values(), values, strict=True):
            parameter.data.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name and the number of updates; tensors are references."""
        return {"num_updates": self._num_updates, "shadow": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, exactly. Decay and start come from the configuration, not from the state.

        Raises:
            ValueError: the state is of other weights.
        """
        saved: Mapping[str, Tensor] = state["shadow"]
        current = self.weights
        if saved.keys() != current.keys():
            names = sorted(saved.keys() ^ current.keys())
            raise InputError(
                f"the saved EMA is of other weights: {len(names)} names differ, the first is {names[0]!r}",
                "mismatch",
            )
        for name, average in current.items():
            if average.shape != saved[name].shape:
                raise InputError(
                    f"the saved EMA of {name!r} has shape {tuple(saved[name].shape)}, the weight "
                    f"{tuple(average.shape)}",
                    "mismatch",
                )
            average.copy_(saved[name])
        self._num_updates = int(state["num_updates"])


def _chunks(averages: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield averages and their weights, in lists of at most `_BYTES_AT_ONCE`, or of one tensor that is larger."""
    first, size = 0, 0
    for index, average in enumerate(averages):
        if size and size + average.nbytes > _BYTES_AT_ONCE:
            yield list(averages[first:index]), list(weights[first:index])
            first, size = index, 0
        size += average.nbytes
    yield list(averages[first:]), list(weights[first:])
