"""Phases of a run, which differ in what takes memory: their names, and which one this process is in. Imports no torch."""

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
    """Something of this process that records by phase."""

    def enter(self, phase: str | None) -> None:
        """The process is in this phase from now on; None: outside of all."""
        ...


_listeners: list[Listener] = []
_current: str | None = None


def label(phase: str) -> str:
    """What people call a phase: `training step`."""
    return phase.replace("_", " ")


@contextmanager
def observed_by(listener: Listener) -> Iterator[None]:
    """Tell the listener of every change of the phase within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """This process is in the phase within the block, and after it again in the one before. Only for the main thread.

    An exception that leaves the block remembers the phase that it was raised in; see `phase_of`.
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


def phase_of(error: BaseException | None) -> str | None:
    """The phase that an exception, or the one that caused it, was raised in; None if in none."""
    found = None
    while error is not None:
        found = vars(error).get("phase", found)  # the cause was raised first
        error = error.__cause__
    return found


def _enter(name: str | None) -> None:
    global _current
    _current = name
    for listener in _listeners:
        listener.enter(name)
