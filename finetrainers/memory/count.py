"""Peak memory of a training step, counted: the real network runs on fake tensors, without weights and without a GPU.

Every operation runs under `FakeTensorMode`, which knows shapes and dtypes and allocates nothing, and the bytes of all
live storages are added up. The count is of memory that CUDA calls allocated; workspaces of kernels, the CUDA context
and fragmentation are not in it. The tensors claim to be on the CPU, so operations that autocast runs in fp32 on CUDA,
but not on a CPU, are run in fp32 here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from finetrainers.models.spec import OPERATOR_BODIES

from .activation_plan import select_evenly
from .block_swap import swap_blocks
from .checkpointing import set_activation_memory

if TYPE_CHECKING:
    from finetrainers.config.parallel import SpMode
    from finetrainers.config.sections import ActivationMemory
    from finetrainers.models.spec import ModelSpec

#: Operations that autocast runs in fp32 on CUDA (`AT_FORALL_FP32` in ATen/autocast_mode.h), and in their inputs' dtype
#: on a CPU.
_FP32_ON_CUDA = (
    "layer_norm", "rms_norm", "group_norm", "softmax.int", "log_softmax.int", "softplus", "exp", "log", "rsqrt",
    "reciprocal", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "sum", "sum.dim_IntList", "linalg_vector_norm",
)  # fmt: skip


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let CPU autocast run the operations in fp32 that CUDA's autocast does."""
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in _FP32_ON_CUDA:
            packet, _, overload = name.partition(".")
            library.impl(
                name, _in_fp32(getattr(getattr(torch.ops.aten, packet), overload or "default"), without), "AutocastCPU"
            )
        yield


