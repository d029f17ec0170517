"""Page-locked buffers in host memory, of exact size, that forked processes do not copy."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

_GIB = 2**30
#: `cudaErrorMemoryAllocation`.
_OUT_OF_MEMORY = 2


def page_locked_buffer(size: int, purpose: str) -> Tensor:
    """Return `size` bytes of page-locked memory for copies to and from the GPU. It is unlocked with its last view.

    Torch would round the size up to a power of two.

    Args:
        size: bytes, at least 1.
        purpose: what the memory holds, for the message.

    Raises:
        MemoryError: the system cannot lock so much memory.
    """
    buffer = unforked_buffer(size)
    address = buffer.data_ptr()
    error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    if error == _OUT_OF_MEMORY:
        raise MemoryError(
            f"out of memory: {size / _GIB:.2f} GiB of host memory for {purpose} cannot be page-locked. The machine or "
            "its container has too little free memory, or a limit of locked memory (`ulimit -l`)"
        )
    torch.cuda.check_error(error)
    weakref.finalize(buffer.untyped_storage(), _unlock, address).atexit = False
    return buffer


def unforked_buffer(size: int) -> Tensor:
    """Return `size` bytes of host memory that a forked process does not have.

    Linux copies page-locked memory into every process that is forked, such as workers of a data loader: copies on
    write would move pages that a GPU reads.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _unlock(address: int) -> None:
    torch.cuda.synchronize()  # a copy may be on its way
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
