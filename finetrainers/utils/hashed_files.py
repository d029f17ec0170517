"""Files whose SHA-256 is computed while they are written, so that they need not be read again, such as safetensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from .alive import send_heartbeat

#: Bytes that are hashed and written together, so that the second operation finds them in the processor's cache.
_PIECE = 1 << 20
#: The format's name of each dtype, in the order of the tensors in a file: larger elements come first, so that all are
#: aligned.
_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: index for index, dtype in enumerate(_DTYPES)}


class Written(NamedTuple):
    """Size and digest of a written file.

    Attributes:
        size: in bytes.
        sha256: of its content, in hexadecimal.
    """

    size: int
    sha256: str


class HashedFile:
    """A file that is written from its beginning to its end, within `with`; an existing one is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> HashedFile:
        self._file: BinaryIO = open(self._path, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes, which must not change until this returns, and return their number."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._digest.update(piece)
            self._file.write(piece)
            send_heartbeat()
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """Pass buffered bytes to the system."""
        self._file.flush()

    def written(self) -> Written:
        """Return size and digest of the written bytes."""
        return Written(self._size, self._digest.hexdigest())


def save_safetensors(
    tensors: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str] | None = None
) -> Written:
    """Write tensors to a safetensors file, in the layout of `safetensors.torch.save_file`.

    The library's function does not expose the bytes that it writes. Each tensor is written separately: if two share
    memory, the file has both.

    Args:
        tensors: dense, in host memory.
        path: the file.
        metadata: free text by key.
    """
    ordered = _file_order(tensors)
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (math.ceil(len(text) / 8) * 8 - len(text))
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            if tensors[name].numel():
                file.write(_content(tensors[name]))
    return file.written()


def data_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the weights in a file of `save_safetensors`, without its header, in hexadecimal."""
    digest = hashlib.sha256()
    for name in _file_order(tensors):
        if tensors[name].numel():
            digest.update(_content(tensors[name]))
    return digest.hexdigest()


def _file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return names in the order of a file."""
    return sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))


def _content(tensor: Tensor) -> memoryview:
    """Return the content of a tensor in host memory, copied only if its elements are not in order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