def _in_fp32(operator: Any, without: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(without):
            return operator(*args, **kwargs)

    return kernel


class LiveStorages(TorchDispatchMode):
    """Mode that adds up the bytes of live storages.

    Attributes:
        live: current bytes.
        peak: the most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: Any = WeakIdKeyDictionary()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                size = storage.nbytes()
                self._seen[storage] = size
                if tensor.device.type == "meta":
                    continue  # it stands for host memory
                self.live += size
                weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OPERATOR_BODIES:  # they allocate as well
            with self:
                return OPERATOR_BODIES[func](*args)
        outputs = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        return outputs


@dataclass(frozen=True)
class Counted:
    """Bytes of the weights, and those that one micro-batch takes beyond them, with all blocks of the network.

    Attributes:
        weights: of the network, with slots in place of swapped blocks.
        kept: activations for backward, at the end of forward.
        forward: peak of forward.
        backward: peak of backward, gradients included.
        gradients: of the trained weights.
        host: offloaded activations in host memory.
    """

    weights: float
    kept: float
    forward: float
    backward: float
    gradients: float
    host: float


@dataclass(frozen=True)
class StepShape:
    """Quantities beside the network that decide the memory of a micro-batch.

    Attributes:
        latent: channels, frames, height and width of the latents, with the frames that `ModelSpec.padded` adds.
        batch_size: clips.
        stored: what blocks keep for backward.
        share: of the blocks that `stored` holds for, or None for all. The others keep everything.
        frozen: dtype of the frozen weights.
        trained: dtype of the trainable weights.
        autocast: dtype that matrices are multiplied in, or None without autocast.
        gradients_stay: False if each gradient leaves as soon as it is made.
        blocks_to_swap: number of blocks that wait in host memory.
        sharing: processes that share each clip.
        sp_mode: their exchange.
        has_frame_times: whether each latent frame has a time, as clips with given frames do.
    """

    latent: tuple[int, int, int, int]
    batch_size: int = 1
    stored: ActivationMemory = "checkpoint"
    share: float | None = None
    frozen: torch.dtype = torch.bfloat16
    trained: torch.dtype = torch.float32
    autocast: torch.dtype | None = torch.bfloat16
    gradients_stay: bool = True
    blocks_to_swap: int = 0
    sharing: int = 1
    sp_mode: SpMode = "ulysses"
    has_frame_times: bool = False


def count_step(spec: ModelSpec, network: nn.Module, shape: StepShape) -> Counted:
    """Count forward and backward of one micro-batch on networks of few blocks, and extend the line to all of them.

    Args:
        spec: of the network.
        network: on the meta device, with its adapter attached; it is not changed.
        shape: of the micro-batch.
    """
    depths = {name: len(getattr(network, name)) for name in spec.blocks}
    trains_all = all(p.requires_grad for p in network.parameters())
    if shape.share is not None or shape.blocks_to_swap or (trains_all and shape.stored != "none" and len(depths) > 1):
        # Gradients fill up while inputs of blocks leave: the peak may lie between two lists of blocks, off the line.
        # Nor is it a line where blocks differ.
        return Counted(**_count(spec, network, shape, depths))
    # The first blocks and the last ones do not offload.
    few = {name: min(7 if shape.stored == "offload" else 2, depth) for name, depth in depths.items()}
    first = _count(spec, network, shape, few)
    total = dict(first)
    for name, depth in depths.items():
        if depth > few[name]:
            longer = _count(spec, network, shape, {**few, name: few[name] + 1})
            for key, value in longer.items():
                total[key] += (depth - few[name]) * (value - first[key])
    return Counted(**total)


def _count(spec: ModelSpec, network: nn.Module, shape: StepShape, depths: Mapping[str, int]) -> dict[str, float]:
    net = shortened(network, depths)
    with (
        fake_group(shape.sharing) if shape.sharing > 1 else nullcontext() as group,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        fake_weights(net, shape, in_fp32=spec.fp32_weights)
        spec.split_tokens(net, group, shape.sp_mode)
        blocks = select_evenly(spec.block_modules(net), shape.share)
        offloads = set_activation_memory(net.train(), shape.stored, blocks=blocks, host="meta")
        if shape.blocks_to_swap:
            swap_blocks(net, spec.block_modules(net), shape.blocks_to_swap, torch.device("cpu"))
        conditions, meta = spec.empty_inputs(shape.batch_size)
        live = LiveStorages()
        live.add([*net.parameters(), *net.buffers()])
        weights = live.live
        with live, cuda_autocast():
            x, target, *_others = (torch.empty(shape.batch_size, *shape.latent) for _ in range(4))  # x0 and noise
            dtype = torch.float32 if spec.facts.is_flow else torch.long
            times = shape.latent[1:2] if shape.has_frame_times else ()
            t = torch.zeros(shape.batch_size, *times, dtype=dtype)
            with torch.autocast("cpu", shape.autocast, enabled=shape.autocast is not None):
                prediction = spec.predict(net, x, t, conditions, meta)
            stored, forward = live.live - weights, live.peak - weights
            if not shape.gradients_stay:
                for parameter in net.parameters():
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(_drop_gradient)
            live.restart()
            torch.autograd.backward((prediction.float() - target).square().flatten(1).mean(1).mean())
            backward = live.peak - weights
        gradients = sum(p.grad.untyped_storage().nbytes() for p in net.parameters() if p.grad is not None)
        host = sum(offload.arena.peak for offload in offloads)
        return {
            "weights": weights, "kept": stored, "forward": forward, "backward": backward, "gradients": gradients,
            "host": host,
        }  # fmt: skip


@contextmanager
def fake_group(size: int, *, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Yield a group of `size` processes with this one as `rank`, whose exchanges do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        assert dist.group.WORLD is not None, "it has just been made"
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def shortened(network: nn.Module, depths: Mapping[str, int]) -> nn.Module:
    """Return a copy with the first `depths[name]` blocks of each list."""
    lists = {name: getattr(network, name) for name in depths}
    memo = {
        id(blocks): nn.ModuleList(deepcopy(block) for block in blocks[: depths[name]]) for name, blocks in lists.items()
    }
    return deepcopy(network, memo)


def fake_weights(network: nn.Module, shape: StepShape, *, in_fp32: Iterable[str] = ()) -> None:
    """Put fake tensors in the place of weights and buffers; frozen adapters have the dtype of trained ones.

    Args:
        network: the network, which is changed.
        shape: dtypes of its weights.
        in_fp32: parts of names of frozen weights that are fp32; see `ModelSpec.fp32_weights`.
    """
    for prefix, module in network.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                is_adapter = parameter.requires_grad or ".lora_" in f"{prefix}.{name}"
                stays_fp32 = any(part in f"{prefix}.{name}" for part in in_fp32)
                dtype = shape.trained if is_adapter else torch.float32 if stays_fp32 else shape.frozen
                empty = torch.empty(parameter.shape, dtype=dtype if parameter.is_floating_point() else parameter.dtype)
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
