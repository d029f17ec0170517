"""Phases of a run, which differ in their memory use: their names, and the phase of this process. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LOADING = "loading"
ENCODING_TEXT = "encoding_text"
ENCODING_CLIPS = "encoding_clips"
TRAINING_STEP = "training_step"
VALIDATION = "validation"
ROLLOUT = "rollout"
REWARD = "reward"
CHECKPOINT = "checkpoint"
#: All phases, in the order in which a run first enters them. The estimate and the measured memory have these names.
PHASES = (LOADING, ENCODING_TEXT, ENCODING_CLIPS, ROLLOUT, REWARD, TRAINING_STEP, CHECKPOINT, VALIDATION)


class Listener(Protocol):
    """An object of this process that records by phase."""

    def enter(self, phase: str | None) -> None:
        """Enter a phase, or leave all phases if it is None."""
        ...


_listeners: list[Listener] = []
_current: str | None = None


def label(phase: str) -> str:
    """Return the title of a phase: `training step`."""
    return phase.replace("_", " ")


@contextmanager
def register_phase_listener(listener: Listener) -> Iterator[None]:
    """Report every change of the phase within the block to the listener."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Enter the phase within the block, and the previous one after it. Only for the main thread.

    An exception that leaves the block keeps the phase that it was raised in; see `read_phase`.
    """
    assert name in PHASES, name
    outer = _current
    if name != outer:
        _enter(name)
    try:
        yield
    except BaseException as error:
        vars(error).setdefault("phase", name)
        raise
    finally:
        if name != outer:
            _enter(outer)


def read_phase(error: BaseException | None) -> str | None:
    """Return the phase that an exception, or its cause, was raised in, or None if in none."""
    raised_in = None
    while error is not None:
        raised_in = vars(error).get("phase", raised_in)  # the cause was raised first
        error = error.__cause__
    return raised_in


def _enter(name: str | None) -> None:
    global _current
    _current = name
    for listener in _listeners:
        listener.enter(name)
