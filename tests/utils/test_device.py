"""Settings of torch's allocators: only where there is a GPU, and only if the user has set none."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from finetrainers.utils import device
from finetrainers.utils.device import (
    ALLOCATOR,
    PINNED_ROUNDING_MIB,
    PINNED_SETTING,
    allocator_settings,
    configure_allocator,
    knows_allocator_setting,
    meta_device,
    page_locked_bytes,
)

EXPANDABLE, LIMITED = "expandable_segments:True", f"{PINNED_SETTING}:{PINNED_ROUNDING_MIB}"


@pytest.mark.parametrize(
    ("kind", "platform", "torch_version", "is_known", "given", "expected"),
    [
        ("cuda", "linux", "2.13.0", True, {}, f"PYTORCH_ALLOC_CONF={EXPANDABLE},{LIMITED}"),
        ("cuda", "linux", "2.11.0", False, {}, f"PYTORCH_ALLOC_CONF={EXPANDABLE}"),
        ("cuda", "linux", "2.8.1+cu128", False, {}, f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}"),
        ("cuda", "linux", "2.13.0", True, {"PYTORCH_CUDA_ALLOC_CONF": "a:b"}, "PYTORCH_CUDA_ALLOC_CONF=a:b"),
        ("cuda", "linux", "2.6.0", False, {"PYTORCH_ALLOC_CONF": "a:b"}, "PYTORCH_ALLOC_CONF=a:b"),
        ("cuda", "win32", "2.13.0", True, {}, f"PYTORCH_ALLOC_CONF={LIMITED}"),
        ("cuda", "win32", "2.11.0", False, {}, ""),
        ("cpu", "linux", "2.13.0", True, {}, ""),
    ],
)
def test_settings(
    kind: str, platform: str, torch_version: str, is_known: bool, given: dict[str, str], expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ALLOCATOR:
        monkeypatch.setenv(name, given.get(name, ""))  # so that it is undone
    monkeypatch.setattr(device, "likely_device_type", lambda: kind)
    monkeypatch.setattr(device, "version", lambda _: torch_version)
    monkeypatch.setattr(device, "knows_allocator_setting", lambda _: is_known)
    monkeypatch.setattr(sys, "platform", platform)
    configure_allocator()
    assert allocator_settings() == expected


@pytest.mark.parametrize(
    ("is_known", "given", "is_exact"),
    [(True, "", True), (False, "", False), (True, "a:b", False), (True, LIMITED, True)],
)
def test_page_locked_memory_is_rounded_where_a_run_cannot_limit_it(
    is_known: bool, given: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOCATOR[0], given)
    monkeypatch.setenv(ALLOCATOR[1], "")
    monkeypatch.setattr(device, "knows_allocator_setting", lambda _: is_known)
    weight = 4 * 3072 * 3072
    assert page_locked_bytes(weight) == (weight if is_exact else 2**26)
    assert [page_locked_bytes(size) for size in (1, 1000, 1024, 2**24)] == [1, 1024, 1024, 2**24]


def test_settings_are_looked_for_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert knows_allocator_setting("expandable_segments")
    assert not knows_allocator_setting("a_setting_of_no_torch")
    monkeypatch.setattr(device, "find_spec", lambda _: None)
    assert not knows_allocator_setting.__wrapped__("expandable_segments")


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
