"""Copies in host memory: nested states whose tensors may change, and lie anywhere, as they are now."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

T = TypeVar("T")


def host_copy(value: T) -> T:
    """A copy of nested dictionaries, lists and tuples, with all tensors in host memory.

    Written to a file it gives the same bytes as the original on the host: strides, subclasses (torchao's low-bit states)
    and shared storages (bitsandbytes' tables) stay what they are. Copies from a GPU go to pinned memory and run
    together; the host waits once for all of them, and returns when they are done.
    """
    memo: dict[int, Any] = {}
    storages = _Storages()
    for tensor in tensors_in(value):
        if id(tensor) not in memo:
            memo[id(tensor)] = _copy(tensor, storages)
    storages.finish()
    return copy.deepcopy(value, memo)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors anywhere in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's data: itself, or those that a subclass wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in parts_of(getattr(tensor, name))]


class _Storages:
    """Host copies of storages, one of each, however many tensors look at it."""

    def __init__(self) -> None:
        self._copies: dict[tuple[torch.device, int, int], torch.UntypedStorage] = {}
        self._on_host: list[tuple[Tensor, Tensor]] = []
        self._devices: set[torch.device] = set()

    def copy_of(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """The storage's copy, whose content is there after `finish`."""
        key = (source.device, source.data_ptr(), source.nbytes())
        if key not in self._copies:
            pin = source.device.type == "cuda"
            target = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pin)
            content = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)  # type: ignore[call-overload]
            if source.device.type == "cpu":
                self._on_host.append((target, content))
            else:
                target.copy_(content, non_blocking=True)
                self._devices.add(source.device)
            self._copies[key] = target.untyped_storage()
        return self._copies[key]

    def finish(self) -> None:
        """Wait for the devices, then copy what was in host memory, to which they may have been writing until now."""
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
        for target, content in self._on_host:
            target.copy_(content)


def _copy(tensor: Tensor, storages: _Storages) -> Tensor:
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        parts = {name: _copy(getattr(tensor, name), storages) for name in names}
        return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    storage = storages.copy_of(tensor.untyped_storage())
    copied = torch.empty(0, dtype=tensor.dtype)
    copied.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    vars(copied).update(vars(tensor))  # bitsandbytes marks its paged tensors, and pickle keeps that
    return copied
