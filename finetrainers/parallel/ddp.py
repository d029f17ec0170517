"""DDP, or one process: every process holds the whole network, and accelerate averages the gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from .strategy import Load, MakeOptimizer, Strategy, Swap, Wanted, widen

#: What is averaged at once: enough to use the network well, and little memory.
_BUCKET_BYTES = 25 << 20
#: How many pieces are exchanged at the same time: more would take memory, and wait for the same network.
_ON_THEIR_WAY = 2


class DDP(Strategy):
    """Processes that each hold the whole network, or one process."""

    def _kind(self) -> str:
        return "DDP" if self.world_size > 1 else ""

    def prepare(
        self, load: Load, make_optimizer: MakeOptimizer, *, blocks: Sequence[str] = (), swap: Swap | None = None,
        mapped: bool = False, widened: torch.dtype | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        model = self.in_turns("loading the network", lambda: self._place(load(), swap, widened), together=mapped)
        with self.raise_on_all_ranks("making the optimizer"):
            optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        model = self.accelerator.prepare(model, device_placement=[False])
        free_group_last(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        return model, self._prepare_optimizer(optimizer)

    def _place(self, model: nn.Module, swap: Swap | None, widened: torch.dtype | None) -> nn.Module:
        if swap is not None:  # their memory is shared by several blocks: nothing that could be broadcast
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(swap(model)))
        return widen(model.to(self.device), widened)

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        self._micro_batch += 1
        is_last = self._micro_batch == self.accumulation
        return nullcontext() if is_last and not self.manual_all_reduce else self.accelerator.no_sync(model)

    def all_reduce(self) -> None:
        """See `Strategy`; in pieces of 25 MiB, as DDP itself does, of which the next is put together while one is on its way."""
        if not self.manual_all_reduce:
            return
        sent: deque[tuple[Sequence[Tensor], Tensor, dist.Work]] = deque()
        for some in _take_tensors(list(self.gradients()), _BUCKET_BYTES):
            flat = _flatten_dense_tensors(some)
            flat /= self.world_size
            sent.append((some, flat, dist.all_reduce(flat, async_op=True)))
            if len(sent) > _ON_THEIR_WAY:
                _receive(*sent.popleft())
        while sent:
            _receive(*sent.popleft())

    def full_state(self, model: nn.Module, *, wanted: Wanted | None = None) -> dict[str, Tensor]:
        return self.unwrap(model).state_dict()

    def optimizer_state(self, model: nn.Module, optimizer: Any) -> dict[str, Any] | None:
        return optimizer.state_dict()

    def load_optimizer(self, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)


def _receive(gradients: Sequence[Tensor], flat: Tensor, work: dist.Work) -> None:
    """Once they are averaged, put the numbers of a piece into its gradients."""
    work.wait()
    for gradient, averaged in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(averaged)


def free_group_last(model: nn.Module) -> None:
    """Let the process group go after DDP's reducer, which also owns it: attributes are freed in the order they were set.

    Gloo's group waits for its threads when it is freed, and these may wait for Python's lock to free a tensor. From Python
    a group is freed without that lock, by the reducer with it: a process that fails would then never end
    (https://github.com/pytorch/pytorch/issues/56297).
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module._group_freed_last = module.process_group  # type: ignore[assignment]
