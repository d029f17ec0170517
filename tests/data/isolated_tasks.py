"""What a file can do to the process that decodes it."""

from __future__ import annotations

import os
import signal
import time


def misbehave(how: str) -> str:
    """Crash, hang, end, ask for memory, or answer."""
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        time.sleep(60)
    if how == "end":
        os._exit(3)
    if how == "bomb":
        try:
            return f"{len(bytearray(64 << 30))} bytes"
        except MemoryError:
            return "out of memory"
    return f"did {how}"
