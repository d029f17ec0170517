"""Stage the training state in host memory for asynchronous checkpointing, while the next step computes gradients."""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from finetrainers.utils.faults import fault_point

T = TypeVar("T")

#: Bytes of each of the two page-locked buffers that copies from a GPU go through.
_BUFFER_BYTES = 64 << 20


class Staging:
    """Host memory that copies of the training state are made in, one at a time.

    `begin_copy` returns at once; a thread then copies during the forward and backward passes of the next step. Code
    that changes the state must call `wait` before. The next copy reuses the memory: to get it from the system takes
    several times as long as to copy.

    Attributes:
        waited_s: seconds that `wait` has waited for the last copy.
    """

    def __init__(self) -> None:
        self._copied = threading.Event()
        self._copied.set()
        self.waited_s = 0.0
        self._reserved = threading.Event()
        self._reserved.set()
        self._storages: list[torch.UntypedStorage] = []  # of the last copy, or for the first one
        self._buffers: dict[torch.device, _PinnedCopier] = {}

    def reserve(self, value: Any) -> Callable[[], None]:
        """Get the memory of the first copy before that is due: getting it from the system takes longer than copying.

        Args:
            value: what will be copied.

        Returns:
            A function that gets it. It has to be called, in any thread, and `begin_copy` waits for it.
        """
        assert not self._storages, "memory is already allocated"
        storages = {s.data_ptr(): s for t in tensors_in(value) for p in plain_tensors(t) for s in [p.untyped_storage()]}
        sizes = [storage.nbytes() for storage in storages.values()]
        self._reserved.clear()

        def get() -> None:
            try:
                for size in sizes:
                    storage = torch.UntypedStorage(size)
                    # The system gives a page when it is first written to.
                    np.copyto(torch.empty(0, dtype=torch.uint8).set_(storage).numpy(), 0)  # type: ignore[call-overload]
                    self._storages.append(storage)
            finally:
                self._reserved.set()

        return get

    def begin_copy(
        self, value: T, *, copied_first: Any = (), unshared: Iterable[Tensor] = ()
    ) -> tuple[T, Callable[[], None]]:
        """Begin a copy of nested dictionaries, lists and tuples, with all tensors in host memory.

        The content of its tensors comes later; everything else is copied now. Written to a file the copy gives the
        same bytes as the original on the host: strides, subclasses (torchao's low-bit states) and shared storages
        (bitsandbytes' tables) are preserved.

        Args:
            value: the value to copy; no earlier copy may still be in use.
            copied_first: tensors of it that are copied before this returns, since their owner changes them without
                waiting.
            unshared: tensors of it that no other code uses. The copy shares them.

        Returns:
            The copy, and a function that fills it. It has to be called, in any thread, and `wait` waits for it.
        """
        assert self._copied.is_set(), "a copy has not been made"
        self._reserved.wait()
        copies = _Copies(self._storages)
        copies.tensors.update((id(tensor), tensor) for tensor in unshared)
        for tensor in tensors_in(copied_first):
            copies.add(tensor)
        devices = {
            part.device for tensor in tensors_in(value) for part in plain_tensors(tensor) if part.device.type != "cpu"
        }
        for device in devices:  # it may still be writing to the tensors, including those in host memory
            torch.get_device_module(device).synchronize(device)
        self._fill(copies)
        for tensor in tensors_in(value):
            copies.add(tensor)
        self._storages = copies.storages()
        copied = copy.deepcopy(value, dict(copies.tensors))  # a new dictionary: `deepcopy` adds the originals to it
        self.waited_s = 0.0
        self._copied.clear()

        def fill() -> None:
            try:
                fault_point("save.copy")
                self._fill(copies)
            finally:
                self._copied.set()

        return copied, fill

    def wait(self) -> float:
        """Wait until the copy in progress is made, and return the seconds waited; call it before the state changes."""
        if self._copied.is_set():
            return 0.0
        started = time.perf_counter()
        self._copied.wait()
        seconds = time.perf_counter() - started
        self.waited_s += seconds
        return seconds

    def _fill(self, copies: _Copies) -> None:
        """Copy the added tensors, and forget them piece by piece: gathered weights are in separate memory."""
        used = set()
        for target, source in copies.to_fill():
            if source.device.type == "cpu":
                # By one thread and without Python's lock; torch would start as many threads as training has.
                np.copyto(target.numpy(), source.numpy())
                continue
            if source.device not in self._buffers:
                self._buffers[source.device] = _PinnedCopier(source.device)
            used.add(source.device)
            self._buffers[source.device].copy(source, target)
        for device in used:
            self._buffers[device].finish()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors anywhere in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold a tensor's data: itself, or those that a subclass wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    values = [getattr(tensor, name) for name in names]  # a DTensor's include its mesh
    return [part for value in values if isinstance(value, Tensor) for part in plain_tensors(value)]


