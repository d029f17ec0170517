"""Block swap: frozen weights of some transformer blocks wait in host memory, and are copied to the GPU before use.

The weights of a swapped block are packed into one pinned buffer on the host, its master. Two buffers on the device, the
slots, take turns: while the block in one slot computes, the next block is copied into the other slot on a separate
stream. A frozen weight never changes, so that nothing is copied back. Trainable weights stay on the device. A network
that is moved to host memory, such as an expert while the other one samples, frees its slots until it computes again.

A saved tensor that is a swapped weight, or a view of one, names its block. When autograd asks for it in backward, the
block is copied again before the tensor is returned. So results do not depend on prefetching, and it works with and
without gradient checkpointing, whose recomputation asks for the block in its forward pass.

Why not a library: `apply_group_offloading` of diffusers sets `.data` around forward passes alone. Backward then reads
the storage with its later content, and with checkpointing the blocks stay on the device (recomputation that stops early
skips the hook that would offload them). `cpu_offload` of accelerate copies on the computing stream and frees after the
forward pass. torchao offloads optimizers, not weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .page_locked import page_locked_buffer
from .swap_plan import NUM_SLOTS, chosen_blocks

#: Alignment of weights in a buffer, in bytes, as in memory that CUDA allocates.
_ALIGNMENT = 256


def swap_blocks(network: nn.Module, blocks: Sequence[nn.Module], number: int, device: torch.device) -> BlockSwap:
    """Keep the frozen weights of `number` blocks in host memory from now on; moving the network leaves them there.

    Args:
        network: with its adapter attached and all weights in their final dtype, in host memory.
        blocks: its repeated blocks, in the order in which they compute.
        number: number of swapped blocks; evenly spaced, so that each copy has other blocks' computation to hide behind.
        device: device that the network computes on. On a CPU the slots are in plain memory, and hold NaN until a block
            is awaited.
    """
    assert number >= NUM_SLOTS, "with fewer blocks than slots there is nothing to swap"
    swap = BlockSwap([blocks[index] for index in chosen_blocks(len(blocks), number)], device)
    _stay_when_moved(network, swap, device)
    return swap


class BlockSwap:
    """Block swap that brings the frozen weights of swapped blocks into the slots in time.

    Attributes:
        host_bytes: pinned host memory.
        slot_bytes: device memory of the slots.
        copied_bytes: bytes copied to the device so far.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        layouts = [_Layout(block) for block in blocks]
        sizes = [max(layout.size for layout in layouts[index::NUM_SLOTS]) for index in range(NUM_SLOTS)]
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self._copies = _OnStream(device) if device.type == "cuda" else _InPlainMemory()
        self._held: list[int | None] = [None] * NUM_SLOTS  # the block that each slot has, or gets
        self._current: int | None = None  # the block whose weights may be read
        self._last = len(blocks) - 1
        self.copied_bytes = 0
        self._masters: list[Tensor] = []
        self._weights: list[nn.Parameter] = []
        for number, (block, layout) in enumerate(zip(blocks, layouts, strict=True)):
            self._masters.append(layout.packed(pinned=device.type == "cuda"))
            weights = layout.point_into(self._slots[number % NUM_SLOTS])
            self._weights += weights
            block.forward = self._around(block.forward, number, weights)  # type: ignore[method-assign]
        self.host_bytes = sum(master.nbytes for master in self._masters)
        self.slot_bytes = sum(sizes)

    def release(self) -> None:
        """Free the slots until a block computes again; weights stay views of the same storage."""
        self._copies.cancel()
        self._held, self._current = [None] * NUM_SLOTS, None
        for slot in self._slots:
            slot.untyped_storage().resize_(0)

    def weights(self, network: nn.Module) -> dict[str, nn.Parameter]:
        """Return the swapped weights by name: views of the slots."""
        swapped = set(map(id, self._weights))
        return {name: weight for name, weight in network.named_parameters() if id(weight) in swapped}

    def _around(self, forward: Callable[..., Any], number: int, weights: Sequence[nn.Parameter]) -> Callable[..., Any]:
        """Return a block's forward pass that brings its weights into their slot.

        It replaces `forward` instead of using hooks: recomputation that stops early raises, which skips forward hooks.
        """

        plain = [(weight, weight.data) for weight in weights if not is_traceable_wrapper_subclass(weight)]

        def swapped(*args: Any, **kwargs: Any) -> Any:
            self._require(number)
            try:
                with self._saving_references(number):
                    output = forward(*args, **kwargs)
            finally:
                for weight, view in plain:  # layerwise upcasting leaves copies in separate memory
                    weight.data = view
            if number == self._last and not torch.is_grad_enabled():
                self._start(0)  # for the next pass, if its slot was in use until now
            return output

        return swapped

    def _require(self, number: int) -> None:
        """Wait until a block's weights are in their slot, and start copying the next block into the other slot."""
        if number == self._current:
            return
        self._start(number)
        self._current = number
        self._copies.wait(number % NUM_SLOTS)
        for following in self._following(number):
            if following % NUM_SLOTS != number % NUM_SLOTS:  # all uses of the other slot are queued, or done
                self._start(following)

    def _following(self, number: int) -> Sequence[int]:
        """Return the blocks that may compute after a block.

        A forward pass with gradients turns around at its end; one without gradients begins again.
        """
        if _in_backward():
            return (number - 1,) if number else (1,)
        if number < self._last:
            return (number + 1,)
        return (number - 1,) if torch.is_grad_enabled() else (0, 1)

    def _start(self, number: int) -> None:
        index = number % NUM_SLOTS  # always the same, so that a weight has one address
        if self._held[index] == number:
            return
        if self._current is not None and self._current % NUM_SLOTS == index:
            self._current = None
        self._held[index] = number
        storage = self._slots[index].untyped_storage()
        if not storage.size():
            storage.resize_(self._slots[index].nbytes)
        self.copied_bytes += self._masters[number].nbytes
        self._copies.start(index, self._slots[index], self._masters[number])

    @contextmanager
    def _saving_references(self, number: int) -> Iterator[None]:
        """Let autograd save references to swapped weights within the block, and pass other tensors to outer hooks."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)  # of gradient checkpointing, for example
        slot = _storage(self._slots[number % NUM_SLOTS])
        pack_outer, unpack_outer = outer or (lambda tensor: tensor, lambda packed: packed)

        def pack(tensor: Tensor) -> Any:
            if any(_storage(leaf) == slot for leaf in _leaves(tensor)):
                return _SwappedWeight(tensor)
            return pack_outer(tensor)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, _SwappedWeight):
                self._require(number)
                return packed.tensor
            return unpack_outer(packed)

        with saved_tensors_hooks(pack, unpack):
            yield


class _SwappedWeight:
    """Saved reference to a swapped weight: a view that is valid once its block is in the slot."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # fake tensors have no address


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # as FSDP2 asks


