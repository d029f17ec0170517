"""Networks in one weight file: in diffusers' names, in those of their authors, or in ComfyUI's; read and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file
from torch import Tensor, nn

from finetrainers.utils.hashed_files import Written, save_safetensors
from finetrainers.utils.headers import read_header

from .layouts import Match, Shapes, layout_of, match_file, read_tensors, stored_tensors
from .original import ORIGINALS, layouts_of, original_layout

#: Name of the layout that diffusers' converter of a class reads.
BY_DIFFUSERS = "diffusers' converter"
#: What bf16 rounds off a sine.
_ROUNDING = 2**-8


def match_network(path: Path, network: nn.Module) -> Match:
    """How a file holds a network, by its header.

    Args:
        path: the file.
        network: of the class and the config in question; its weights do not matter.

    Raises:
        ValueError: the file is no whole safetensors file.
    """
    shapes, held = shapes_of(network), read_header(path).shapes
    match = match_file(held, shapes, layouts_of(type(network).__name__, shapes))
    if match.missing:
        empty = {name: torch.empty(shape, device="meta") for name, shape in held.items()}
        found = _converted(network, empty)
        if found is not None:
            converted = {name: tuple(tensor.shape) for name, tensor in found.items()}
            other = match_file(converted, shapes, {BY_DIFFUSERS: layout_of(shapes, ())})
            match = other if len(other.missing) < len(match.missing) else match
    return match


def _converted(network: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The tensors of a file by diffusers' own converter, for classes without a layout here; None: it does not know them."""
    name = type(network).__name__
    if name in ORIGINALS or name not in SINGLE_FILE_LOADABLE_CLASSES:
        return None
    convert = SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
    try:
        return convert(checkpoint=tensors, config=dict(network.config))  # type: ignore[operator,arg-type]
    except (KeyError, IndexError, RuntimeError, TypeError):  # a converter may do anything with unexpected names
        return None


def shapes_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a network's tensors by their names in diffusers layout."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def computed_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a network computes from its config and leaves out of its weights, in fp32.

    Other programs have no config: a table of positions that is not in a file does not exist for them.
    """
    weights = network.state_dict()
    return {name: buffer.float() for name, buffer in network.named_buffers() if name not in weights}


def match_buffers(held: Shapes, network: nn.Module, class_name: str) -> Match:
    """Return how a file holds the buffers that a network computes, some of which it may lack."""
    weights, buffers = shapes_of(network), {n: tuple(b.shape) for n, b in computed_buffers(network).items()}
    layouts = layouts_of(class_name, [*weights, *buffers])
    layout = layouts[match_file(held, weights, layouts_of(class_name, weights)).kind]
    own = {stored: rows for stored, rows in layout.items() if all(row.name in buffers for row in rows)}
    return match_file(held, buffers, {"buffers": own})


def check_buffers(path: Path, network: nn.Module, class_name: str, *, complete: bool = False) -> None:
    """Compare the buffers in a file with those that the network computes.

    Args:
        path: the file.
        network: whose weights do not matter.
        class_name: of the network in diffusers.
        complete: whether the file must hold all of them.

    Raises:
        ValueError: some differ, or are missing; with the name of one.
    """
    buffers = computed_buffers(network)
    match = match_buffers(read_header(path).shapes, network, class_name)
    problems = match.problems(str(path)) if complete and buffers else []
    shapes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    for name, tensor in read_tensors(path, match, shapes):
        if not torch.allclose(tensor.float(), buffers[name].cpu(), atol=_ROUNDING):
            problems.append(f"{name} in {path} has other values than the network computes from its config")
    if problems:
        raise ValueError("; ".join(problems))


def load_single_file(cls: Any, settings: Any, path: Path, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """A network of a file that `match_network` finds nothing wrong with, as `from_pretrained` loads it from a folder.

    Args:
        cls: of diffusers or of transformers.
        settings: the config: what diffusers' `load_config` gives, or a config of transformers.
        path: the file.
        dtype: of the weights; those that the class keeps in fp32 stay in it.

    Returns:
        It, and the `missing_keys`, as `from_pretrained` tells them.
    """
    if not issubclass(cls, ModelMixin):
        return _load_transformers(cls, settings, path, dtype)
    with init_empty_weights():
        network: Any = cls.from_config(settings)
    fp32 = cls._keep_in_fp32_modules or ()
    tensors = {}
    for name, tensor in _read(path, network):
        wanted = torch.float32 if any(part in name.split(".") for part in fp32) else dtype
        tensors[name] = tensor.to(wanted) if tensor.is_floating_point() else tensor
    missing = network.load_state_dict(tensors, strict=False, assign=True).missing_keys
    network.register_to_config(_name_or_path=str(path))
    return network.eval(), {"missing_keys": missing}


def _load_transformers(cls: Any, settings: Any, path: Path, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        bare = cls(settings)
    state = dict(_read(path, bare))
    return cls.from_pretrained(None, config=settings, state_dict=state, dtype=dtype, output_loading_info=True)


def _read(path: Path, network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    match = match_network(path, network)
    if match.kind == BY_DIFFUSERS:
        found = _converted(network, load_file(path))
        assert found is not None, "it has converted the shapes"
        return iter((name, found[name]) for name in match.needed if name in found)
    return read_tensors(path, match, shapes_of(network))


def save_single_file(path: Path, class_name: str, tensors: Mapping[str, Tensor], *, kind: str | None = None) -> Written:
    """Write a network's weights to a single file, in the layout of its authors or another of its class, and read it back.

    Args:
        path: the file.
        class_name: of the network, such as `HunyuanVideoTransformer3DModel`.
        tensors: all of its weights, in diffusers layout, in the dtype to be written.
        kind: of the layout; see `original`.

    Raises:
        ValueError: the class has no such layout, or the file is not what was to be written.
    """
    layout, prefix = original_layout(class_name, tensors, kind)
    on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    written = save_safetensors(stored_tensors(layout, on_host, prefix), path, metadata={"format": "pt"})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    match = match_file(read_header(path).shapes, shapes, layouts_of(class_name, shapes))
    problems = match.problems(str(path))
    if problems:
        raise ValueError("; ".join(problems))
    for name, tensor in read_tensors(path, match, shapes):
        if not tensor.equal(on_host[name]):
            raise ValueError(f"{path} was read back with another {name}")
    return written
