"""Files that are hashed while they are written are those that the libraries write."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetrainers.utils import hashed_files
from finetrainers.utils.files import file_sha256
from finetrainers.utils.hashed_files import HashedFile, save_safetensors


def parts(path: Path) -> tuple[int, list[tuple[str, object]], bytes]:
    """Length of the header, its entries in order (the library's metadata has none), and the data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    return length, list(header.items()), content[8 + length :]


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "text": 'quotes " and\nlines, \u00e4\u00f6'}])
def test_safetensors_are_the_library_s(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{number} {dtype}": torch.randint(0, 100, (2, number + 1), generator=generator).to(dtype)
        for number, dtype in enumerate(reversed(hashed_files._DTYPES))
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "b": torch.ones(3), "a": torch.zeros(3)}
    tensors |= {
        "large": torch.rand(700, 1000, generator=generator),
        "turned": torch.rand(4, 6, generator=generator).t(),
    }
    written = save_safetensors(tensors, tmp_path / "ours", metadata=metadata)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", metadata=metadata)
    assert parts(tmp_path / "ours") == parts(tmp_path / "theirs")
    assert load_file(tmp_path / "ours").keys() == tensors.keys()
    assert written == ((tmp_path / "ours").stat().st_size, file_sha256(tmp_path / "ours"))


def test_a_pickle_is_torch_s(tmp_path: Path) -> None:
    value = {"state": {0: {"exp_avg": torch.rand(1000, 700), "step": torch.tensor(2.0)}}, "groups": [{"lr": 0.1}]}
    with HashedFile(tmp_path / "ours.pt") as file:
        torch.save(value, file)
    (tmp_path / "other").mkdir()
    torch.save(value, tmp_path / "other" / "archive.pt")  # whose name is in the file
    assert (tmp_path / "ours.pt").read_bytes() == (tmp_path / "other" / "archive.pt").read_bytes()
    assert file.written() == ((tmp_path / "ours.pt").stat().st_size, file_sha256(tmp_path / "ours.pt"))
