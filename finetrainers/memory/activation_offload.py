"""Activation offload: tensors that blocks store for backward wait in host memory, in one pinned arena.

In forward, a tensor is copied to its slot of the arena on one stream while the next blocks compute; in backward, the
tensors of a block are copied back on another stream while the block after it computes (MEMO, arXiv:2407.12117). The
last blocks store theirs on the device, since backward begins with them.

Why not a library: `save_on_cpu` of PyTorch copies on the computing stream, and does not see the results of attention
(`memory.checkpointing`). TRL's `OffloadActivations` offloads the tensors that autograd stores of every layer, allocates
pinned memory for each of them, and fetches nothing ahead.

Three hazards of streams, each with its remedy:

1. A source is needed until its copy is done. It is held, and the computing stream waits for the copy before it is
   released.
2. A landing buffer from the computing stream's allocator may still be in use by queued kernels. It is allocated on the
   stream that copies.
3. A landing buffer that is released may be allocated again while kernels that read it are queued. Each copy waits for
   all work queued on the computing stream before.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .activation_plan import IN_FLIGHT, LAST
from .page_locked import page_locked_buffer

#: Slots begin at multiples of this, as in memory that CUDA allocates.
_ALIGNMENT = 256


class Arena:
    """Buffer in host memory, in slots. It grows by a piece while slots are in use, and becomes one when all are free.

    Attributes:
        num_bytes: of the buffer.
        peak: the most bytes that were in use at once.
    """

    def __init__(self, *, device: str = "cpu", pinned: bool = False, poison: bool = False, slots: int = 1) -> None:
        """Args:
        device: `meta` counts bytes without having them.
        pinned: whether GPUs can copy to and from it without waiting.
        poison: whether to fill freed slots with NaN, so that reads of them are noticed.
        slots: number of slots of a size that are needed at once; it grows by this number.
        """
        self._device, self._pinned, self._poison, self._slots = device, pinned, poison, slots
        self._pieces: list[Tensor] = []
        self._free: list[tuple[int, int, int]] = []  # piece, first byte, size
        self.num_bytes = self.used = self.peak = 0

    def allocate(self, size: int) -> tuple[int, int, int]:
        """Return a free slot: piece, first byte, size."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        if not self.used and len(self._pieces) > 1:
            self._grow(self.peak)
        while (index := next((n for n, (_, _, free) in enumerate(self._free) if free >= size), None)) is None:
            self._grow(size * self._slots)
        piece, start, free = self._free.pop(index)
        if free > size:
            insort(self._free, (piece, start + size, free - size))
        self.used += size
        self.peak = max(self.peak, self.used)
        return piece, start, size

    def view(self, slot: tuple[int, int, int], like: Tensor) -> Tensor:
        """Return the bytes of a slot as a flat tensor of the dtype and size of `like`."""
        piece, start, _ = slot
        return self._pieces[piece][start : start + like.numel() * like.itemsize].view(like.dtype)

    def release(self, slot: tuple[int, int, int]) -> None:
        """Free a slot, and merge it with its free neighbors."""
        piece, start, size = slot
        self.used -= size
        if self._poison:
            self._pieces[piece][start : start + size] = 255  # in every dtype of floats, all bits set are NaN
        insort(self._free, slot)
        merged: list[tuple[int, int, int]] = []
        for piece, start, size in self._free:
            if merged and merged[-1][0] == piece and sum(merged[-1][1:]) == start:
                merged[-1] = (piece, merged[-1][1], merged[-1][2] + size)
            else:
                merged.append((piece, start, size))
        self._free = merged

    def _grow(self, size: int) -> None:
        if not self.used and self._pieces:
            size = max(size, self.peak)
            if self._pinned:
                torch.cuda.synchronize()  # a copy may still read the old pieces
            self._pieces, self._free, self.num_bytes = [], [], 0
        if self._pinned:
            piece = page_locked_buffer(size, "offloaded activations")
        else:
            piece = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._pieces.append(piece)
        self._free.append((len(self._pieces) - 1, 0, size))
        self.num_bytes += size


class _Copies:
    """Copies of tensors to the arena and back: immediate ones, in plain memory; they show that lifetimes are right."""

    def write(self, source: Tensor, slot: Tensor) -> Any:
        """Begin to copy to the host, and return the event that `read` and `settle` wait for."""
        slot.copy_(source)

    def settle(self, written: Any) -> None:
        """Let the device continue only when the source may change."""

    def read(self, slot: Tensor, like: Tensor, written: Any) -> tuple[Tensor, Any]:
        """Begin to copy back to the device, and return the tensor and the event that `await_read` waits for."""
        tensor = torch.empty(len(slot), dtype=slot.dtype, device=like.device)
        tensor.copy_(slot)
        return tensor, None

    def await_read(self, read: Any) -> None:
        """Let the device continue only when the tensor is complete."""


