"""Expected errors, of data, memory, disks and numbers: their message is enough, without a traceback."""

from __future__ import annotations

import errno
import os

#: Error numbers of disks that are full or cannot be written.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_FULL = os.strerror(errno.ENOSPC)
#: In what allocators say: torch's on a device and on the host; CUDA's own (page-locked memory, a context, within NCCL);
#: cuBLAS's, cuDNN's and cuFFT's.
_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")


class ExpectedError(Exception):
    """An error whose message names the cause and the way out; a command prints it without its traceback."""


def sentence_of(error: BaseException) -> str | None:
    """The sentence that a command prints for an expected error; None for errors that need their traceback."""
    if isinstance(error, ExpectedError):
        return str(error)
    of_disk = isinstance(error, OSError) and error.errno in _OF_DISKS
    # Libraries written in other languages say it in words alone.
    if not of_disk and _FULL not in str(error):
        return None
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    if "make room" in text.lower():
        return text  # it says how already
    return f"{text}. Earlier checkpoints are intact: make room, and continue with --resume_from_checkpoint latest"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator, on a device or on the host, had nothing left."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from accelerate.utils.memory import should_reduce_batch_size

    message = str(error).lower()
    return should_reduce_batch_size(error) or any(sign in message for sign in _SIGNS)
