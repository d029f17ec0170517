"""Headers of safetensors files: names, shapes and dtypes of the tensors, without reading the data. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .failures import FileError, InputError
from .files import open_regular
from .reading import check_regular, fits, parse_json, parse_json_object
from .text import file_size, printable, shortened

#: Key of PEFT's settings in a LoRA's metadata, as diffusers names it.
ADAPTER_METADATA = "lora_adapter_metadata"
_LENGTH_BYTES = 8  # the header follows its length
_MAX_HEADER = 100_000_000  # the library's limit
_LFS_POINTER = b"version https://git-lfs"
#: Settings of PEFT that are computed with: their types, for messages and for `fits`.
_ADAPTER_TYPES: Mapping[str, tuple[str, Any]] = {
    "r": ("a whole number above 0", lambda value: fits(value, int) and value > 0),
    "lora_alpha": ("a number", float),
    "rank_pattern": ("a table of whole numbers", {str: int}),
    "alpha_pattern": ("a table of numbers", {str: float}),
    "target_modules": ("a name or a list of names", (str, [str])),
    "use_rslora": ("true or false", bool),
    "use_dora": ("true or false", bool),
}


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
        with open_tensors(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
            dtypes = {name: tensor.get_dtype() for name, tensor in slices.items()}
            return Header(shapes, dict(file.metadata() or {}), dtypes)
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileError):
            raise
        message = f"{path} {_find_damage(path) or f'is not a safetensors file: {printable(str(error))}'}"
        raise InputError(message, "unreadable") from None


def adapter_metadata(path: Path, header: Header | None = None) -> dict[str, Any]:
    """Return the PEFT settings in the header of a LoRA's file; empty if it has none.

    Raises:
        ValueError: the header cannot be read, or the settings are not a JSON object, or have values of other types.
    """
    header = read_header(path) if header is None else header
    name = f"{path}: {ADAPTER_METADATA} of the header"
    return check_adapter_settings(parse_json_object(header.metadata.get(ADAPTER_METADATA, "{}"), name), name)


def check_adapter_settings(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return PEFT's settings of a LoRA if those that its scales follow from have the right types.

    Args:
        settings: by PEFT's name, which may follow that of a network: `transformer.r`.
        name: name of the place, for messages.

    Raises:
        ValueError: with the first setting that has another type.
    """
    for key, value in settings.items():
        expected, kind = _ADAPTER_TYPES.get(key.rpartition(".")[2], ("", None))
        if expected and value is not None and not fits(value, kind):
            text = shortened(printable(repr(value)), 60)
            raise InputError(f"{name}: {shortened(printable(key), 60)} must be {expected}, got {text}")
    return settings


@contextlib.contextmanager
def open_tensors(path: Path, *, framework: str = "pt") -> Iterator[Any]:
    """Open a regular safetensors file for reading tensor by tensor. The library would wait for a named pipe.

    Raises:
        FileError: it is missing or something else.
        SafetensorError: it is not complete.
    """
    check_regular(path)
    with safe_open(path, framework=framework) as file:
        yield file


def load_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a regular safetensors file by name.

    Raises:
        FileError, SafetensorError: as `open_tensors`.
    """
    from safetensors.torch import load_file

    check_regular(path)
    return load_file(path)


def _find_damage(path: Path) -> str | None:
    """Return the problem of a file that is not a complete safetensors file, or None if it is not recognized."""
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
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
            entries = parse_json(header)
            end += max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    missing = _LENGTH_BYTES + end - size
    return (
        f"is truncated: at least {file_size(missing)} are missing; copy or download it again" if missing > 0 else None
    )
