"""Page-locked buffers: forked processes lack them, they are unlocked before they are freed, and failures are an OOM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from finetrainers.memory.page_locked import page_locked_buffer, unforked_buffer
from finetrainers.utils.failures import is_out_of_memory


def flags(address: int) -> list[str]:
    """The kernel's flags of the mapping at an address."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_here = start <= address < end
        elif is_here and first == "VmFlags:":
            return rest.split()
    raise AssertionError("no such mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_forked_processes_lack_a_buffer() -> None:
    buffer = unforked_buffer(5 * 2**20)
    assert "dc" in flags(buffer.data_ptr())  # do not copy
    assert "dc" not in flags(torch.zeros(5 * 2**20, dtype=torch.uint8).data_ptr())
    assert (buffer.shape, buffer.dtype, int(buffer.sum())) == ((5 * 2**20,), torch.uint8, 0)
    buffer[::4096] = 7
    assert int(buffer.sum()) == 7 * 5 * 2**8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The calls of a CUDA runtime that locks at most 1 MiB."""
    calls: list[tuple[str, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("lock", address))
        return 2 if size > 2**20 else 0

    def unregister(address: int) -> int:
        assert sys.platform != "linux" or "dc" in flags(address), "it must still be mapped"
        calls.append(("unlock", address))
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(("wait", 0)))
    return calls


def test_a_buffer_is_unlocked_with_its_last_view(calls: list[tuple[str, int]]) -> None:
    buffer = page_locked_buffer(3000, "blocks")
    address = buffer.data_ptr()
    view = buffer[256:1256].view(torch.bfloat16)
    del buffer
    assert calls == [("lock", address)]
    view.fill_(1.0)
    del view
    assert calls == [("lock", address), ("wait", 0), ("unlock", address)]


def test_a_failure_to_lock_memory_is_an_oom_of_the_host(calls: list[tuple[str, int]]) -> None:
    with pytest.raises(MemoryError, match="swapped blocks") as raised:
        page_locked_buffer(2**21, "swapped blocks")
    assert is_out_of_memory(raised.value)
    message = "Registering memory failed with cudaError: {}"  # torch's own
    assert [is_out_of_memory(RuntimeError(message.format(code))) for code in (2, 712)] == [True, False]
    assert [name for name, _ in calls] == ["lock"]
