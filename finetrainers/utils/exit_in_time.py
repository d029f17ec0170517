"""Time limit for the exit of a process after its command has ended. Imports no torch."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from . import exit_codes
from .faults import min_hang_seconds

logger = logging.getLogger(__name__)

#: Additional seconds before the kernel's timer ends a process whose interpreter no longer runs threads.
_BACKSTOP_S = 10.0
_stacks: Path | None = None


def leave_stacks_in(file: Path) -> None:
    """Set the file for the stacks of a process that does not exit; the default is stderr."""
    global _stacks
    _stacks = file


def exit_in_time(command: Callable[[], int]) -> int:
    """Return the exit code of a command; end the process with it if it has not exited ten minutes later.

    Threads that never end, libraries that wait in their exit handlers, and drivers that do not answer keep a process,
    and what it has allocated, long after its work is done. Only for programs that exit after the command, not for
    hosts.
    """
    code = exit_codes.FAILED
    try:
        code = command()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else exit_codes.FAILED if error.code else exit_codes.DONE
        raise
    except KeyboardInterrupt:
        code = exit_codes.killed_by(signal.SIGINT)
        raise
    finally:
        _limit_exit(code)
    return code


def _limit_exit(code: int) -> None:
    limit = min_hang_seconds()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream is closed or None
            stream.flush()
    threading.Thread(target=_end, args=(code, limit), name="exit-limit", daemon=True).start()
    # Python ends its threads before libraries' exit handlers; a callback may use the timer itself.
    if hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # stderr is not a file
            faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
        signal.setitimer(signal.ITIMER_REAL, limit + _BACKSTOP_S)


def _end(code: int, limit: float) -> None:
    time.sleep(limit)
    place = "above"
    if _stacks is None:
        faulthandler.dump_traceback(all_threads=True)
    else:
        with contextlib.suppress(OSError):
            _stacks.parent.mkdir(parents=True, exist_ok=True)
            with _stacks.open("w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
            place = f"in {_stacks}"
    logger.error(
        "the command ended %g s ago, but its process does not exit; it is ended with exit code %d. The stacks are %s",
        limit, code, place,
    )  # fmt: skip
    sys.stderr.flush()
    os._exit(code)
