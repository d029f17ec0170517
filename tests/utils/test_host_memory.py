"""Freed memory that serves the next tensors; what is measured of host memory is in `tests/engine/test_memory_recorder.py`."""

from __future__ import annotations

import ctypes
import os
import sys

import psutil
import pytest
import torch

from finetrainers.utils.host_memory import freed_memory_is_reused

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc"
)

_BYTES, _TIMES = 48 * 2**20, 5


def faults_of_use() -> int:
    """Page faults of tensors that are made and freed, one after the other."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_TIMES):
        torch.zeros(_BYTES, dtype=torch.uint8).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)


def test_pages_fault_once_within_the_block_and_go_back_after_it() -> None:
    outside = faults_of_use()
    with freed_memory_is_reused():
        faults_of_use()
        assert faults_of_use() < outside / _TIMES
        held = resident()
    assert resident() < held - _BYTES / 2
    assert faults_of_use() > outside / 2


@pytest.mark.parametrize(
    ("name", "value", "stays"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072", True),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072", True),
        ("MALLOC_ARENA_MAX", "2", False),
    ],
)
def test_settings_of_the_allocator_stay(name: str, value: str, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = faults_of_use()
    monkeypatch.setenv(name, value)
    with freed_memory_is_reused():
        faults_of_use()
        assert (faults_of_use() > outside / 2) is stays
