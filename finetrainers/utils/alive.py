"""Signs of life: what works for long says that it goes on, and whoever watches this process with a time limit hears it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Listener(Protocol):
    """What watches this process."""

    def beat(self) -> None:
        """The work in hand has come a step further."""
        ...

    def pause(self, waiting: bool) -> None:
        """This process begins to wait for others, or has waited."""
        ...


_listeners: list[Listener] = []


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Within the block, it hears what happens in this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def beat() -> None:
    """Say that the work in hand goes on; cheap."""
    for listener in _listeners:
        listener.beat()


@contextmanager
def waiting() -> Iterator[None]:
    """Within the block this process waits for others, each of which is watched itself."""
    for listener in _listeners:
        listener.pause(True)
    try:
        yield
    finally:
        for listener in _listeners:
            listener.pause(False)
