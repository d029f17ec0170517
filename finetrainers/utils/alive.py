"""Heartbeats: long-running work reports its progress to the watchdogs of this process."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Listener(Protocol):
    """A watchdog of this process."""

    def beat(self) -> None:
        """Record that the running work has made progress."""
        ...

    def work(self, kind: Hashable | None, *, by_beats: bool = False) -> None:
        """Begin work of another kind in this thread; see `work` and `counted`."""
        ...

    def pause(self, waiting: bool) -> None:
        """Start (True) or stop (False) waiting for other processes."""
        ...


_listeners: list[Listener] = []


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Send the heartbeats of this process to the listener within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def beat() -> None:
    """Send a heartbeat; cheap."""
    for listener in _listeners:
        listener.beat()


def work(kind: Hashable | None) -> None:
    """Begin work that takes about as long as other work of its `kind`, or incomparable work if `kind` is None."""
    for listener in _listeners:
        listener.work(kind)


@contextmanager
def counted(kind: Hashable) -> Iterator[None]:
    """End a piece of work at each heartbeat within the block; all pieces take about as long."""
    for listener in _listeners:
        listener.work(kind, by_beats=True)
    try:
        yield
    finally:
        work(None)


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
