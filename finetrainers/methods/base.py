"""The seam between the trainer and what it trains: a method turns batches into weighted losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from finetrainers.models.spec import Batch

#: Named scalars of one micro-batch, on the device until they are logged; they add up over a step's micro-batches.
Metrics = Mapping[str, Tensor]


class Method(Protocol):
    """One training algorithm. The trainer asks for the micro-batches of a step and for the loss of each."""

    #: Micro-batches per optimizer step, the same on every rank and at every step.
    accumulation: int

    def steps(self, start: int) -> Iterator[Sequence[Batch]]:
        """The micro-batches of optimizer steps `start`, `start + 1`, ... of this rank, without end."""
        ...

    def loss(self, transformer: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        """Loss of a micro-batch, weighted so that a step's losses sum to its mean, and its metrics likewise."""
        ...

    def eval_loss(self, transformer: nn.Module, batch: Batch, quantile: float) -> Tensor:
        """Unweighted per-sample loss `[B]` at one fixed noise-level quantile, with noise fixed per sample."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beyond the step number; plain values and tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...


def standard_normal(generators: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
    """Standard normal noise `[B, *shape]` fp32, row b drawn from generator b."""
    device = generators[0].device
    return torch.stack([torch.randn(*shape, generator=g, device=device) for g in generators])
