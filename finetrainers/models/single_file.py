"""Networks in one weight file: in diffusers' names, in those of their authors, or in ComfyUI's; read and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin
from torch import Tensor, nn

from finetrainers.utils.hashed_files import Written, save_safetensors
from finetrainers.utils.headers import read_header

from .layouts import Match, match_file, read_tensors, stored_tensors
from .original import layouts_of, original_layout


def match_network(path: Path, network: nn.Module) -> Match:
    """How a file holds a network, by its header.

    Args:
        path: the file.
        network: of the class and the config in question; its weights do not matter.

    Raises:
        ValueError: the file is no whole safetensors file.
    """
    shapes = shapes_of(network)
    return match_file(read_header(path).shapes, shapes, layouts_of(type(network).__name__, shapes))


def shapes_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a network's tensors by their names in diffusers layout."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


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
    with init_empty_weights(), _default_dtype(dtype):  # as `from_pretrained`, whose positions then are the same
        network: Any = cls.from_config(settings)
    fp32 = cls._keep_in_fp32_modules or ()
    tensors = {}
    for name, tensor in _read(path, network):
        wanted = torch.float32 if any(part in name.split(".") for part in fp32) else dtype
        tensors[name] = tensor.to(wanted) if tensor.is_floating_point() else tensor
    missing = network.load_state_dict(tensors, strict=False, assign=True).missing_keys
    network.register_to_config(_name_or_path=str(path))
    return network.eval(), {"missing_keys": missing}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _load_transformers(cls: Any, settings: Any, path: Path, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        bare = cls(settings)
    state = dict(_read(path, bare))
    return cls.from_pretrained(None, config=settings, state_dict=state, dtype=dtype, output_loading_info=True)


def _read(path: Path, network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return read_tensors(path, match_network(path, network), shapes_of(network))


def save_single_file(
    path: Path, class_name: str, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> Written:
    """Write a network's weights in the layout of its authors' single file.

    Args:
        path: the file.
        class_name: of the network, such as `HunyuanVideoTransformer3DModel`.
        tensors: all of its weights, in diffusers layout, in the dtype to be written.
        metadata: free text by key.

    Raises:
        ValueError: the original layout of the class is not known.
    """
    layout, prefix = original_layout(class_name, tensors)
    on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    return save_safetensors(
        stored_tensors(layout, on_host, prefix), path, metadata={"format": "pt", **(metadata or {})}
    )
