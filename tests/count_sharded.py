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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from finetrainers.memory.activation_plan import select_evenly
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.memory.count import LiveStorages, StepShape, cuda_autocast, fake_group, fake_weights

if TYPE_CHECKING:
    from finetrainers.models.spec import ModelSpec


_LARGE = 2**20


@dataclass(frozen=True)
class Processes:
    """How processes share a step.

    Attributes:
        number: of processes.
        sync_each_batch: whether gradients are reduced after each micro-batch.
        micro_batches: of a step.
        group_size: processes that share one copy of the weights; None: all.
        reshard: whether the gathered weights of a block are freed after its forward pass.
        offload: whether weights and gradients are in host memory, which is not counted.
    """

    number: int
    sync_each_batch: bool = True
    micro_batches: int = 1
    group_size: int | None = None
    reshard: bool = True
    offload: bool = False


class ResizedStorages(LiveStorages):
    """Adds up the bytes of storages that are alive, at the sizes that they have now: FSDP2 empties and refills its own.

    Storages of less than 1 MiB, which are many, count at their first size.
    """

    def __init__(self) -> None:
        super().__init__()
        self._large: dict[int, Any] = {}
        self._small: dict[int, int] = {}
        self._sum_of_small = 0
        self._on_host: set[int] = set()

    def on_host(self, tensor: Tensor) -> None:
        """Leave out a tensor that would be in host memory."""
        self._on_host.add(storage_of(tensor)._cdata)

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            key = storage._cdata
            if key in self._large or key in self._small:
                continue
            if storage.nbytes() >= _LARGE:
                self._large[key] = weakref.ref(storage)
            else:
                self._small[key] = storage.nbytes()
                self._sum_of_small += storage.nbytes()
            weakref.finalize(storage, self._forget, key)
        large = [reference() for key, reference in self._large.items() if key not in self._on_host]
        self.live = sum(storage.nbytes() for storage in large if storage is not None) + self._sum_of_small
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self._large.pop(key, None)
        self._sum_of_small -= self._small.pop(key, 0)
        self._on_host.discard(key)

    def restart(self) -> None:
        self.peak = 0
        self.add(())


def storage_of(tensor: Tensor) -> Any:
    """The memory of a tensor on this process."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


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
    with (
        fake_processes(processes.number, processes.group_size) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        _copies_from_host(),
    ):
        fake_weights(network, shape)
        set_activation_memory(
            network.train(), shape.stored, blocks=select_evenly(spec.block_modules(network), shape.share)
        )
        shard(
            network, spec.block_modules(network), mesh=mesh, computed=shape.autocast or torch.float32,
            reshard=processes.reshard,
            offload=CPUOffloadPolicy(pin_memory=False) if processes.offload else OffloadPolicy(),
        )  # fmt: skip
        conditions, meta = spec.empty_inputs(shape.batch_size)
        live = ResizedStorages()
        if processes.offload:
            _leave_on_host(network, live)
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


def _leave_on_host(network: nn.Module, live: ResizedStorages) -> None:
    """Do not count the shards of weights, nor their gradients from when they have left the device."""
    for parameter in network.parameters():
        live.on_host(parameter)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda shard: live.on_host(shard.grad))  # type: ignore[arg-type]


@contextmanager
def _copies_from_host() -> Iterator[None]:
    """Let offloaded shards be copied before they are gathered, as to a GPU. Here host and device are the same."""
    cls: Any = FSDPParam
    original = cls.all_gather_inputs

    def inputs(parameter: FSDPParam) -> list[Tensor]:
        shards = original.fget(parameter)
        own = parameter._sharded_param_data if parameter.offload_to_cpu else None
        return [shard.clone() if own is not None and shard is own else shard for shard in shards]

    cls.all_gather_inputs = property(inputs)
    try:
        yield
    finally:
        cls.all_gather_inputs = original


@contextmanager
def fake_processes(number: int, group_size: int | None = None, *, rank: int = 0) -> Iterator[DeviceMesh]:
    """Within the block, this is one of so many processes, whose exchanges do nothing; their mesh.

    Args:
        number: of processes.
        group_size: processes that share one copy of the weights; None: all, and the mesh has one dimension.
        rank: of this process.
    """
    shape = (number,) if group_size is None else (number // group_size, group_size)
    with fake_group(number, rank=rank):
        yield init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