class _OnStreams(_Copies):
    """Copies on two streams, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def write(self, source: Tensor, slot: Tensor) -> torch.cuda.Event:
        self._out.wait_stream(torch.cuda.current_stream())
        self._out.wait_stream(self._in)  # the slot may still be read
        with torch.cuda.stream(self._out):
            slot.copy_(source, non_blocking=True)
            return self._out.record_event()

    def settle(self, written: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(written)  # hazard 1

    def read(self, slot: Tensor, like: Tensor, written: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        self._in.wait_stream(torch.cuda.current_stream())  # hazard 3
        self._in.wait_event(written)
        with torch.cuda.stream(self._in):
            tensor = torch.empty(len(slot), dtype=slot.dtype, device=like.device)  # hazard 2
            tensor.copy_(slot, non_blocking=True)
            return tensor, self._in.record_event()

    def await_read(self, read: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(read)


@dataclass(frozen=True)
class OnDevice:
    """A tensor that stays on the device."""

    tensor: Tensor

    def take(self) -> Tensor:
        return self.tensor


class Stored:
    """A tensor in the arena. Its slot is freed with the last reference to it."""

    def __init__(self, tensor: Tensor, store: BlockStore, arena: Arena, copies: _Copies) -> None:
        self.store = store
        self._arena, self._copies = arena, copies
        self._layout = tensor.shape, tensor.stride()
        self._like = tensor.new_empty(0)
        source = tensor.detach().as_strided((tensor.numel(),), (1,))
        self._slot = arena.allocate(source.nbytes)
        self._in_arena = arena.view(self._slot, source)
        self._written = copies.write(source, self._in_arena)
        store.copying.append((source, self._written))
        self._landed: tuple[Tensor, Any] | None = None

    def fetch(self) -> None:
        """Begin to copy the tensor back."""
        if self._landed is None:
            self._landed = self._copies.read(self._in_arena, self._like, self._written)

    def take(self) -> Tensor:
        """Return the tensor, on the device."""
        self.fetch()
        assert self._landed is not None, "it was just fetched"
        (row, read), self._landed = self._landed, None
        self._copies.await_read(read)
        return row.as_strided(*self._layout)

    def __del__(self) -> None:
        if hasattr(self, "_in_arena"):
            self._arena.release(self._slot)


#: Types that a tensor is stored as.
STORED_TYPES = (OnDevice, Stored)


class ActivationOffload:
    """Offload of the tensors that the blocks of a network store, except for the first and the last blocks.

    Attributes:
        arena: in host memory.
        copies: to the arena and back.
        least_bytes: size of a tensor that is copied, at least.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], device: torch.device, *, host: str = "cpu", least_bytes: int | None = None
    ) -> None:
        """Args:
        blocks: in the order in which they compute.
        device: device that they compute on. On a CPU, copies are made at once, and freed slots are NaN.
        host: device of the arena; see `Arena`.
        least_bytes: size of a tensor that is copied, at least; default: 1 MiB on a GPU.
        """
        on_gpu = device.type == "cuda"
        self.copies = _OnStreams(device) if on_gpu else _Copies()
        self._offloaded = {id(block) for block in blocks[1:-LAST]}
        self.least_bytes = (2**20 if on_gpu else 1) if least_bytes is None else least_bytes
        self.arena = Arena(
            device=host, pinned=on_gpu, poison=not on_gpu and host == "cpu", slots=max(1, len(self._offloaded))
        )
        self._last: weakref.ref[BlockStore] | None = None
        self._in_flight: deque[list[tuple[Tensor, Any]]] = deque()
        self._inputs: list[weakref.ref[Tensor]] = []  # of the previous block

    def open_store(self, block: nn.Module, inputs: Sequence[Any]) -> BlockStore:
        """Return the store of the tensors that a block, which is about to run, needs in backward."""
        self.settle(IN_FLIGHT - 1)
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        previous = [reference() for reference in self._inputs]
        # Inputs of all blocks, such as the embedding of the noise level, stay on the device.
        own = {_address(tensor) for tensor in tensors if not any(tensor is other for other in previous)}
        self._inputs = [weakref.ref(tensor) for tensor in tensors]
        store = BlockStore(self, own if id(block) in self._offloaded else set(), self._last)
        self._last = weakref.ref(store)
        if store.offloads:
            self._in_flight.append(store.copying)
        return store

    def settle(self, remaining: int = 0) -> None:
        """Release the sources of copies, except for those of the last `remaining` blocks."""
        while len(self._in_flight) > remaining:
            copying = self._in_flight.popleft()
            for _, written in copying:
                self.copies.settle(written)
            copying.clear()


class BlockStore:
    """Store of the inputs of one run of a block, and of the results of its attention.

    Attributes:
        offloads: whether it stores in the arena.
        copying: sources of copies that may be under way.
    """

    def __init__(
        self, offload: ActivationOffload, inputs: set[tuple[int, int]], previous: weakref.ref[BlockStore] | None
    ) -> None:
        self.offloads = bool(inputs)
        self.copying: list[tuple[Tensor, Any]] = []
        self._offload, self._inputs, self._previous = offload, inputs, previous
        self._stored: list[weakref.ref[Stored]] = []

    def saving_inputs(self) -> saved_tensors_hooks:
        """Return a context in which autograd stores the block's inputs here."""
        return saved_tensors_hooks(
            lambda tensor: self.put(tensor) if _address(tensor) in self._inputs else OnDevice(tensor), self.take
        )

    def put(self, tensor: Tensor) -> Stored | OnDevice:
        """Store a tensor, in the arena if that is worthwhile, and return the handle that `take` gets it by."""
        is_large = tensor.nbytes >= self._offload.least_bytes
        if not (self.offloads and is_large and tensor.is_floating_point() and _is_dense(tensor)):
            return OnDevice(tensor)
        handle = Stored(tensor, self, self._offload.arena, self._offload.copies)
        self._stored.append(weakref.ref(handle))
        return handle

    def take(self, handle: Stored | OnDevice) -> Tensor:
        """Return a tensor, on the device, and begin to copy back those of the previous block, which is next."""
        self._offload.settle()
        tensor = handle.take()
        reference, self._previous = self._previous, None
        previous = None if reference is None else reference()
        if previous is not None:
            previous.fetch()
        return tensor

    def fetch(self) -> None:
        """Begin to copy back the tensors that are still needed."""
        for reference in self._stored:
            stored = reference()
            if stored is not None:
                stored.fetch()


def _address(tensor: Tensor) -> tuple[int, int]:
    """Return the start of a tensor's memory, including for tensors without an address."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill a range of memory without gaps, in some order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
