"""Time limits for the sections of a run: one that hangs ends with its stacks on disk instead of never."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from finetrainers.utils.exit_codes import HUNG

logger = logging.getLogger(__name__)

#: How much later the interpreter's own timer strikes, which needs no Python to run. It can only exit with 1.
_BACKSTOP_S = 10.0


class Watchdog:
    """Ends this process when a section outlasts its limit, and writes down where every thread stood.

    Usage: `with watchdog.running(): ... watchdog.enter("step") ...`; entering a section leaves the one before.
    """

    def __init__(self, directory: Path, *, rank: int, limits: Mapping[str, float | None]) -> None:
        """Args:
        directory: gets `rank-N.txt` with the stacks.
        rank: of this process.
        limits: seconds that each section may take, None for any time.
        """
        self.file = directory / f"rank-{rank}.txt"
        self.limits = dict(limits)
        self._changed = threading.Condition()
        self._section = ""
        self._entered = 0.0
        self._running = False
        self._descriptor = -1

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within the block, sections are watched. Without any limit it does nothing."""
        if not any(self.limits.values()):
            yield
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Opened now: a disk that hangs later must not keep the stacks from it.
        self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._running, self._section = True, ""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            with self._changed:
                self._running = False
                self._changed.notify()
            thread.join()
            os.close(self._descriptor)
            self.file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other ranks may still have theirs there
                self.file.parent.rmdir()

    def enter(self, section: str) -> None:
        """Start the section's clock.

        Raises:
            KeyError: there is no such section.
        """
        limit = self.limits[section]
        if not self._running:
            return
        with self._changed:
            self._section, self._entered = section, time.monotonic()
            self._changed.notify()
        faulthandler.cancel_dump_traceback_later()
        if limit is not None:
            faulthandler.dump_traceback_later(limit + _BACKSTOP_S, file=self._descriptor, exit=True)

    def _watch(self) -> None:
        with self._changed:
            while self._running:
                limit = self.limits.get(self._section)
                left = None if limit is None else self._entered + limit - time.monotonic()
                if left is not None and left <= 0:
                    self._give_up()
                self._changed.wait(left)

    def _give_up(self) -> None:
        limit = self.limits[self._section]
        message = f"the section '{self._section}' took longer than its limit of {limit:g} s (--{self._section}_timeout)"
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(self._descriptor, f"{when} {socket.gethostname()} pid {os.getpid()}: {message}\n\n".encode())
        faulthandler.dump_traceback(file=self._descriptor, all_threads=True)
        logger.error("%s; the stacks are in %s", message, self.file)
        sys.stderr.flush()
        os._exit(HUNG)
