"""A process by itself, for data and models outside of a run."""

from __future__ import annotations

import torch
from torch import Tensor

from .ranks import DistributedContext


class SingleProcess(DistributedContext):
    """A process that exchanges nothing with others, and has its share of the samples of a given number of processes.

    The program may have joined other processes in its own way.
    """

    def __init__(self, device: torch.device, *, data_rank: int = 0, data_size: int = 1) -> None:
        self.sharing, self.waited_s = 1, 0.0
        self._device, self._data_rank, self._data_size = device, data_rank, data_size
        self._step_group = self._idle_group = self._pulse = None

    rank, world_size, is_main = 0, 1, True  # type: ignore[assignment]

    @property
    def data_rank(self) -> int:
        return self._data_rank

    @property
    def data_size(self) -> int:
        return self._data_size

    @property
    def device(self) -> torch.device:
        return self._device

    def sum(self, value: Tensor) -> Tensor:
        return value.to(self.device)

    def close(self) -> None:
        """Do nothing: no group was joined."""
