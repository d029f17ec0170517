"""Sharded optimizer state on disk: each process writes its slices, and any number of processes can read them.

`torch.distributed.checkpoint` reads them. The layout is that of torch's `HuggingFaceStorageWriter`: a safetensors file
for each process, whose metadata hold the offset of each slice in its tensor. The writer itself is not used: it plans
with all processes, while a background thread must talk to none, it builds a whole file in memory, and it hashes
nothing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

#: Folder of the slices in a checkpoint.
SLICES_FOLDER = "optimizer"
_NAME = "shard-{rank:05}-of-{size:05}.safetensors"
_SCALARS = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Slices:
    """One process's slices of an optimizer's state.

    Attributes:
        tensors: its slices by `weight/name of the state`; they refer to the optimizer's own memory.
        begins: offset of each slice in its whole tensor, in elements of each dimension.
        values: values that are not tensors, equal on all processes: the parameter groups, and numbers by weight.
        rank, size: index of the process, and number of processes.
    """

    tensors: dict[str, Tensor]
    begins: dict[str, list[int]]
    values: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    size: int = 1

    @property
    def file(self) -> str:
        """Path of the file in a checkpoint."""
        return f"{SLICES_FOLDER}/{_NAME.format(rank=self.rank + 1, size=self.size)}"

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the file."""
        places = {name: {"saved_offsets": begin} for name, begin in self.begins.items()}
        return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}


def build_slices(state: Mapping[str, Any], *, rank: int, size: int) -> Slices | None:
    """Return this process's slices of an optimizer's state, or None if it cannot be sliced, as packed low-bit numbers.

    Args:
        state: state from `get_optimizer_state_dict`, with sharded tensors.
        rank, size: index of this process, and number of processes.
    """
    tensors, begins, numbers = {}, {}, {}
    for weight, values in state["state"].items():
        for name, value in values.items():
            key = f"{weight}/{name}"
            if isinstance(value, _SCALARS):
                numbers[key] = value
            elif not isinstance(value, Tensor) or type(_to_local(value)) is not Tensor:
                return None
            elif (begin := _slice_offset(value, rank=rank)) is not None:
                tensors[key], begins[key] = _to_local(value), begin
    groups = state["param_groups"]
    if not all(_is_plain(value) for group in groups for value in group.values()):
        return None
    return Slices(tensors, begins, {"param_groups": groups, "numbers": numbers}, rank, size)


def read_into(state: dict[str, Any], folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Read slices into the tensors of an optimizer's state, by any number of writers; every process must call it.

    Args:
        state: see `build_slices`; its tensors are filled in place.
        folder: folder of the files.
        group: group whose processes read together, between their hosts.

        Raises:
            CheckpointException: a tensor is missing, or has another shape.
    """
    tensors = {
        f"{weight}/{name}": value
        for weight, values in state["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=group)


def read_whole(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the whole state into host memory, by the weights' names, for a process that holds all of it.

    Args:
        folder: folder of the files.
        values: `Slices.values` that were saved.
    """
    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)  # type: ignore[union-attr]
        for name, stored in reader.read_metadata().state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # this process reads all of it
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    state: dict[str, dict[str, Any]] = {}
    for key, value in {**tensors, **values["numbers"]}.items():
        weight, _, name = key.rpartition("/")
        state.setdefault(weight, {})[name] = value
    return {"state": state, "param_groups": values["param_groups"]}


def rename_weights(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with other names, or indexes, for the weights."""
    return {
        "state": {names[weight]: values for weight, values in state["state"].items()},
        "param_groups": [{**g, "params": [names[weight] for weight in g["params"]]} for g in state["param_groups"]],
    }


def trained_names(model: nn.Module) -> list[str]:
    """Return the names of the trainable weights, in the optimizer's order."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _to_local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _slice_offset(value: Tensor, *, rank: int) -> list[int] | None:
    """Return the offset of this process's slice, or None if it has none, or if another process writes the same."""
    if not isinstance(value, DTensor):
        return [0] * value.dim() if rank == 0 else None
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a process outside the mesh holds none of it"
    copies = any(
        position and isinstance(placement, Replicate)
        for position, placement in zip(coordinate, value.placements, strict=True)
    )
    if copies or not value.to_local().numel():
        return None
    _, begin = compute_local_shape_and_global_offset(value.shape, mesh, value.placements)
    return list(begin)


def _is_plain(value: Any) -> bool:
    """Return whether JSON restores the value."""
    if isinstance(value, list | tuple):
        return all(_is_plain(element) for element in value)
    return isinstance(value, _SCALARS)
