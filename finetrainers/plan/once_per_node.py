"""What every process of a machine needs and one can find out: its first process reads, the others are told. Imports no torch.

Checking a run reads its data, the model's files and its checkpoints, before the processes have joined and with nothing but the
launcher's variables to tell them of each other. So the first one answers on a Unix socket whose name all can work out. It is an
abstract one: there is no file that a killed run could leave, and it is gone with its process.
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
from finetrainers.utils.failures import ExpectedError, sentence_of
from finetrainers.utils.json_objects import from_json, to_json
from finetrainers.utils.launch import launched_local_rank, launched_processes, launched_rank, local_world_size

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: The launcher's variables that tell one launch from another.
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
#: For the first process to appear, and for the others once it has the answer; processes of a launch start within seconds.
_APPEAR_S = 60.0
_POLL_S = 0.02
#: Between signs of life of the first process while it works, and without one for so long, it counts as stopped.
_BEAT_S, _SILENCE_S = 1.0, 600.0
_LENGTH = struct.Struct(">Q")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_calls = itertools.count()


class FirstFailed(ExpectedError, RuntimeError):
    """The first process of this machine has failed; its own output says why."""


def once_per_node(make: Callable[[], T], question: Any, *, timeout_s: float) -> T:
    """`make()`, called by the first process of each machine alone; every process must ask the same questions in order.

    Where processes cannot be told (no Linux, a launcher that does not say which are of one machine, a first one that does not
    appear), or ask something else, each calls it.

    Args:
        make: gives what `json_objects` can write, or raises.
        question: what decides over the answer, likewise.
        timeout_s: for the answer.

    Raises:
        ConfigError: as the first process has raised it.
        FirstFailed: another error of the first process, or its end.
    """
    others = _others()
    if others < 1 or sys.platform != "linux":
        return make()
    address, asked = _address(next(_calls)), hashlib.sha256(to_json(question).encode()).hexdigest()
    if launched_local_rank() == 0:
        return _answer(address, asked, make, others=others)
    with waiting():
        told = _ask(address, timeout_s=timeout_s)
    if told is None:
        return make()
    of, outcome, value = from_json(told)
    if of != asked:  # each process has options of its own
        return make()
    if outcome == "refused":
        raise ConfigError(value)
    if outcome == "failed":
        raise FirstFailed(f"the first process of this machine has failed: {value}")
    return value


def _others() -> int:
    """Further processes of this machine, if the launcher says so."""
    said = "LOCAL_RANK" in os.environ and not os.environ.keys().isdisjoint(("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))
    return local_world_size() - 1 if said and launched_processes() > 1 else 0


def _address(call: int) -> str:
    """The name of a call's socket; abstract names begin with NUL."""
    launch = [os.environ.get(name, "") for name in _LAUNCH]
    names = (*launch, os.getuid(), launched_rank() - launched_local_rank(), call)
    return f"\0finetrainers-{hashlib.sha256(repr(names).encode()).hexdigest()}"


def _answer(address: str, asked: str, make: Callable[[], T], *, others: int) -> T:
    """Call `make`, and send its outcome to the other processes of the machine, and signs of life until then."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(address)
    except OSError as error:
        server.close()
        logger.warning("each process of this machine reads the data and the model's files itself: %s", error.strerror)
        return make()
    server.listen(others)
    outcome: list[bytes] = []
    known, knows = socket.socketpair()
    # Not a daemon: a process that has failed ends when the others know.
    threading.Thread(target=_serve, args=(server, known, outcome, others), name="tells-the-node").start()
    with knows:  # closed without an outcome, such as after Ctrl-C, the connections are closed
        try:
            value = make()
            outcome.append(to_json((asked, "made", value)).encode())
        except Exception as error:
            told = ("refused", error.problems) if isinstance(error, ConfigError) else ("failed", _words(error))
            outcome.append(to_json((asked, *told)).encode())
            raise
        return value


def _words(error: Exception) -> str:
    return sentence_of(error) or f"{type(error).__name__}: {error}"


def _serve(server: socket.socket, known: socket.socket, outcome: list[bytes], others: int) -> None:
    """Send every process an empty message each `_BEAT_S`, then the outcome, or close the connections if there is none.

    Args:
        known: readable once nothing is added to `outcome` any more. Processes that connect `_APPEAR_S` later get nothing.
    """
    connections: list[socket.socket] = []
    served, waited_for, deadline = 0, [server, known], math.inf
    with ExitStack() as stack, server, known:
        while served < others and time.monotonic() < deadline:
            ready = select.select(waited_for, [], [], _BEAT_S)[0]
            if known in ready:
                waited_for, deadline = [server], time.monotonic() + _APPEAR_S
            if server in ready:
                connection, _ = server.accept()
                if _is_ours(connection):
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
    """Return what the first process sends, or None if it does not appear.

    Raises:
        FirstFailed: it has ended, takes longer than `timeout_s`, or gave no sign of life for `_SILENCE_S`.
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
            if not _is_ours(connection):
                return None
            return _answer_of(connection, timeout_s=timeout_s)


def _answer_of(connection: socket.socket, *, timeout_s: float) -> bytes:
    """Return the first message of a connection that is not empty; errors are those of `_ask`."""
    deadline, length = time.monotonic() + timeout_s, 0
    try:
        while not length:
            connection.settimeout(max(_POLL_S, min(_SILENCE_S, deadline - time.monotonic())))
            (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
            if not length and time.monotonic() > deadline:
                raise TimeoutError
        connection.settimeout(_SILENCE_S)
        return _received(connection, length)
    except TimeoutError:
        if time.monotonic() > deadline:
            raise FirstFailed(f"the first process of this machine was not ready after {timeout_s:g} s") from None
        message = f"the first process of this machine has been stopped, or hangs: no sign of life for {_SILENCE_S:g} s"
        raise FirstFailed(message) from None
    except OSError:
        raise FirstFailed("the first process of this machine has ended: its own output says why") from None


def _received(connection: socket.socket, length: int) -> bytes:
    """So many bytes.

    Raises:
        OSError: there are not as many.
    """
    found = bytearray()
    while len(found) < length:
        some = connection.recv(min(length - len(found), 1 << 20))
        if not some:
            raise ConnectionResetError
        found += some
    return bytes(found)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is of the same user, by the kernel."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user == os.getuid()
