"""What every process of a machine needs and one can find out: its first process reads, the others are told. Imports no torch.

Checking a run reads its data, the model's files and its checkpoints, before the processes have joined and with nothing but the
launcher's variables to tell them of each other. So the first one answers on a Unix socket whose name all can work out. It is an
abstract one: there is no file that a killed run could leave, and it is gone with its process.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
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
    """Call `make`, and tell the others what came of it."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(address)
        except OSError as error:
            logger.warning(
                "each process of this machine reads the data and the model's files itself: %s", error.strerror
            )
            return make()
        server.listen(others)  # who comes while this one works waits in the queue
        try:
            value = make()
        except Exception as error:
            told = ("refused", error.problems) if isinstance(error, ConfigError) else ("failed", _words(error))
            _serve(server.dup(), to_json((asked, *told)), others)
            raise
        _serve(server.dup(), to_json((asked, "made", value)), others)
        return value


def _words(error: Exception) -> str:
    return sentence_of(error) or f"{type(error).__name__}: {error}"


def _serve(server: socket.socket, text: str, others: int) -> None:
    """Tell so many processes, in a thread. It is no daemon: also one that has failed ends when the others know."""
    told = text.encode()

    def work() -> None:
        with server:
            server.settimeout(_APPEAR_S)
            served = 0
            while served < others:
                try:
                    connection, _ = server.accept()
                except OSError:  # they do not come
                    return
                with connection:
                    if not _is_ours(connection):
                        continue
                    served += 1
                    try:
                        connection.settimeout(None)
                        connection.sendall(_LENGTH.pack(len(told)) + told)
                    except OSError:  # it has ended
                        continue

    threading.Thread(target=work, name="tells-the-node").start()


def _ask(address: str, *, timeout_s: float) -> bytes | None:
    """What the first process says; None if it does not appear.

    Raises:
        FirstFailed: it has ended, or takes too long.
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
            connection.settimeout(timeout_s)
            try:
                (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
                return _received(connection, length)
            except TimeoutError:
                raise FirstFailed(f"the first process of this machine was not ready after {timeout_s:g} s") from None
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
