"""Expected errors, of data, memory, disks, numbers and connections: their message is enough, without a traceback."""

from __future__ import annotations

import errno
import os
import re

#: Error numbers of disks that are full or cannot be written.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_FULL = os.strerror(errno.ENOSPC)
#: In what allocators say: torch's on a device and on the host; CUDA's own (page-locked memory, a context, within NCCL);
#: cuBLAS's, cuDNN's and cuFFT's.
_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
#: In what gloo and NCCL say when another process does not take part in a collective.
_CONNECTIONS = ("gloo/transport/", "ncclRemoteError")
#: In what they say when it has not ended, as far as is known here.
_LATE = ("Timed out waiting", "Connection timed out", "No route to host")


class ExpectedError(Exception):
    """An error whose message names the cause and the way out; a command prints it without its traceback."""


def sentence_of(error: BaseException) -> str | None:
    """The sentence that a command prints for an expected error; None for errors that need their traceback."""
    if isinstance(error, ExpectedError):
        return str(error)
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CONNECTIONS):
        return _lost_connection(str(error))
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


def _lost_connection(said: str) -> str:
    """The sentence for a collective that failed because of another process."""
    # Gloo begins with a place in its source and ends with advice.
    said = re.sub(r"^\[/\S*\] ", "", said.splitlines()[0]).partition(". This is typically")[0].rstrip(".")
    late = any(sign in said for sign in _LATE)
    what = "does not answer: it hangs, or its machine is lost" if late else "has ended: its own output says why"
    return (
        f"another process of the run {what} ({said}). Checkpoints are intact: start the command on all machines again, and "
        "with --resume_from_checkpoint auto it continues from the newest one"
    )


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