# ---- weights in buffers ----------------------------------------------------------------------------------------------


class _Layout:
    """Layout of a block's frozen weights in a buffer; tensors in tensors (quantized weights) have separate places."""

    def __init__(self, block: nn.Module) -> None:
        self._weights: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for module in block.modules():
            for name, weight in module._parameters.items():
                if weight is not None and not weight.requires_grad:
                    self._weights.setdefault(id(weight), (weight, []))[1].append((module, name))
        self.size = 0
        self._places: list[tuple[Tensor, int]] = []
        for weight, _ in self._weights.values():
            for leaf in _leaves(weight):
                self._places.append((leaf.detach(), self.size))
                self.size += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT

    def packed(self, *, pinned: bool) -> Tensor:
        """Return one host buffer with all weights."""
        if pinned:
            master = page_locked_buffer(self.size, "swapped blocks")
        else:
            master = torch.empty(self.size, dtype=torch.uint8)
        for leaf, start in self._places:
            _view(master, start, leaf).copy_(leaf)
        return master

    def point_into(self, slot: Tensor) -> list[nn.Parameter]:
        """Make the weights views of a slot, and return them; their old memory is released."""
        views = iter([_view(slot, start, leaf) for leaf, start in self._places])
        self._places = []
        swapped = []
        for weight, owners in self._weights.values():
            if is_traceable_wrapper_subclass(weight):  # its `.data` does not hold its numbers
                weight = nn.Parameter(_rebuilt(weight, views), requires_grad=False)
                for module, name in owners:
                    module._parameters[name] = weight
            else:
                weight.data = next(views)
            swapped.append(weight)
        return swapped


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _leaves(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold a tensor's numbers: itself, or those within."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [leaf for name in names for leaf in _leaves(getattr(tensor, name))]


def _rebuilt(tensor: Tensor, leaves: Iterator[Tensor]) -> Tensor:
    """Return a tensor like `tensor`, whose numbers are in `leaves`."""
    if not is_traceable_wrapper_subclass(tensor):
        return next(leaves)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _rebuilt(getattr(tensor, name), leaves) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def _stay_when_moved(network: nn.Module, swap: BlockSwap, device: torch.device) -> None:
    """Let `network.to(...)` leave swapped weights in place, and free the slots where it takes the others elsewhere."""
    swapped_ids = {id(weight) for weight in swap.weights(network).values()}

    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        removed = [
            (module, name, weight)
            for module in network.modules()
            for name, weight in module._parameters.items()
            if id(weight) in swapped_ids
        ]
        for module, name, _ in removed:
            module._parameters[name] = None
        try:
            return type(network)._apply(network, fn, recurse)
        finally:
            for module, name, weight in removed:
                module._parameters[name] = weight
            if fn(torch.empty(0, device=device)).device.type != device.type:
                swap.release()

    network._apply = apply  # type: ignore[method-assign]


# ---- copies ----------------------------------------------------------------------------------------------------------


class _OnStream:
    """Copies of masters into slots on a separate CUDA stream, in the order in which they are started.

    The host waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._loaded = [torch.cuda.Event() for _ in range(NUM_SLOTS)]

    def start(self, index: int, slot: Tensor, master: Tensor) -> None:
        """Begin to copy, after all work queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            slot[: master.nbytes].copy_(master, non_blocking=True)
            self._loaded[index].record()

    def wait(self, index: int) -> None:
        """Let all work queued from now on run after the slot's copy."""
        torch.cuda.current_stream(self._device).wait_event(self._loaded[index])

    def cancel(self) -> None:
        """Let memory that is freed from now on be used again only after all copies into it."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _InPlainMemory:
    """Copies in the worst order that streams allow: a slot loses its numbers at once, and gets new ones on `wait`."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor] | None] = [None] * NUM_SLOTS

    def start(self, index: int, slot: Tensor, master: Tensor) -> None:
        with torch.no_grad():
            slot.fill_(0xFF)  # NaN in every float dtype
        self._pending[index] = (slot, master)

    def wait(self, index: int) -> None:
        pending, self._pending[index] = self._pending[index], None
        if pending is not None:
            slot, master = pending
            with torch.no_grad():
                slot[: master.nbytes].copy_(master)

    def cancel(self) -> None:
        self._pending = [None] * NUM_SLOTS
