"""Settings of torch's CUDA allocator: only where there is a GPU, and only if the user has set none."""

from __future__ import annotations

import sys

import pytest

from finetrainers.utils import device
from finetrainers.utils.device import ALLOCATOR, allocator_settings, use_expandable_segments


@pytest.mark.parametrize(
    ("kind", "platform", "torch", "given", "expected"),
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
    kind: str, platform: str, torch: str, given: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.setenv(name, given.get(name, ""))  # so that it is undone
    monkeypatch.setattr(device, "likely_device_type", lambda: kind)
    monkeypatch.setattr(device, "version", lambda _: torch)
    monkeypatch.setattr(sys, "platform", platform)
    use_expandable_segments()
    assert allocator_settings() == expected
