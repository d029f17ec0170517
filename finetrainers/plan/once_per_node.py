"""Work that one process does for all processes of a machine: the first one does it, and sends the answer to the others.

Checking a run reads its data, the model's files and its checkpoints, before the processes have joined, when they know
of each other only by the launcher's variables. So the first one answers on a Unix socket whose name all can compute. It
is an abstract socket: there is no file that a killed run could leave, and it disappears with its process. Imports no
torch.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from finetrainers.config.errors import ConfigError
from finetrainers.utils.alive import waiting
from finetrainers.utils.failures import ExpectedError, user_message
from finetrainers.utils.json_objects import from_json, to_json
from finetrainers.utils.launch import launched_local_rank, launched_processes, launched_rank, local_world_size

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: The launcher's variables that distinguish launches.
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
#: Time for the first process to appear, and for the others once it has the answer: a launch takes seconds.
_APPEAR_S = 60.0
_POLL_S = 0.02
#: Interval of the first process's signs of life while it works; without one for `_SILENCE_S` it counts as stopped.
_BEAT_S, _SILENCE_S, _PERIODS = 1.0, 600.0, 10
_LENGTH = struct.Struct(">Q")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_calls = itertools.count()


class LocalRankZeroError(ExpectedError, RuntimeError):
    """Failure of the first process of this machine; its own output has the reason."""


def once_per_node(make: Callable[[], T], question: Any, *, timeout_s: float) -> T:
    """Return `make()`, called only by each machine's first process; all processes ask the same questions in order.

    Each process calls it if they cannot be distinguished (no Linux, a launcher that does not name the processes of one
    machine, a first process that does not appear), or if their questions differ.

    Args:
        make: function whose value `json_objects` can write, or which raises.
        question: all that decides the answer; `json_objects` must be able to write it.
        timeout_s: for the answer.

    Raises:
        ConfigError: the one that the first process raised.
        LocalRankZeroError: another error of the first process, or its end.
    """
    # Further processes of this machine, if the launcher names them.
    is_stated = "LOCAL_RANK" in os.environ and not os.environ.keys().isdisjoint(("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))
    others = local_world_size() - 1 if is_stated and launched_processes() > 1 else 0
    if others < 1 or sys.platform != "linux":
        return make()
    address, digest = _address(next(_calls)), hashlib.sha256(to_json(question).encode()).hexdigest()
    if launched_local_rank() == 0:
        return _answer(address, digest, make, others=others)
    with waiting():
        message = _ask(address, timeout_s=timeout_s)
    if message is None:
        return make()
    answered, outcome, value = from_json(message)
    if answered != digest:  # each process has its own options
        return make()
    if outcome == "refused":
        raise ConfigError(value)
    if outcome == "failed":
        raise LocalRankZeroError(f"local rank 0 failed: {value}")
    return value


def _address(call: int) -> str:
    """Return the name of a call's socket; abstract names begin with NUL."""
    launch = [os.environ.get(name, "") for name in _LAUNCH]
    names = (*launch, os.getuid(), launched_rank() - launched_local_rank(), call)
    return f"\0finetrainers-{hashlib.sha256(repr(names).encode()).hexdigest()}"


