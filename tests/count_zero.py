"""Peak memory of a training step under DeepSpeed ZeRO, counted: DeepSpeed's own engine runs on fake tensors.

The engine is made from the config of a run, and shards, gathers, averages and updates under a fake process group. What
stands for the GPU is a second CPU device, so that what DeepSpeed keeps in host memory is told apart. Streams are not
there: memory that a GPU's allocator holds back until a stream has finished is not counted.
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from count_sharded import ResizedStorages, fake_processes, storage_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from finetrainers.memory.activation_plan import select_evenly
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.memory.count import StepShape, fake_weights

if TYPE_CHECKING:
    from finetrainers.models.spec import ModelSpec

#: Stands for the GPU; the CPU without a number is the host.
DEVICE = torch.device("cpu:1")


@dataclass(frozen=True)
class CountedZero:
    """Bytes of one process.

    Attributes:
        loading: peak on the device while DeepSpeed takes over the weights.
        step: peak on the device of a step with its update.
        persistent_bytes: on the device between steps.
        host: between steps in host memory.
        saving: peak on the device while the weights are gathered for a file.
    """

    loading: int
    step: int
    persistent_bytes: int
    host: int
    saving: int


class TwoMemories(ResizedStorages):
    """Adds up the bytes of storages on the device, as the base does, and of those on the host.

    A storage belongs to where the first tensor says that it is. Numbers that a program reads are 1, and its flags are
    off.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_host: dict[int, Any] = {}

    @property
    def host(self) -> int:
        """Bytes on the host now."""
        there = (reference() for reference in list(self._of_host.values()))
        return sum(storage.nbytes() for storage in there if storage is not None)

    def add(self, tensors: Iterable[Tensor]) -> None:
        found = []
        for tensor in tensors:
            key = storage_of(tensor)._cdata
            if tensor.device == DEVICE and key not in self._of_host:
                found.append(tensor)
            elif tensor.device.type == "cpu" and key not in self._large and key not in self._of_host:
                self._of_host[key] = weakref.ref(storage_of(tensor))
                weakref.finalize(storage_of(tensor), self._of_host.pop, key, None)
        super().add(found)

    def now(self) -> int:
        """Bytes on the device."""
        self.add(())
        return int(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            return 1.0 if args[0].is_floating_point() else 0


def count_zero(
    spec: ModelSpec,
    network: nn.Module,
    shape: StepShape,
    settings: dict[str, Any],
    *,
    processes: int,
    split: Callable[..., None] | None = None,
    gather: Callable[[nn.Module], object] | None = None,
) -> CountedZero:
    """Count two steps: in the first one the optimizer makes its state, and ZeRO-3 learns in which order weights are
    used.

    The process is the last one. Its part of the averaged gradients of ZeRO-1 and 2 is made first.

    Args:
        spec: of the network.
        network: on the meta device, with its adapter attached. It is counted as it is, with all of its blocks, and is
            changed.
        shape: of a micro-batch; `trained` is the dtype that the network computes in.
        settings: DeepSpeed's config, complete.
        processes: that share the network.
        split: shards the weights on the host before DeepSpeed takes over, `parallel.zero.split_weights`; None: they are
            on the device whole.
        gather: takes the weights for a file, `parallel.zero.whole_weights`.
    """
    with (
        fake_processes(processes, rank=processes - 1),
        FakeTensorMode(allow_non_fake_inputs=True),
        deepspeed_on_fakes() as deepspeed,
    ):
        live, optimizer = TwoMemories(), _prepared(spec, network, shape, torch.device("cpu") if split else DEVICE)
        with DEVICE:
            conditions, meta = spec.empty_inputs(shape.batch_size)
        live.add([*network.parameters(), *network.buffers()])
        with live:
            if split is not None:
                split(network, settings, device=DEVICE, computed=shape.trained)
                for tensor in (*network.parameters(), *network.buffers()):
                    tensor.fake_device = DEVICE  # type: ignore[attr-defined]  # where its data are by now
            engine, *_others = deepspeed.initialize(
                model=network, optimizer=optimizer,
                config={**settings, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
            )  # fmt: skip
            loading, steps = int(live.peak), []
            for _ in range(2):
                live.restart()
                _step(spec, engine, shape, conditions, meta, settings["gradient_accumulation_steps"])
                steps.append(int(live.peak))
            persistent_bytes, host = live.now(), live.host
            live.restart()
            if gather is not None:
                gather(network)
            return CountedZero(loading, max(steps), persistent_bytes, host, int(live.peak))


def _prepared(spec: ModelSpec, network: nn.Module, shape: StepShape, device: torch.device) -> torch.optim.Optimizer:
    """Put fake weights into a network, on a device, and make its optimizer."""
    with device:
        fake_weights(network, shape)
    set_activation_memory(network.train(), shape.stored, blocks=select_evenly(spec.block_modules(network), shape.share))
    network.to = lambda *_, **__: network  # type: ignore[method-assign, assignment]  # fake weights cannot be swapped
    return torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], fused=True)


def _step(spec: ModelSpec, engine: Any, shape: StepShape, conditions: Any, meta: Any, micro_batches: int) -> None:
    for number in range(1, micro_batches + 1):
        engine.set_gradient_accumulation_boundary(number == micro_batches)
        with DEVICE:
            x, target, *_others = (torch.empty(shape.batch_size, *shape.latent) for _ in range(4))  # x0 and noise
            t = torch.zeros(shape.batch_size, dtype=torch.float32 if spec.facts.is_flow else torch.long)
            prediction = spec.predict(engine, x, t, conditions, meta)
        engine.backward((prediction.float() - target).square().flatten(1).mean(1).mean(), scale_wrt_gas=False)
        del prediction, x, target, _others
    engine.step()


@contextmanager
def deepspeed_on_fakes() -> Iterator[Any]:
    """Within the block, DeepSpeed takes `DEVICE` for its accelerator, and asks no other process."""
    import deepspeed
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.utils import groups

    accelerator, name = get_accelerator(), str(DEVICE)
    changes = {
        "device_name": lambda *_: name, "current_device_name": lambda *_: name,
        "available_memory": lambda *_: sys.maxsize,
        "on_accelerator": lambda tensor: tensor.device == DEVICE, "pin_memory": lambda tensor, *_, **__: tensor,
    }  # fmt: skip
    with ExitStack() as stack:
        for attribute, function in changes.items():
            stack.enter_context(patch.object(accelerator, attribute, function))
        stack.enter_context(patch.object(coordinator, "assert_ints_same_as_other_ranks", lambda _: None))
        # An extension for gloo, which takes a minute to compile.
        stack.enter_context(patch.object(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None))
        # ZeRO-3 puts a function of its own in its place, for the whole process.
        stack.enter_context(patch.object(nn.functional, "linear", nn.functional.linear))
        stack.enter_context(patch.object(comm.comm, "cdb", None))
        stack.enter_context(patch.object(groups, "_WORLD_GROUP", None))
        stack.enter_context(patch.dict(os.environ, LOCAL_RANK="0"))
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        yield deepspeed
