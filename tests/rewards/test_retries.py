"""Calls of rewards that are repeated: when, how long, and how often."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from email.message import Message
from http.client import IncompleteRead, RemoteDisconnected
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from torch import Tensor

from finetrainers.config.rewards import RewardEntry
from finetrainers.rewards.retries import PATIENCE, Retries, RetriesExhausted, may_pass
from finetrainers.rewards.reward_set import RewardError, RewardSet
from finetrainers.utils.alive import register_watchdog


class Clock:
    """Time that passes in pauses only; it is a watchdog, too, and counts heartbeats."""

    def __init__(self) -> None:
        self.now, self.pauses, self.beats = 100.0, list[float](), 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def on_heartbeat(self) -> None:
        self.beats += 1

    def begin_work(self, *_: Any, **__: Any) -> None: ...

    def pause(self, waiting: bool) -> None: ...


def failing(times: float, error: Exception) -> Callable[[], str]:
    """Return a function that fails so many times."""
    calls = iter(range(10**6))

    def call() -> str:
        if next(calls) < times:
            raise error
        return "scores"

    return call


def test_a_call_is_repeated_for_ten_minutes_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    retries = Retries("judge", clock=clock, sleep=clock.sleep)
    with (
        register_watchdog(clock),
        pytest.raises(RetriesExhausted, match=r"judge: ConnectionError: gone .*600 s, 16 attempts"),
    ):
        retries.call(failing(10**6, ConnectionError("gone")))
    assert clock.pauses[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert sum(clock.pauses) == PATIENCE == 600
    assert clock.beats == len(clock.pauses)  # so that the watchdog does not end the run first
    assert caplog.text.count("judge: ConnectionError: gone; retrying in ") == len(clock.pauses)


def test_what_comes_back_is_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level("INFO", logger="finetrainers"):
        assert Retries("judge", clock=clock, sleep=clock.sleep).call(failing(6, TimeoutError())) == "scores"
    assert sum(clock.pauses) == 63
    assert " after 63 s" in caplog.text


def test_after_a_vain_wait_calls_are_made_once_until_one_succeeds() -> None:
    clock = Clock()
    retries = Retries("judge", seconds=5.0, clock=clock, sleep=clock.sleep)
    gone = failing(99, ConnectionError())
    for _ in range(2):
        with pytest.raises(RetriesExhausted):
            retries.call(gone)
        assert clock.pauses == [1, 2, 2]
    for times in (0, 1):
        assert retries.call(failing(times, ConnectionError())) == "scores"
    assert clock.pauses == [1, 2, 2, 1]


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class Answered(Exception):
    """An error of requests or httpx."""

    def __init__(self, status: int) -> None:
        self.response = type("Response", (), {"status_code": status})()


class ClientConnectionError(Exception):
    """As in aiohttp, where it is not an error of the system."""


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionRefusedError(), True),
        (RemoteDisconnected("closed"), True),
        (IncompleteRead(b""), True),
        (asyncio.TimeoutError(), True),
        (socket.gaierror(-3, "unresolved"), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (HTTPError("http://x", 503, "busy", Message(), None), True),
        (HTTPError("http://x", 404, "no", Message(), None), False),
        (Answered(429), True),
        (Answered(401), False),
        (ClientConnectionError(), True),
        (chained(RuntimeError("failed"), ConnectionResetError()), True),
        (chained(Answered(400), ConnectionResetError()), False),
        (RetriesExhausted(), False),
        (FileNotFoundError(), False),
        (ValueError(), False),
        (torch.cuda.OutOfMemoryError(), False),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_only_failures_that_may_pass_are_repeated(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
    clock = Clock()
    retries = Retries("judge", clock=clock, sleep=clock.sleep)
    if passes:
        assert retries.call(failing(1, error)) == "scores"
    else:
        with pytest.raises(type(error)):
            retries.call(failing(1, error))
    assert clock.pauses == [1.0] * passes


#: Clips for which the judge loses its connection.
LOST = [2.0, 4.0]


def judge(videos: Tensor, prompts: Sequence[str]) -> list[float]:
    (score,) = (videos.mean((1, 2, 3, 4)) * 8).tolist()
    if score in LOST:
        LOST.remove(score)
        raise ConnectionResetError("restarting")
    return [score]


async def async_judge(videos: Tensor, prompts: Sequence[str]) -> list[float]:
    await asyncio.sleep(0)
    return judge(videos, prompts)


@pytest.mark.parametrize("function", [judge, async_judge])
def test_rewards_that_lose_a_connection_are_asked_again(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some of many calls in flight fail; a reward sets its patience."""
    monkeypatch.setattr(f"{__name__}.LOST", [2.0, 4.0])
    monkeypatch.setattr(function, "patience", 0.05, raising=False)
    name = f"{__name__}:{function.__name__}"
    videos = torch.arange(6.0).view(6, 1, 1, 1, 1).expand(6, 2, 3, 2, 2) / 8
    panel = RewardSet([RewardEntry(name=name, batch_size=1)])
    assert panel.score(videos, [""] * 6, fps=8.0).heads[name].raw.tolist() == list(range(6))
    assert LOST == []
    monkeypatch.setattr(function, "patience", 0.0)
    monkeypatch.setattr(f"{__name__}.LOST", [2.0])
    with pytest.raises(RewardError, match="restarting"):
        RewardSet([RewardEntry(name=name, batch_size=1)]).score(videos, [""] * 6, fps=8.0)
