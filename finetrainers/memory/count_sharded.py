"""Peak memory of a training step under FSDP2, counted on fake tensors under a fake process group.

The network is split by the code that splits it in a run, and PyTorch's own hooks gather and free its weights. Only the
exchange between processes is left out, for which `torch.distributed` has a backend.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from .activation_plan import spread
from .checkpointing import set_activation_memory
from .count import LiveStorages, StepShape, cuda_autocast, fake_weights

if TYPE_CHECKING:
    from finetrainers.models.spec import ModelSpec


@dataclass(frozen=True)
class Processes:
    """How processes share a step.

    Attributes:
        number: of processes.
        sync_each_batch: whether gradients are reduced after each micro-batch.
        micro_batches: of a step.
    """

    number: int
    sync_each_batch: bool = True
    micro_batches: int = 1


class ResizedStorages(LiveStorages):
    """Adds up the bytes of storages that are alive, at the sizes that they have now: FSDP2 empties and refills its own."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Any] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            key = storage._cdata
            if key not in self._alive:
                self._alive[key] = weakref.ref(storage)
                weakref.finalize(storage, self._alive.pop, key, None)
        storages = [reference() for reference in self._alive.values()]
        self.live = sum(storage.nbytes() for storage in storages if storage is not None)
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        self.peak = 0
        self.add(())


def count_sharded(
    spec: ModelSpec, network: nn.Module, shape: StepShape, processes: Processes, *, shard: Callable[..., None]
) -> int:
    """Bytes of the peak of a step of one process, its weights and gradients included, without optimizer state.

    Args:
        spec: of the network.
        network: on the meta device, with its adapter attached. It is counted as it is, with all of its blocks, and is
            changed.
        shape: of a micro-batch.
        processes: that share the network.
        shard: splits a network, `parallel.fsdp.shard`.
    """
    with fake_processes(processes.number) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        fake_weights(network, shape)
        set_activation_memory(network.train(), shape.stored, blocks=spread(spec.block_modules(network), shape.share))
        shard(network, spec.block_modules(network), mesh=mesh, computed=shape.autocast or torch.float32)
        conditions, meta = spec.empty_inputs(shape.batch_size)
        live = ResizedStorages()
        live.add([*network.parameters(), *network.buffers()])
        with live, cuda_autocast():
            for number in range(1, processes.micro_batches + 1):
                network.set_requires_gradient_sync(number == processes.micro_batches or processes.sync_each_batch)  # type: ignore[operator]
                x, target, *_others = (torch.empty(shape.batch_size, *shape.latent) for _ in range(4))  # x0 and noise
                t = torch.zeros(shape.batch_size, dtype=torch.float32 if spec.facts.is_flow else torch.long)
                with torch.autocast("cpu", shape.autocast, enabled=shape.autocast is not None):
                    prediction = spec.predict(network, x, t, conditions, meta)
                torch.autograd.backward((prediction.float() - target).square().flatten(1).mean(1).mean())
                del prediction
        return int(live.peak)


@contextmanager
def fake_processes(number: int) -> Iterator[DeviceMesh]:
    """Within the block, this is rank 0 of so many processes, whose exchanges do nothing; their mesh."""
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (number,))
    finally:
        dist.destroy_process_group()
