"""Headers of safetensors files: names, shapes and dtypes of the tensors, without reading the data. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .text import file_size

_LENGTH_BYTES = 8  # before the header stands its length
_MAX_HEADER = 100_000_000  # as the library
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    Attributes:
        shapes: of its tensors, by name.
        dtypes: likewise, as the format calls them: `BF16`, `F8_E4M3`.
        metadata: free text by key.
    """

    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]
    dtypes: Mapping[str, str]


def read_header(path: Path) -> Header:
    """The header of a safetensors file, checked against the file's size.

    Raises:
        ValueError: it is no safetensors file, or not a whole one; the message says which file and why.
    """
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
            return Header(shapes, dict(file.metadata() or {}), {n: one.get_dtype() for n, one in slices.items()})
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} {_what_it_is(path) or f'is not a safetensors file: {error}'}") from None


def _what_it_is(path: Path) -> str | None:
    """What a file is that is not a complete safetensors file, where that is recognizable."""
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
        f"is cut short: at least {file_size(missing)} are missing; copy or download it again" if missing > 0 else None
    )