def _answer(address: str, digest: str, make: Callable[[], T], *, others: int) -> T:
    """Call `make`, send signs of life to the other processes of the machine meanwhile, and then its outcome."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(address)
    except OSError as error:
        server.close()
        logger.warning("each process of this machine reads the data and the model's files itself: %s", error.strerror)
        return make()
    server.listen(others)
    outcome: list[bytes] = []
    finished, finisher = socket.socketpair()
    # Not a daemon: a failed process ends after the others have its error.
    threading.Thread(target=_serve, args=(server, finished, outcome, others), name="tells-the-node").start()
    with finisher:  # closed without an outcome, such as after Ctrl-C, the connections are closed
        try:
            value = make()
            outcome.append(to_json((digest, "made", value)).encode())
        except Exception as error:
            message = user_message(error) or f"{type(error).__name__}: {error}"
            result = ("refused", error.problems) if isinstance(error, ConfigError) else ("failed", message)
            outcome.append(to_json((digest, *result)).encode())
            raise
        return value


def _serve(server: socket.socket, finished: socket.socket, outcome: list[bytes], others: int) -> None:
    """Send every process an empty message each `_BEAT_S`, then the outcome, or close the connections if there is none.

    Args:
        finished: readable once `outcome` is final. Processes that connect more than `_APPEAR_S` later get nothing.
    """
    connections: list[socket.socket] = []
    served, sources, deadline = 0, [server, finished], math.inf
    with ExitStack() as stack, server, finished:
        while served < others and time.monotonic() < deadline:
            ready = select.select(sources, [], [], _BEAT_S)[0]
            if finished in ready:
                sources, deadline = [server], time.monotonic() + _APPEAR_S
            if server in ready:
                connection, _ = server.accept()
                if _is_same_user(connection):
                    connections.append(stack.enter_context(connection))
                else:
                    connection.close()
            if (is_last := deadline < math.inf) and not outcome:
                break
            message = outcome[0] if is_last else b""
            for connection in connections:
                with suppress(OSError):  # it has ended
                    connection.settimeout(_SILENCE_S)
                    connection.sendall(_LENGTH.pack(len(message)) + message)
                if is_last:
                    connection.close()
                    served += 1
            if is_last:
                connections.clear()


def _ask(address: str, *, timeout_s: float) -> bytes | None:
    """Return the answer of the first process, or None if that process does not appear.

    Raises:
        LocalRankZeroError: it has ended, takes longer than `timeout_s`, or gave no sign of life for `_SILENCE_S`.
    """
    deadline = time.monotonic() + _APPEAR_S
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(address)
            except (ConnectionRefusedError, BlockingIOError):
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
                continue
            if not _is_same_user(connection):
                return None
            return _read_answer(connection, timeout_s=timeout_s)


def _read_answer(connection: socket.socket, *, timeout_s: float) -> bytes:
    """Return the first non-empty message of a connection; errors are those of `_ask`."""
    deadline, length = time.monotonic() + timeout_s, 0
    try:
        while not length:
            _wait_readable(connection, deadline)
            (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
            if not length and time.monotonic() > deadline:
                raise TimeoutError
        connection.settimeout(_SILENCE_S)
        return _receive(connection, length)
    except TimeoutError:
        if time.monotonic() > deadline:
            raise LocalRankZeroError(f"local rank 0 was not ready after {timeout_s:g} s") from None
        message = f"local rank 0 has been stopped, or hangs: no sign of life for {_SILENCE_S:g} s"
        raise LocalRankZeroError(message) from None
    except OSError:
        raise LocalRankZeroError("local rank 0 has ended: see its own output for the reason") from None


def _wait_readable(connection: socket.socket, deadline: float) -> None:
    """Wait for bytes of the first process, in periods: while all processes are suspended, only one of them passes.

    Raises:
        TimeoutError: none came before the deadline, or for `_SILENCE_S`.
    """
    for _ in range(_PERIODS):
        period_s = max(_POLL_S, min(_SILENCE_S / _PERIODS, deadline - time.monotonic()))
        if select.select([connection], [], [], period_s)[0]:
            return
        if time.monotonic() > deadline:
            break
    raise TimeoutError


def _receive(connection: socket.socket, length: int) -> bytes:
    """Receive `length` bytes.

    Raises:
        OSError: the connection ended before.
    """
    content = bytearray()
    while len(content) < length:
        chunk = connection.recv(min(length - len(content), 1 << 20))
        if not chunk:
            raise ConnectionResetError
        content += chunk
    return bytes(content)


def _is_same_user(connection: socket.socket) -> bool:
    """Return whether the other end belongs to the same user, by the kernel."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user == os.getuid()
