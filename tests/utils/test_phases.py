"""Phases: nesting, listeners, and the phase that an exception was raised in."""

from __future__ import annotations

import pytest

from finetrainers.utils.phases import (
    LOADING,
    PHASES,
    REWARD,
    ROLLOUT,
    TRAINING_STEP,
    phase,
    read_phase,
    register_phase_listener,
)


class Recorded(list[str | None]):
    def enter(self, name: str | None) -> None:
        self.append(name)


def test_listeners_hear_changes_only() -> None:
    heard = Recorded()
    with phase(LOADING), register_phase_listener(heard), phase(TRAINING_STEP):
        with phase(TRAINING_STEP), phase(REWARD):
            pass
        with phase(ROLLOUT):
            pass
    assert heard == [TRAINING_STEP, REWARD, TRAINING_STEP, ROLLOUT, TRAINING_STEP, LOADING]
    assert len(set(PHASES)) == len(PHASES) == 8


def test_an_exception_remembers_the_innermost_phase_of_its_cause() -> None:
    def fail() -> None:
        try:
            with phase(REWARD):
                raise MemoryError
        except MemoryError as error:
            raise RuntimeError("out of memory") from error

    with pytest.raises(RuntimeError) as raised, phase(TRAINING_STEP), phase(ROLLOUT):
        fail()
    assert read_phase(raised.value) == REWARD
    assert read_phase(raised.value.__context__) == REWARD
    assert read_phase(ValueError()) is None
    assert read_phase(None) is None