class _Copies:
    """Host copies of tensors, with one copy of each storage, however many tensors view it.

    Attributes:
        tensors: the copies by the identity of their originals.
    """

    def __init__(self, free: list[torch.UntypedStorage]) -> None:
        """Args:
        free: memory that may be used, wherever the size is right.
        """
        self.tensors: dict[int, Any] = {}
        self._free: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        for storage in free:
            self._free[storage.nbytes()].append(storage)
        self._copies: dict[tuple[torch.device, int, int], torch.UntypedStorage] = {}
        self._to_fill: deque[tuple[Tensor, Tensor]] = deque()

    def add(self, tensor: Tensor) -> None:
        """Make the copy of a tensor, whose content is still to be filled in."""
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = self._copy(tensor)

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the memory of all copies."""
        return list(self._copies.values())

    def to_fill(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of each copy and of its original, each pair once."""
        while self._to_fill:
            yield self._to_fill.popleft()

    def _copy(self, tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: self._copy(getattr(tensor, name)) for name in names}
            return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
        storage = self._storage(tensor.untyped_storage())
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
        vars(copied).update(vars(tensor))  # bitsandbytes marks its paged tensors, and pickle keeps that
        return copied

    def _storage(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        key = (source.device, source.data_ptr(), source.nbytes())
        if key not in self._copies:
            free = self._free[source.nbytes()]
            storage = free.pop() if free else torch.UntypedStorage(source.nbytes())
            target = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            content = torch.empty(0, dtype=torch.uint8, device=source.device)
            content.set_(source)  # type: ignore[call-overload]
            self._to_fill.append((target, content))
            self._copies[key] = storage
        return self._copies[key]


class _PinnedCopier:
    """Copies from a device to the host through two page-locked buffers: one is filled while the other is emptied.

    A page-locked copy of everything would need no buffers. But torch's allocator of such memory rounds each piece up to
    a power of two and keeps it for good, which can be most of a machine's memory.
    """

    def __init__(self, device: torch.device, *, buffer_bytes: int = _BUFFER_BYTES) -> None:
        on_device = device.type != "cpu"
        self._module = torch.get_device_module(device) if on_device else None
        # A separate stream: it does not wait for the kernels of the step that training is at.
        self._stream = self._module.Stream(device) if self._module else None
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self._pieces: list[list[tuple[Tensor, Tensor]]] = [[], []]  # of each buffer: target and source of each piece
        self._fill_events: list[Any] = [None, None]  # of each buffer: the event after which its pieces are complete
        self._current, self._used_bytes = 0, 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy the bytes `source`, on the device, to `target`; `finish` completes it."""
        done = 0
        while done < source.numel():
            buffer = self._buffers[self._current]
            if self._used_bytes == buffer.numel():
                self._swap_buffers()
                continue
            count = min(source.numel() - done, buffer.numel() - self._used_bytes)
            piece = buffer[self._used_bytes : self._used_bytes + count]
            with nullcontext() if self._module is None else self._module.stream(self._stream):
                piece.copy_(source[done : done + count], non_blocking=True)
            self._pieces[self._current].append((target[done : done + count], piece))
            self._used_bytes, done = self._used_bytes + count, done + count

    def finish(self) -> None:
        """Wait for the copies in progress."""
        self._swap_buffers()
        self._swap_buffers()

    def _swap_buffers(self) -> None:
        """Switch to the other buffer, once it is filled and emptied."""
        if self._stream is not None:
            self._fill_events[self._current] = self._stream.record_event()
        self._current, self._used_bytes = 1 - self._current, 0
        if self._fill_events[self._current] is not None:
            self._fill_events[self._current].synchronize()
        for target, piece in self._pieces[self._current]:
            target.copy_(piece)
        self._pieces[self._current].clear()
