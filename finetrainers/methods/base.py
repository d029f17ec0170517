"""The seam between the trainer and what it trains: a method turns batches into weighted losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.diffusion.process import Process
from finetrainers.models.spec import ModelSpec, VAEStats
from finetrainers.utils.device import to_device
from finetrainers.utils.failures import InputError
from finetrainers.utils.text import shortened

from .spec import BatchSource

T = TypeVar("T")
S = TypeVar("S", bound="Step[Any]")
Source = TypeVar("Source", bound=BatchSource)

#: Named scalars of one micro-batch, on the device until they are logged; they add up over a step's micro-batches.
Metrics = Mapping[str, Tensor]

#: Reduction of the numbers of several steps to the number of a record.
Summary = Literal["mean", "last", "min", "max"]


@dataclass(frozen=True)
class MethodParts(Generic[Source]):
    """The arguments that a method may be built from.

    Attributes:
        config: the resolved configuration.
        spec, process, scheduler, geometry, vae_stats: the loaded checkpoint's description.
        source: the source of the method's batches; see `MethodSpec.source`.
        parallel: the processes of the run.
        network: the trained network below its wrappers, for access to its adapters.
        weights_dtype: dtype in which its weights were loaded.
        initial_lora: file of the LoRA that the reference model has, or None if it has none.
    """

    config: TrainConfig
    spec: ModelSpec
    process: Process
    scheduler: Any
    geometry: Geometry
    vae_stats: VAEStats
    source: Source
    parallel: Any
    network: nn.Module
    weights_dtype: torch.dtype
    initial_lora: Path | None = None


@dataclass(frozen=True)
class Evaluation:
    """Results of evaluating the current network.

    Attributes:
        record: named numbers, equal on every rank.
        clips: samples that this process writes: number, prompt, and `[T, C, H, W]` in [0, 1].
    """

    record: Mapping[str, float]
    clips: Sequence[tuple[int, str, Tensor]] = ()


class Splittable(Protocol):
    """A micro-batch, or the item that one is made of, which can be processed in pieces.

    Attributes:
        latent_size: frames, height and width of the latents, which determine with the number of samples how much memory
            it takes; empty where all samples of a run have one size.
    """

    @property
    def latent_size(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def split(self: T, pieces: int) -> list[T]:
        """Return exactly `pieces` pieces whose losses and gradients add up to the whole; spare pieces have no share."""
        ...


class Step(Sequence[T]):
    """The micro-batches of one optimizer step, each made when it is reached, so that one at a time need be in memory.

    Without any, the step changes nothing: neither weights nor their average.

    Attributes:
        items: items that micro-batches are made of.
        metrics: numbers of the step other than those of its losses; may change until its micro-batches are done.
        events: events while it was put together, for the records: each with its `kind`.
    """

    def __init__(
        self,
        items: Sequence[Any],
        make: Callable[[Any], T] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        events: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Args:
        items: items that micro-batches are made of, each a `Splittable`.
        make: makes a micro-batch of an item; default: the items are micro-batches.
        metrics: see the class.
        events: see the class.
        """
        self.items = items
        self._make = make
        self.metrics = dict(metrics or {})
        self.events = events

    def split(self: S, pieces: Sequence[int]) -> S:
        """Return a copy of the step with each micro-batch split into its number of pieces."""
        step = copy(self)  # the metrics are the same object: whoever made the step goes on reading them
        step.items = [piece for item, count in zip(self.items, pieces, strict=True) for piece in item.split(count)]
        return step

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        item = self.items[index]
        if self._make is None:
            return item
        return [self._make(part) for part in item] if isinstance(index, slice) else self._make(item)

    def __iter__(self) -> Iterator[T]:
        return iter(self.items) if self._make is None else map(self._make, self.items)


class Method(Protocol):
    """One training algorithm, which gives the trainer the micro-batches of a step and the loss of each.

    The class is called with `MethodParts`.

    Attributes:
        headline: names of the numbers that summarize training, most important first; a name that ends in `/` stands for
            all that begin so.
        summaries: reductions of the numbers of several steps to one, if not the mean; names as in `headline`.
        evaluates: whether `evaluate` has held-out data for judging the network.
    """

    @property
    def headline(self) -> tuple[str, ...]: ...

    @property
    def summaries(self) -> Mapping[str, Summary]: ...

    @property
    def evaluates(self) -> bool: ...

    def steps(self, start: int, transformer: nn.Module) -> Iterator[Step[Any]]:
        """Yield optimizer steps `start`, `start + 1`, ... of this rank, without end.

        Every rank has equally many micro-batches in a step. A method may call the (wrapped) network to make them.
        """
        ...

    def can_stop_after(self, step: int) -> bool:
        """Return whether a run that ends after `step` optimizer steps can be continued by `steps(step)`."""
        ...

    def loss(self, transformer: nn.Module, batch: Any) -> tuple[Tensor, Metrics]:
        """Return the loss and the metrics of a micro-batch, weighted so that those of a step sum to its mean.

        A micro-batch with an attribute `own_loss` is given to that instead.
        """
        ...

    def dry_steps(self, transformer: nn.Module) -> Iterator[tuple[str, Step[Any]]]:
        """Yield a named step of one micro-batch for each size that training will meet, most memory first.

        The name describes the size. Every rank has equal sizes. Going through them must not change the batches of
        `steps`.
        """
        ...

    def evaluate(self, transformer: nn.Module) -> Evaluation:
        """Return the loss on held-out clips, or samples and scores; called without gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resuming needs beyond the step number; plain values and tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        ...


def micro_batch_loss(method: Method, transformer: nn.Module, batch: Any) -> tuple[Tensor, Metrics]:
    """Return loss and metrics of a micro-batch: by its `own_loss`, or else by the method.

    Raises:
        InputError: a method of a user has returned something else.
    """
    result = getattr(batch, "own_loss", method.loss)(transformer, batch)
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    is_loss = isinstance(loss, Tensor) and loss.ndim == 0
    if not (is_loss and isinstance(metrics, Mapping) and all(isinstance(value, Tensor) for value in metrics.values())):
        message = "must return the loss, a tensor without dimensions, and a dictionary of such tensors"
        raise InputError(f"{type(method).__name__}.loss {message}, got {shortened(repr(result))}", "invalid")
    return result


def standard_normal(
    generators: Sequence[torch.Generator], shape: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Return standard normal noise `[B, *shape]` fp32 on `device`, row b drawn from generator b.

    It is drawn on the host: CUDA's streams differ from the CPU's, and from one kind of GPU to another.
    """
    noise = torch.empty(len(generators), *shape, dtype=torch.float32, device="cpu")
    for row, generator in zip(noise, generators, strict=True):
        row.normal_(generator=generator)
    return to_device(noise, device)
