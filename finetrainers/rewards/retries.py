"""Repeated calls of a reward that fails for a reason that may pass, such as a server that restarts or is busy."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.client import IncompleteRead
from typing import Any

from finetrainers.utils.alive import send_heartbeat
from finetrainers.utils.text import plural, printable, shortened

logger = logging.getLogger(__name__)

#: Seconds for which a call is repeated by default: a server restarts and loads its weights in minutes.
PATIENCE = 600.0
_LONGEST_PAUSE = 60.0  # seconds between two attempts
_LONGEST_LINE = 200  # characters of an error
#: Answers of a server, or of one before it, that pass: too many requests, a gateway without its server, busy, too slow.
TEMPORARY_STATUSES = frozenset({429, 502, 503, 504})
_UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
#: Classes of lost connections in aiohttp, httpx and openai, which are not errors of the system.
_LIBRARIES = frozenset({"ClientConnectionError", "TransportError", "APIConnectionError"})


class RetriesExhausted(ConnectionError):
    """The failure of a call that was repeated in vain, and is not repeated by callers."""


@dataclass
class _Call:
    """A call that is repeated: its failed attempts, and the time of the first of them."""

    failures: int = 0
    since: float = 0.0


class Retries:
    """Repetition of the calls of one reward, one after another or at the same time.

    Once a call was repeated in vain, the next ones are not repeated until one succeeds.
    """

    def __init__(
        self, subject: str, *, seconds: float = PATIENCE, number: int | None = None, pause: float = 1.0,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """Args:
        subject: what is called, for messages.
        seconds: how long a call is repeated after its first failure.
        number: maximum repetitions of a call within this time, or None for any number.
        pause: seconds before the first repetition; each next pause is twice as long, up to a minute.
        clock, sleep: time in seconds, and how to let it pass in calls that are not async.
        """
        self._subject, self._seconds, self._number, self._pause = subject, seconds, number, pause
        self._clock, self._sleep = clock, sleep
        self._is_down = self._is_exhausted = False
        self._logged_until = 0.0  # of several calls that fail at the same time, one is logged

    def call(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns.

        Raises:
            RetriesExhausted: it was repeated in vain.
        """
        call = _Call()
        while True:
            try:
                outputs = function()
            except Exception as error:
                pause = self._next_pause(call, error)
            else:
                self._succeed(call)
                return outputs
            self._sleep(pause)

    async def wait_for(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Return what an async function returns; see `call`."""
        call = _Call()
        while True:
            try:
                outputs = await function()
            except Exception as error:
                pause = self._next_pause(call, error)
            else:
                self._succeed(call)
                return outputs
            await asyncio.sleep(pause)

    def _next_pause(self, call: _Call, error: Exception) -> float:
        """Return the seconds until the next attempt, and log them; raise the error if there is none."""
        if not may_pass(error):
            raise error
        now = self._clock()
        call.since = call.since if call.failures else now
        call.failures += 1
        left = call.since + self._seconds - now
        failure = printable(shortened(f"{type(error).__name__}: {error}".removesuffix(": "), _LONGEST_LINE))
        if self._is_exhausted or left <= 0 or (self._number is not None and call.failures > self._number):
            self._is_exhausted = True
            end = f" (repeated for {now - call.since:.0f} s, {call.failures} attempts)" if call.failures > 1 else ""
            raise RetriesExhausted(f"{self._subject}: {failure}{end}") from error
        pause = min(self._pause * 2.0 ** min(call.failures - 1, 30), _LONGEST_PAUSE, left)
        self._is_down = True
        if now >= self._logged_until:
            self._logged_until = now + pause
            logger.warning("%s: %s; retrying in %.3g s, for %.0f s at most", self._subject, failure, pause, left)
        send_heartbeat()  # the run waits on purpose, for a limited time
        return pause

    def _succeed(self, call: _Call) -> None:
        if self._is_down and call.failures:
            waited = self._clock() - call.since
            logger.info("%s works again after %.3g s and %s", self._subject, waited, plural(call.failures, "failure"))
            self._is_down = False
        self._is_exhausted = False


def may_pass(error: BaseException) -> bool:
    """Return whether a call may succeed later: the connection failed, the answer was late, or the server was busy.

    If the error itself does not decide, its causes do.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RetriesExhausted):
            return False
        status = _http_status(cause)
        if status is not None:
            return status in TEMPORARY_STATUSES
        if isinstance(cause, ConnectionError | TimeoutError | IncompleteRead | socket.gaierror):
            return True
        if getattr(cause, "errno", None) in _UNREACHABLE or _LIBRARIES & {cls.__name__ for cls in type(cause).__mro__}:
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def _http_status(error: BaseException) -> int | None:
    """Return the status of the answer that an error reports, where common libraries store it, or None."""
    places = [
        (error, "status_code"),
        (error, "status"),
        (error, "code"),
        (error.__dict__.get("response"), "status_code"),
    ]
    values = [getattr(owner, name, None) for owner, name in places]
    return next((value for value in values if isinstance(value, int) and 400 <= value < 600), None)
