"""Heartbeats: long-running work reports its progress to the watchdogs of this process."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Listener(Protocol):
    """A watchdog of this process."""

    def on_heartbeat(self) -> None:
        """Record that the running work has made progress."""
        ...

    def begin_work(self, work_key: Hashable | None, *, per_heartbeat: bool = False) -> None:
        """Begin work of another kind in this thread; see `begin_work` and `time_each_heartbeat`."""
        ...

    def pause(self, waiting: bool) -> None:
        """Start (True) or stop (False) waiting for other processes."""
        ...


_listeners: list[Listener] = []


@contextmanager
def register_watchdog(listener: Listener) -> Iterator[None]:
    """Send the heartbeats of this process to the listener within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def send_heartbeat() -> None:
    """Send a heartbeat; cheap."""
    for listener in _listeners:
        listener.on_heartbeat()


def begin_work(work_key: Hashable | None) -> None:
    """Begin work that takes about as long as other work with this `work_key`, or incomparable work if it is None."""
    for listener in _listeners:
        listener.begin_work(work_key)


@contextmanager
def time_each_heartbeat(work_key: Hashable) -> Iterator[None]:
    """End a piece of work at each heartbeat within the block; all pieces take about as long."""
    for listener in _listeners:
        listener.begin_work(work_key, per_heartbeat=True)
    try:
        yield
    finally:
        begin_work(None)


@contextmanager
def waiting() -> Iterator[None]:
    """Pause the watchdogs within the block: this process waits for others, which have their own watchdogs."""
    for listener in _listeners:
        listener.pause(True)
    try:
        yield
    finally:
        for listener in _listeners:
            listener.pause(False)
