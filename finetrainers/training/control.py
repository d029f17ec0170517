"""Requests to a run while it trains, by signal or by a file in `control/`; all ranks give one answer."""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, NoneType
from typing import TYPE_CHECKING, Any

from finetrainers.utils.exit_codes import killed_by
from finetrainers.utils.failures import InputError
from finetrainers.utils.text import nearest

if TYPE_CHECKING:
    from finetrainers.parallel.strategy import Strategy
    from finetrainers.rundir.run_dir import RunDirectory

logger = logging.getLogger(__name__)

#: Names of files that a user may `touch` in `control/`.
COMMANDS = ("stop", "save", "sample")
#: Number of a stop by file, beyond all signal numbers.
_STOP_FILE = 1000
#: Preemption, Ctrl-C, the signal that Slurm usually sends before the time is up, and Ctrl-Break, as far as they exist.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGBREAK") if hasattr(signal, name))
#: Signals this close together count as one: Ctrl-C reaches a process from the terminal and again from its launcher.
_SAME_REQUEST_S = 1.0


class StopSignals:
    """Listener for `SIGNALS`: it records the first; a second ends the process at once, or is left to the host program.

    A thread reads the signals, so that the second is obeyed even while the main thread waits for other ranks.
    """

    def __init__(self, *, logs_signal: bool) -> None:
        """Make the listener; with `logs_signal`, this process logs the signal that it received (one rank should)."""
        self._second_exits = True
        self._forwarded: int | None = None  # the second signal, left to the host program
        self._handlers: dict[int, Any] = {}
        self._wakeup = -1
        self.logs_signal = logs_signal
        self.received: int | None = None
        self._received_at = 0.0

    @contextlib.contextmanager
    def listen(self, *, second_exits: bool = True) -> Iterator[None]:
        """Handle signals within the block, and restore the handlers after it; Python allows it in the main thread only.

        Args:
            second_exits: whether a second signal ends the process, even one that is stuck. Else the handler of the host
                program gets it: that of Ctrl-C raises KeyboardInterrupt in the main thread.

        Raises:
            ValueError: called in another thread.
        """
        self._second_exits = second_exits
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # A handler that was not installed from Python cannot be restored, so it stays.
        self._handlers = {signum: handler for signum in SIGNALS if (handler := signal.getsignal(signum)) is not None}
        self._wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for signum in self._handlers:
            signal.signal(signum, self._forward_signal)
        thread = threading.Thread(target=self._read, args=(reader,), name="stop-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(self._wakeup)
            # Not `close`: forked workers hold the same socket, and the thread would wait for them too.
            writer.shutdown(socket.SHUT_RDWR)
            thread.join()
            writer.close()
            reader.close()

    def _read(self, reader: socket.socket) -> None:
        while received := reader.recv(64):
            for signum in received:
                if signum in self._handlers:
                    self._handle_signal(signum)
                elif self._wakeup != -1:  # the host program's event loop waits for it there
                    with contextlib.suppress(OSError):
                        os.write(self._wakeup, bytes([signum]))

    def _handle_signal(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if self.received is None:
            self.received, self._received_at = signum, time.monotonic()
            if self.logs_signal:
                _end_echoed_line(signum)
                logger.warning("%s: stopping after this step, with a checkpoint; a second one stops at once", name)
        elif self._forwarded is None and time.monotonic() - self._received_at > _SAME_REQUEST_S:
            _end_echoed_line(signum)
            logger.warning("%s again: stopping at once", name)
            if self._second_exits:
                sys.stderr.flush()
                os._exit(killed_by(signum))
            self._forwarded = signum
            _send_to_main_thread(signum)  # `_forward_signal` may have been called before this was known

    def _forward_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Let the host program handle a second signal; the first one is read by the thread."""
        if self._forwarded == signum:
            signal.signal(signum, self._handlers[signum])
            signal.raise_signal(signum)


def _end_echoed_line(signum: int) -> None:
    """End the line of the terminal on which Ctrl-C has left `^C`; a live line of progress overwrites it by itself."""
    if signum == signal.SIGINT and sys.stderr is sys.__stderr__ and os.isatty(2):
        os.write(2, b"\n")


def _send_to_main_thread(signum: int) -> None:
    """Send a signal to the main thread, and interrupt the system call that it waits in, where the system can."""
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signum)
    else:
        _thread.interrupt_main(signal.Signals(signum))


class ControlFiles:
    """The directory `control/` of a run directory, which one process reads."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "control"
        self._unknown: set[str] = set()
        self._stuck: set[str] = set()  # taken, and cannot be removed

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Keep the directory within the block. Files from before were meant for an earlier process, and are removed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning(
                "%s is not a directory (%s): control files are disabled for this run", self.folder, error.strerror
            )
        self._drop("left from an earlier run")
        try:
            yield
        finally:
            self._drop("too late for this run")
            with contextlib.suppress(OSError):  # a file of the user's
                self.folder.rmdir()

    def _drop(self, reason: str) -> None:
        for command in sorted(self.take()):
            logger.warning("%s was %s; removed", self.folder / command, reason)

    def take(self) -> set[str]:
        """Return and remove the commands in the directory. One that is gone, or cannot be read, holds none."""
        try:
            present = {entry.name for entry in os.scandir(self.folder)}
        except OSError:
            return set()
        if not present:  # after nearly every step
            self._stuck, self._unknown = set(), set()
            return present
        self._stuck &= present
        for name in sorted(present - set(COMMANDS) - self._unknown):
            logger.warning("ignoring unknown control file %s; valid names: %s", self.folder / name, ", ".join(COMMANDS))
        self._unknown = present - set(COMMANDS)
        commands = (present & set(COMMANDS)) - self._stuck
        for command in commands:
            self._remove(self.folder / command)
        return commands

    def _remove(self, path: Path) -> None:
        """Remove a command, which may be a directory by mistake. A command that stays is not taken a second time."""
        try:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        except OSError as error:
            self._stuck.add(path.name)
            logger.warning("%s is accepted as a command, but cannot be removed (%s)", path, error.strerror)


class Requests:
    """Requests that the trainer has still to fulfill, the same on every rank.

    Attributes:
        stop: name of the signal, file or guard that requested the end of the run, or None.
        finish: reason of a callback for ending the run with results, as after its last step, or None.
        save: whether a checkpoint was requested.
        sample: whether samples were requested.
    """

    def __init__(self, *, run_dir: RunDirectory, parallel: Strategy) -> None:
        self.signals = StopSignals(logs_signal=parallel.is_main)
        self.stop: str | None = None
        self.finish: str | None = None
        self.save = False
        self.sample = False
        self._pending = [0, 0, 0]  # see `collect_pending`
        self._run_dir = run_dir
        self._parallel = parallel
        self._files = ControlFiles(run_dir.root) if parallel.is_main else None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            ValueError: there is no such request, or it is not a reason or a bool.
        """
        requests = {"stop": (str, NoneType), "finish": (str, NoneType), "save": (bool,), "sample": (bool,)}
        if name in requests and not isinstance(value, requests[name]):
            expected = "True or False" if bool in requests[name] else "the reason as a string"
            raise InputError(f"requests.{name}: expected {expected}, got {value!r}")
        if not (name in requests or name == "signals" or name.startswith("_")):
            raise InputError(f"requests have no {name!r}{nearest(name, requests)}", "unknown")
        super().__setattr__(name, value)

    def watched(self) -> AbstractContextManager[None]:
        """Watch for files within the block, which is the training."""
        return contextlib.nullcontext() if self._files is None else self._files.watched()

    def collect_pending(self) -> list[int]:
        """Return this rank's requests since the last `apply` (stop, save, sample) as integers; ranks take the maximum.

        Rank 0 reads the control files; every rank receives signals. Nothing here waits for a device.
        """
        files = self._files.take() if self._files is not None else set()
        stop = self.signals.received or (_STOP_FILE if "stop" in files else 0)
        now = (stop, int("save" in files), int("sample" in files))
        self._pending = list(map(max, self._pending, now))
        return self._pending

    def request_stop(self, who: str) -> None:
        """Stop the run with a checkpoint at the next place where it can be resumed; every rank must call it."""
        if self.stop is None:
            self.stop = who
            self._run_dir.event("stop_requested", by=who)

    def apply(self, agreed: Sequence[int]) -> None:
        """Apply the agreed requests, the maximum over ranks; every rank must call it after each step."""
        stop, save, sample = agreed
        self._pending = [0, 0, 0]
        if stop and self.stop is None:
            self.stop = "control/stop" if stop == _STOP_FILE else signal.Signals(stop).name
            self._run_dir.event("stop_requested", by=self.stop)
        for name, is_requested in (("save", save), ("sample", sample)):
            if is_requested:
                setattr(self, name, True)
                self._run_dir.event(f"{name}_requested", by=f"control/{name}")
