"""Backstop of the watchdog: a small process that ends its parent where no Python runs in it, so that no thread can.

It runs this file as a program, and counts seconds down. A timer within the process would strike as soon as a suspended
process continues; here, seconds in which the parent or both are suspended do not count. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import select
import signal
import subprocess
import sys
import time

#: Signal that makes the parent write its stacks and exit, and its exit code. Hardly a library uses it.
_SIGNAL = getattr(signal, "SIGVTALRM", None) if hasattr(signal, "SIGKILL") else None  # Windows has neither
_SLICE_S = 0.5
#: Seconds that it has for that, until it is killed.
_ENDING_S = 10.0


class Backstop:
    """Countdown for this process, where the system can limit it (Linux, macOS)."""

    def __init__(self, stacks: int) -> None:
        """Args:
        stacks: descriptor of the file for the stacks of all threads.
        """
        self._stacks = stacks
        self._process: subprocess.Popen[bytes] | None = None
        self._is_armed = False  # whether the signal ends this process

    def set(self, left_s: float) -> None:
        """Let the process end in `left_s` seconds, or cancel that if it is infinite."""
        if not self._is_armed and left_s < math.inf and _SIGNAL is not None:
            self._is_armed, libc = True, ctypes.CDLL(None)
            # Not the default action, which the first process of a container ignores.
            libc.signal(_SIGNAL, ctypes.cast(libc._exit, ctypes.c_void_p))
            faulthandler.register(_SIGNAL, file=self._stacks, all_threads=True, chain=True)
            with contextlib.suppress(OSError):  # no more processes: the watchdog's thread remains
                # Without packages, so the interpreter of a virtual environment is not needed.
                self._process = subprocess.Popen(
                    [getattr(sys, "_base_executable", sys.executable), "-I", "-S", __file__, str(os.getpid())],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, bufsize=0,
                )  # fmt: skip
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{left_s}\n".encode())

    def close(self) -> None:
        """End the countdown."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        if self._is_armed and _SIGNAL is not None:
            faulthandler.unregister(_SIGNAL)
            ctypes.CDLL(None).signal(_SIGNAL, None)
            self._is_armed = False


def count_down(parent: int) -> None:
    """End the parent after the seconds that standard input names last; return if it has ended, or nothing is left."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):  # which reach the whole group
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    left_s = math.inf
    while os.getppid() == parent and left_s > 0:
        slice_s, started = min(_SLICE_S, left_s), time.monotonic()
        if select.select([0], [], [], slice_s)[0]:
            numbers = os.read(0, 1 << 16).split()
            if not numbers:
                return
            left_s = float(numbers[-1])
        elif not _is_suspended(parent):
            left_s -= min(time.monotonic() - started, slice_s)
    for signum, wait_s in ((_SIGNAL, _ENDING_S), (signal.SIGKILL, 0.0)):
        if signum is not None and os.getppid() == parent:
            os.kill(parent, signum)
            time.sleep(wait_s)


def _is_suspended(process: int) -> bool:
    """Return whether a process is stopped, where the system lists it (Linux)."""
    try:
        descriptor = os.open(f"/proc/{process}/stat", os.O_RDONLY)
    except OSError:
        return False
    status = os.read(descriptor, 4096)
    os.close(descriptor)
    return status.rpartition(b")")[2].split()[0] in (b"T", b"t")


if __name__ == "__main__":
    count_down(int(sys.argv[1]))
