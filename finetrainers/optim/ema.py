"""An exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor
from torch.nn import Parameter


class EMA:
    """fp32 averages of named weights: diffusers' `EMAModel`, with names for saving and a swap that always ends.

    After optimizer step n (from 1), with s = n - update_after_step - 1, the average moves by
    `average += (1 - d) * (weight - average)`, where d = 0 for s <= 0 (the average is the weight itself), else
    d = min((1 + s) / (10 + s), decay): early averages span few steps, so the starting weights are forgotten.
    """

    def __init__(self, parameters: Mapping[str, Parameter], *, decay: float, update_after_step: int = 0) -> None:
        if not parameters:
            raise ValueError("a moving average needs at least one trained weight")
        self._parameters = dict(parameters)
        self._model = EMAModel(self._parameters.values(), decay=decay, update_after_step=update_after_step)
        self._model.to(dtype=torch.float32)
        self._is_applied = False

    def update(self) -> None:
        """Take the current weights into the average; call once after every optimizer step."""
        assert not self._is_applied, "the averages themselves must not be averaged"
        self._model.step(self._parameters.values())

    @property
    def weights(self) -> dict[str, Tensor]:
        """The averages by name, fp32; views, not copies."""
        return dict(zip(self._parameters, self._model.shadow_params, strict=True))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model holds the averages, in its own dtype; afterwards its weights, bit for bit.

        The weights wait on the CPU, so that a swap needs no second copy on the device.
        """
        assert not self._is_applied, "already applied"
        parameters = list(self._parameters.values())
        self._model.store(parameters)
        self._model.copy_to(parameters)
        self._is_applied = True
        try:
            yield
        finally:
            self._model.restore(parameters)
            self._is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """The averages by name and the number of updates; tensors are references."""
        return {"num_updates": self._model.optimization_step, "shadow": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, exactly. Decay and start come from the configuration, not from the state.

        Raises:
            ValueError: the state is of other weights.
        """
        saved: Mapping[str, Tensor] = state["shadow"]
        current = self.weights
        if saved.keys() != current.keys():
            names = sorted(saved.keys() ^ current.keys())
            raise ValueError(
                f"the saved moving average is of other weights: {len(names)} names differ, the first is {names[0]!r}"
            )
        for name, average in current.items():
            if average.shape != saved[name].shape:
                raise ValueError(
                    f"the saved moving average of {name!r} has shape {tuple(saved[name].shape)}, "
                    f"the weight {tuple(average.shape)}"
                )
            average.copy_(saved[name])
        self._model.optimization_step = int(state["num_updates"])
