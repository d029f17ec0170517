"""Errors of inputs, with their kind, and expected errors of data, memory, disks and connections: their message is
enough, without a traceback.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Literal, cast

from .spelling import spelled

#: Kinds of problems with an input: an option, a name, a file, a folder or a machine. Programs tell problems apart by
#: them; messages may change. docs/reference/python.md has a table.
Kind = Literal[
    "invalid", "unknown", "required", "duplicate", "conflict", "unsupported", "not_found", "unreadable", "mismatch",
    "occupied", "not_installed", "too_large", "unavailable",
]  # fmt: skip

#: Error numbers of disks that are full or cannot be written.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_FULL = os.strerror(errno.ENOSPC)
#: Parts of messages of allocators: torch's on a device and on the host; CUDA's own (page-locked memory, a context,
#: within NCCL); cuBLAS's, cuDNN's and cuFFT's; torch's where CUDA cannot lock memory in place.
_SIGNS = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed",
    "registering memory failed with cudaerror: 2",
)  # fmt: skip
#: Parts of messages of gloo and NCCL when another process does not take part in a collective.
_CONNECTIONS = ("gloo/transport/", "ncclRemoteError")
#: Parts of their messages when that process has not ended, as far as known.
_LATE = ("Timed out waiting", "Connection timed out", "No route to host")


class ExpectedError(Exception):
    """An error whose message names the cause and the remedy; a command prints it without its traceback.

    Attributes:
        is_resumable: whether a run that it ends, on all ranks together, can continue from its last complete step.
    """

    is_resumable = False

    def __str__(self) -> str:
        return spelled(super().__str__())


class InputError(ValueError):
    """An input that cannot be used; a plain ValueError is one of the kind `invalid`."""

    def __init__(self, message: str, kind: Kind = "invalid") -> None:  # the default is for pickle
        super().__init__(message)
        self.kind = kind

    def __str__(self) -> str:
        return spelled(super().__str__())


class FileError(OSError, InputError):
    """A file that cannot be used; an OSError, too, so that callers handle it like one of the system."""

    def __init__(self, message: str, kind: Kind = "unreadable", cause: OSError | None = None) -> None:
        """Args: the message, its kind, and the system's error if there was one."""
        OSError.__init__(self, message)
        self.kind = kind
        self.errno, self.strerror = (None, None) if cause is None else (cause.errno, cause.strerror)

    def __str__(self) -> str:
        return spelled(str(self.args[0]))


class MissingFileError(FileError, FileNotFoundError):
    """A file that does not exist."""


def error_kind(error: BaseException) -> Kind:
    """Return the kind of problem that an error reports; `invalid` unless it has another."""
    return cast(Kind, getattr(error, "kind", "invalid"))


def user_message(error: BaseException) -> str | None:
    """Return the sentence that a command prints for an expected error, or None for errors that need a traceback."""
    if isinstance(error, ExpectedError):
        return str(error)
    if isinstance(error, InputError) and getattr(error, "errno", None) not in _DISK_ERRORS:
        return str(error)
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CONNECTIONS):
        return _lost_connection(str(error))
    is_disk_error = isinstance(error, OSError) and error.errno in _DISK_ERRORS
    # Libraries written in other languages have only the text.
    if not is_disk_error and _FULL not in str(error):
        return None
    text = str(error)
    if isinstance(error, OSError) and error.strerror and not isinstance(error, FileError):
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return f"{text}; use a directory on a disk that can be written"
    if "free up space" in text.lower():
        return text  # it has the remedy already
    return f"{text}. Earlier checkpoints are intact: free up space, and continue with --resume_from_checkpoint latest"


def _lost_connection(message: str) -> str:
    """Return the sentence for a collective that failed because of another process."""
    # Gloo begins with a position in its source and ends with advice.
    message = re.sub(r"^\[/\S*\] ", "", message.splitlines()[0]).partition(". This is typically")[0].rstrip(".")
    is_late = any(sign in message for sign in _LATE)
    problem = (
        "does not answer: it hangs, or its machine is lost"
        if is_late
        else ("has ended: see its own output for the reason")
    )
    return (
        f"another process of the run {problem} ({message}). Checkpoints are intact: start the command on all machines "
        "again, and with --resume_from_checkpoint auto it continues from the newest one"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error comes from an allocator, on a device or on the host, without free memory."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from accelerate.utils.memory import should_reduce_batch_size

    message = str(error).lower()
    return should_reduce_batch_size(error) or any(sign in message for sign in _SIGNS)
