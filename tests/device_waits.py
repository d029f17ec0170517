"""A stand-in for a GPU that shows where the host would wait for it.

Tensors on the meta device are those of the GPU. Whatever reads their values raises an error there, as `item()` and
boolean indices do; copies to them from pageable memory, which wait for the GPU, are recorded here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")
#: Functions that make a tensor on a device from numbers of Python, through pageable memory.
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
_SUBSCRIPTS = (Tensor.__getitem__, Tensor.__setitem__)
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def _is_on_host(value: Any) -> bool:
    """Return whether a value is a tensor in host memory; numbers as tensors travel with a kernel's arguments."""
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.ndim > 0


class _Operations(TorchDispatchMode):
    """Records copies from host memory that are not asynchronous, and indices in host memory."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            to_device = options.get("device") == META and args[0].device.type == "cpu"
            if to_device and not options.get("non_blocking"):
                self.waits.append(f"copy of {tuple(args[0].shape)}")
        elif func is torch.ops.aten.copy_.default:
            if args[0].device == META and _is_on_host(args[1]) and not (len(args) > 2 and args[2]):
                self.waits.append(f"copy_ of {tuple(args[1].shape)}")
        elif func in _INDEXED and args[0].device == META and any(map(_is_on_host, args[1])):
            self.waits.append(f"host index of {tuple(args[0].shape)}")
        return func(*args, **options)


class _Functions(TorchFunctionMode):
    """Records tensors made from numbers, and lists as indices, of which the meta device copies nothing."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in _FROM_NUMBERS:
            device = options.get("device") or (args[0].device if func is Tensor.new_tensor else "cpu")
            if torch.device(device) == META and not isinstance(args[-1], Tensor):
                self.waits.append(f"{func.__name__} of {args[-1]!r}")
        elif func in _SUBSCRIPTS and args[0].device == META:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in index):
                self.waits.append(f"list index {index}")
        return func(*args, **options)


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Yield the list of the host's waits for the device within the block; those that read values raise errors."""
    waits: list[str] = []
    with pytest.MonkeyPatch.context() as patch, _Functions(waits), _Operations(waits):
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # a build for the CPU has none
        # There is none for the meta device.
        autocast, devices = torch.autocast, {"meta": "cpu"}
        patch.setattr(torch, "autocast", lambda device, *a, **k: autocast(devices.get(device, device), *a, **k))
        yield waits


def on_meta(values: Any) -> Any:
    """Return tensors, in any nesting of containers that pytree knows, on the stand-in for the GPU."""
    return tree_map(lambda leaf: leaf.to(META, non_blocking=True) if isinstance(leaf, Tensor) else leaf, values)


def devices_of(values: Any) -> set[str]:
    """Return the types of the devices of all tensors in a nesting of containers."""
    return {leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
