"""Headers of safetensors files: names, shapes and dtypes of the tensors, without reading the data. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .failures import InputError
from .text import file_size

_LENGTH_BYTES = 8  # the header follows its length
_MAX_HEADER = 100_000_000  # the library's limit
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    Attributes:
        shapes: of its tensors, by name.
        dtypes: of its tensors, by name, with the format's names: `BF16`, `F8_E4M3`.
        metadata: free text by key.
    """

    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]
    dtypes: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file, checked against the file's size.

    Raises:
        ValueError: it is not a complete safetensors file; the message has the file and the reason.
    """
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
            dtypes = {name: tensor.get_dtype() for name, tensor in slices.items()}
            return Header(shapes, dict(file.metadata() or {}), dtypes)
    except (SafetensorError, OSError) as error:
        message = f"{path} {_find_damage(path) or f'is not a safetensors file: {error}'}"
        raise InputError(message, "unreadable") from None


def _find_damage(path: Path) -> str | None:
    """Return the problem of a file that is not a complete safetensors file, or None if it is not recognized."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                return "is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            if size < _LENGTH_BYTES or not 0 < length <= _MAX_HEADER:
                return None
            file.seek(_LENGTH_BYTES)
            header = file.read(length) if _LENGTH_BYTES + length <= size else b""
        end = length
        if header:
            entries = json.loads(header)
            end += max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    missing = _LENGTH_BYTES + end - size
    return (
        f"is truncated: at least {file_size(missing)} are missing; copy or download it again" if missing > 0 else None
    )
