"""Limits per client of a reward server: fair queueing and a minimum transfer rate."""

from __future__ import annotations

import io
import math
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import Condition


class FairQueue:
    """A semaphore that is fair between clients: a free slot goes to the client with the fewest, then the longest wait.

    A lock has no order, and a client with many connections would get most of it.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[str, int]] = []
        self._numbers = count()
        self._changed = Condition()

    @contextmanager
    def place(self, client: str, *, patience: float = math.inf) -> Iterator[None]:
        """Hold a slot within the block.

        Args:
            client: name of the client, such as its address.
            patience: seconds to wait for a slot.

        Raises:
            TimeoutError: no slot became free for this client.
        """
        ticket = (client, next(self._numbers))
        with self._changed:
            self._waiting.append(ticket)
            timeout = None if math.isinf(patience) else patience
            is_admitted = self._changed.wait_for(lambda: self._free > 0 and self._next() == ticket, timeout)
            self._waiting.remove(ticket)
            if is_admitted:
                self._free -= 1
                self._held[client] += 1
            self._changed.notify_all()
            if not is_admitted:
                raise TimeoutError(f"no place in {patience:g} s")
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._held[client] -= 1
                self._held += Counter()  # forget clients without a slot
                self._changed.notify_all()

    def _next(self) -> tuple[str, int]:
        return min(self._waiting, key=lambda ticket: (self._held[ticket[0]], ticket[1]))


class TimedReader(io.RawIOBase):
    """A reader with a minimum transfer rate: a slower client is disconnected after a grace period.

    A timeout for single reads would let a client hold a connection forever with a byte every few seconds.
    """

    def __init__(self, connection: socket.socket, *, grace: float, rate: float) -> None:
        """Args:
        connection: to read from.
        grace: seconds before the first byte must have arrived.
        rate: bytes a second that must arrive from then on, on average.
        """
        self._connection, self._grace, self._rate = connection, grace, rate
        self.begin()

    def begin(self) -> None:
        """Restart the clock for the next request."""
        self._deadline = time.monotonic() + self._grace

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("too slow")
        old_timeout = self._connection.gettimeout()
        self._connection.settimeout(remaining)
        try:
            received = self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(old_timeout)
        self._deadline += received / self._rate
        return received
