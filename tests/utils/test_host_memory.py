"""Freed memory that serves the next tensors.

Measurements of host memory are in `tests/memory/test_recorder.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc"
)

_BYTES, _TIMES = 48 * 2**20, 5
#: A separate process: allocations of other threads and earlier tests decide what glibc does with a block.
_SCRIPT = f"""
import json, psutil, resource
from finetrainers.utils.host_memory import freed_memory_is_reused

def faults_of_use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({_TIMES}):
        b"x" * {_BYTES}
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return psutil.Process().memory_info().rss

said = {{"before": faults_of_use()}}
with freed_memory_is_reused():
    faults_of_use()
    said |= {{"within": faults_of_use(), "held": resident()}}
print(json.dumps(said | {{"left": resident(), "after": faults_of_use()}}))
"""


def used(**settings: str) -> dict[str, int]:
    """Return resident bytes, and page faults before, within and after filling and freeing blocks in turn."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    plain.pop("GLIBC_TUNABLES", None)
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=plain | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said: dict[str, int] = json.loads(done.stdout)
    return said


def test_pages_fault_once_within_the_block_and_go_back_after_it() -> None:
    said = used()
    assert said["within"] < said["before"] / _TIMES
    assert said["left"] < said["held"] - _BYTES / 2
    assert said["after"] > said["before"] / 2


@pytest.mark.parametrize(
    ("name", "value", "stays"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072", True),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072", True),
        ("MALLOC_ARENA_MAX", "2", False),
    ],
)
def test_settings_of_the_allocator_stay(name: str, value: str, stays: bool) -> None:
    said = used(**{name: value})
    assert (said["within"] > said["before"] / 2) is stays
