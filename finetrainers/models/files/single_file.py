"""Networks in one weight file: in diffusers' names, in those of their authors, or in ComfyUI's; read and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from torch import Tensor, nn

from finetrainers.utils.failures import InputError
from finetrainers.utils.hashed_files import Written, save_safetensors
from finetrainers.utils.headers import load_tensors, read_header

from .layouts import Match, Shapes, build_layout, match_file, read_tensors, stored_tensors
from .original import ORIGINALS, known_layouts, original_layout

#: Name of the layout that diffusers' converter of a class reads.
BY_DIFFUSERS = "diffusers' converter"
#: Rounding error of a sine in bf16.
_ROUNDING = 2**-8


def match_network(path: Path, network: nn.Module) -> Match:
    """Find the layout of a network in a file, by the file's header.

    Args:
        path: the file.
        network: of the class and the config in question; its weights do not matter.

    Raises:
        ValueError: the file is not a complete safetensors file.
    """
    shapes, held = tensor_shapes(network), read_header(path).shapes
    match = match_file(held, shapes, known_layouts(type(network).__name__, shapes))
    if match.missing:
        empty = {name: torch.empty(shape, device="meta") for name, shape in held.items()}
        tensors = _converted(network, empty)
        if tensors is not None:
            converted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            other = match_file(converted, shapes, {BY_DIFFUSERS: build_layout(shapes, ())})
            match = other if len(other.missing) < len(match.missing) else match
    return match


def _converted(network: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Convert a file's tensors by diffusers' own converter, for classes without a layout here; None if it cannot."""
    name = type(network).__name__
    if name in ORIGINALS or name not in SINGLE_FILE_LOADABLE_CLASSES:
        return None
    convert = SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
    try:
        return convert(checkpoint=tensors, config=dict(network.config))  # type: ignore[operator,arg-type]
    except (KeyError, IndexError, RuntimeError, TypeError):  # a converter may do anything with unexpected names
        return None


def tensor_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's tensors by their names in diffusers layout."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def computed_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a network computes from its config and leaves out of its weights, in fp32.

    Other programs have no config: a table of positions that is not in a file does not exist for them.
    """
    weights = network.state_dict()
    return {name: buffer.float() for name, buffer in network.named_buffers() if name not in weights}


def match_buffers(held: Shapes, network: nn.Module, class_name: str) -> Match:
    """Find the layout of the buffers that a network computes in a file, which may lack some of them."""
    weights, buffers = tensor_shapes(network), {n: tuple(b.shape) for n, b in computed_buffers(network).items()}
    layouts = known_layouts(class_name, [*weights, *buffers])
    layout = layouts[match_file(held, weights, known_layouts(class_name, weights)).kind]
    own = {stored: rows for stored, rows in layout.items() if all(row.name in buffers for row in rows)}
    return match_file(held, buffers, {"buffers": own})


def check_buffers(path: Path, network: nn.Module, class_name: str, *, complete: bool = False) -> None:
    """Compare the buffers in a file with those that the network computes.

    Args:
        path: the file.
        network: the network; its weights do not matter.
        class_name: the network's class in diffusers.
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
            message = f"{name} in {path} has other values than the network computes from its config"
            problems.append(InputError(message, "mismatch"))
    if problems:
        raise InputError("; ".join(map(str, problems)), "mismatch")


def load_single_file(cls: Any, settings: Any, path: Path, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """Load a network from a file in which `match_network` finds no problem, as `from_pretrained` from a folder.

    Args:
        cls: class of diffusers or of transformers.
        settings: the config, from diffusers' `load_config`, or a config of transformers.
        path: the file.
        dtype: dtype of the weights; those that the class keeps in fp32 stay in it.

    Returns:
        The network, and the `missing_keys`, as `from_pretrained` returns them.
    """
    if not issubclass(cls, ModelMixin):
        return _load_transformers(cls, settings, path, dtype)
    with init_empty_weights():
        network: Any = cls.from_config(settings)
    fp32 = cls._keep_in_fp32_modules or ()
    tensors = {}
    for name, tensor in _read(path, network):
        stored_dtype = torch.float32 if any(part in name.split(".") for part in fp32) else dtype
        tensors[name] = tensor.to(stored_dtype) if tensor.is_floating_point() else tensor
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
        converted = _converted(network, load_tensors(path))
        assert converted is not None, "it has converted the shapes"
        return iter((name, converted[name]) for name in match.needed if name in converted)
    return read_tensors(path, match, tensor_shapes(network))


def save_single_file(path: Path, class_name: str, tensors: Mapping[str, Tensor], *, kind: str | None = None) -> Written:
    """Write a network's weights to one file, in its authors' layout or another of its class, and read it back.

    Args:
        path: the file.
        class_name: class of the network, such as `HunyuanVideoTransformer3DModel`.
        tensors: all of its weights, in diffusers layout, in the dtype to be written.
        kind: name of the layout; see `original`.

    Raises:
        ValueError: the class has no such layout, or the file is not what was to be written.
    """
    layout, prefix = original_layout(class_name, tensors, kind)
    on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    written = save_safetensors(stored_tensors(layout, on_host, prefix), path, metadata={"format": "pt"})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    match = match_file(read_header(path).shapes, shapes, known_layouts(class_name, shapes))
    problems = match.problems(str(path))
    if problems:
        raise InputError("; ".join(map(str, problems)), "mismatch")
    for name, tensor in read_tensors(path, match, shapes):
        if not tensor.equal(on_host[name]):
            raise InputError(f"{path} was read back with another {name}", "mismatch")
    return written
