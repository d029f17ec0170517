"""DDP, or one process: every process holds the whole network, and gradients are averaged over all of them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes

from finetrainers.config.parallel import ParallelSection
from finetrainers.config.root import TrainConfig

from .exchange import GradientExchange
from .strategy import Load, MakeOptimizer, Strategy, Swap, WeightFilter, widen

#: Bytes broadcast at once, as by `DistributedDataParallel`.
_BROADCAST_BYTES = 250 << 20


class DDP(Strategy):
    """Processes that each hold the whole network, or one process."""

    def __init__(self, config: TrainConfig, options: ParallelSection) -> None:
        """See `Strategy`."""
        super().__init__(config, options)
        self._exchange: GradientExchange | None = None  # one process has none
        self._swapped: Set[str] = frozenset()

    def _kind(self) -> str:
        return "DDP" if self.world_size > 1 else ""

    def prepare(
        self, load: Load, make_optimizer: MakeOptimizer, *, blocks: Sequence[str] = (), swap: Swap | None = None,
        mapped: bool = False, widened: torch.dtype | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        model = self.one_at_a_time("loading the network", lambda: self._place(load(), swap, widened), together=mapped)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        with self.raise_on_all_ranks("making the optimizer"):
            optimizer = make_optimizer(self._parameters)
            if self.world_size > 1:
                self._exchange = GradientExchange(self._parameters, overlaps=self._options.overlap_gradient_exchange)
        # Only for its autocast and torch.compile: in the other mode it would wrap the network in a DDP that also
        # exchanges gradients.
        model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        if dist.group.WORLD is not None and self.world_size > 1:
            _verify_param_shape_across_processes(dist.group.WORLD, [*self._parameters])
            _sync_module_states(self.unwrap(model), dist.group.WORLD, _BROADCAST_BYTES, 0, self._swapped)
        return model, self._prepare_optimizer(optimizer)

    def _place(self, model: nn.Module, swap: Swap | None, widened: torch.dtype | None) -> nn.Module:
        if swap is not None:  # blocks share the memory of swapped weights, so that they cannot be broadcast
            self._swapped = set(swap(model))
        return widen(model.to(self.device), widened)

    def begin_step(self, num_micro_batches: int) -> None:
        super().begin_step(num_micro_batches)
        if self._exchange is not None:
            self._exchange.begin()

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        self._micro_batch += 1
        exchange, is_last = self._exchange, self._micro_batch == self.accumulation
        return exchange.during_backward() if exchange is not None and exchange.overlaps and is_last else nullcontext()

    def complete_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.complete()

    def all_reduce(self) -> None:
        if self._exchange is not None:
            self._exchange.receive()

    def full_state(self, model: nn.Module, *, wanted: WeightFilter | None = None) -> dict[str, Tensor]:
        return self.unwrap(model).state_dict()

    def optimizer_state(self, model: nn.Module, optimizer: Any) -> dict[str, Any] | None:
        return optimizer.state_dict()

    def load_optimizer(self, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)
