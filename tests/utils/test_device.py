"""Settings of torch's CUDA allocator: only where there is a GPU, and only if the user has set none."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from finetrainers.utils import device
from finetrainers.utils.device import ALLOCATOR, allocator_settings, meta_device, use_expandable_segments


@pytest.mark.parametrize(
    ("kind", "platform", "torch_version", "given", "expected"),
    [
        ("cuda", "linux", "2.13.0", {}, "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("cuda", "linux", "2.8.1+cu128", {}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (
            "cuda",
            "linux",
            "2.13.0",
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"},
            "PYTORCH_CUDA_ALLOC_CONF=backend:native",
        ),
        (
            "cuda",
            "linux",
            "2.6.0",
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            "PYTORCH_ALLOC_CONF=expandable_segments:False",
        ),
        ("cuda", "win32", "2.13.0", {}, ""),
        ("cpu", "linux", "2.13.0", {}, ""),
    ],
)
def test_expandable_segments(
    kind: str, platform: str, torch_version: str, given: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.setenv(name, given.get(name, ""))  # so that it is undone
    monkeypatch.setattr(device, "likely_device_type", lambda: kind)
    monkeypatch.setattr(device, "version", lambda _: torch_version)
    monkeypatch.setattr(sys, "platform", platform)
    use_expandable_segments()
    assert allocator_settings() == expected


def test_layers_on_the_meta_device_draw_nothing_and_other_tensors_do() -> None:
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 6), nn.LayerNorm(7)).state_dict()
    state = torch.get_rng_state()
    with meta_device():
        skipped = nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 6), nn.LayerNorm(7)).state_dict()
        assert torch.equal(torch.get_rng_state(), state)
        drawn = [nn.init.normal_(torch.zeros(99, device="cpu")), torch.zeros(99, device="cpu").uniform_()]
    assert [(name, tensor.shape, tensor.dtype) for name, tensor in skipped.items()] == [
        (name, tensor.shape, tensor.dtype) for name, tensor in plain.items()
    ]
    assert all(tensor.is_meta for tensor in skipped.values())
    assert all(tensor.std() > 0.1 for tensor in drawn)
