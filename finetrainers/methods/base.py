"""The seam between the trainer and what it trains: a method turns batches into weighted losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.diffusion.process import Process
from finetrainers.models.spec import ModelSpec, VAEStats

T = TypeVar("T")

#: Named scalars of one micro-batch, on the device until they are logged; they add up over a step's micro-batches.
Metrics = Mapping[str, Tensor]


@dataclass(frozen=True)
class MethodParts:
    """What a method may be built from.

    Attributes:
        config: the resolved configuration.
        spec, process, scheduler, geometry, vae_stats: the loaded checkpoint's description.
        first_frame_p: probability, per sample, of conditioning on the clean first frame.
        source: what feeds the method; see `register_method`.
        parallel: the processes of the run.
        network: the trained network below its wrappers, for what concerns its adapters.
    """

    config: TrainConfig
    spec: ModelSpec
    process: Process
    scheduler: Any
    geometry: Geometry
    vae_stats: VAEStats
    first_frame_p: float
    source: Any
    parallel: Any
    network: nn.Module


@dataclass(frozen=True)
class Evaluation:
    """What a method says of the current network.

    Attributes:
        record: named numbers, the same on every rank.
        clips: this rank's samples: number, prompt, and `[T, C, H, W]` in [0, 1].
    """

    record: Mapping[str, float]
    clips: Sequence[tuple[int, str, Tensor]]


class Step(Sequence[T]):
    """The micro-batches of one optimizer step, each made when it is reached, so that one at a time need be in memory.

    Without any, the step changes nothing: neither weights nor their average.

    Attributes:
        metrics: numbers of the step besides those of its losses; may change until its micro-batches are done.
    """

    def __init__(
        self,
        items: Sequence[Any],
        make: Callable[[Any], T] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Args:
        items: of what each micro-batch is made.
        make: makes it; default: the items are micro-batches.
        metrics: see the class.
        """
        self._items = items
        self._make = make
        self.metrics = dict(metrics or {})

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        item = self._items[index]
        if self._make is None:
            return item
        return [self._make(one) for one in item] if isinstance(index, slice) else self._make(item)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items) if self._make is None else map(self._make, self._items)


class Method(Protocol):
    """One training algorithm. The trainer asks for the micro-batches of a step and for the loss of each."""

    @classmethod
    def create(cls, parts: MethodParts) -> Method:
        """The method of a run."""
        ...

    def steps(self, start: int, transformer: nn.Module) -> Iterator[Step[Any]]:
        """Optimizer steps `start`, `start + 1`, ... of this rank, without end.

        Every rank has equally many micro-batches in a step. A method may call the (wrapped) network to make them.
        """
        ...

    def can_stop_after(self, step: int) -> bool:
        """Whether a run that ends after `step` optimizer steps can be continued, `steps(step)` being the rest."""
        ...

    def loss(self, transformer: nn.Module, batch: Any) -> tuple[Tensor, Metrics]:
        """Loss of a micro-batch, weighted so that a step's losses sum to its mean, and its metrics likewise."""
        ...

    def evaluate(self, transformer: nn.Module) -> Evaluation | None:
        """Samples and scores of the current network; None for methods that judge by held-out clips alone."""
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
