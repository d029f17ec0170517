"""A section that outlasts its limit ends its process, and leaves every thread's stack; in real processes."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_process import Python

from finetrainers.training import watchdog
from finetrainers.training.watchdog import Watchdog
from finetrainers.utils import exit_codes
from finetrainers.utils.alive import send_heartbeat, waiting
from finetrainers.utils.backstop import Backstop
from finetrainers.utils.progress import Meter
from finetrainers.utils.running_time import RunningClock

_HANGING = """
import ctypes, sys, threading, time
from pathlib import Path
from finetrainers.training import watchdog
watchdog._BACKSTOP_S = 0.5
dog = watchdog.Watchdog(Path(sys.argv[1]), rank=3, limits={"step": 0.5, "checkpoint": None, "sampling": 1.5})
def other_thread():
    time.sleep(60)
def hanging_step():
    ctypes.PyDLL(None).sleep(30) if sys.argv[2] == "no Python" else time.sleep(30)
with dog.running():
    for _ in range(4):
        dog.enter("sampling")
        time.sleep(0.5)
    dog.enter("checkpoint")
    time.sleep(1.7)
    threading.Thread(target=other_thread, daemon=True).start()
    dog.enter("step")
    hanging_step()
"""


def test_a_hang_leaves_stacks_and_an_exit_code(tmp_path: Path, python: Python) -> None:
    """Also where the interpreter itself is blocked, by the backstop."""
    hanging = {where: python("-c", _HANGING, str(tmp_path / where), where) for where in ("Python", "no Python")}
    for where, code in (("Python", exit_codes.HUNG), ("no Python", signal.SIGVTALRM)):
        assert hanging[where].wait(25) == code, hanging[where].stderr
        stacks = (tmp_path / where / "rank-3.txt").read_text()
        assert "in hanging_step" in stacks
        assert "in other_thread" in stacks
        if where == "Python":
            assert re.search(r"'step' .* 0\.5 s \(--step_timeout\)", stacks)
            assert str(tmp_path / where / "rank-3.txt") in hanging[where].stderr


_SUSPENDED = """
import sys, time
from pathlib import Path
from finetrainers.training import watchdog
watchdog._BACKSTOP_S = 0.5
dog = watchdog.Watchdog(Path(sys.argv[1]), rank=3, limits={"step": 2})
with dog.running():
    dog.enter("step")
    print("in a step", flush=True)
    for _ in range(int(sys.argv[2])):  # as work does, it continues where it was
        time.sleep(0.1)
"""


def test_a_suspended_process_is_not_ended_when_it_continues(tmp_path: Path, python: Python) -> None:
    """Neither by the watchdog's thread nor by the backstop; what hangs after that is."""
    ends = {tenths: python("-c", _SUSPENDED, str(tmp_path / tenths), tenths) for tenths in ("10", "600")}
    for process in ends.values():
        process.wait_until(lambda process=process: bool(process.stdout))
        process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    for process in ends.values():
        process.send_signal(signal.SIGCONT)
    assert ends["10"].wait(25) == 0, ends["10"].stderr
    assert ends["600"].wait(25) == exit_codes.HUNG


_BESIDE = """
import sys, threading, time
from pathlib import Path
from finetrainers.training.watchdog import Watchdog
dog = Watchdog(Path(sys.argv[1]), rank=3, limits={"step": 60, "checkpoint": 1.5})
def save(seconds):
    with dog.in_thread("checkpoint"):
        time.sleep(seconds)
with dog.running():
    for seconds in (0.8, 0.8, 30):
        thread = threading.Thread(target=save, args=(seconds,))
        thread.start()
        while thread.is_alive():
            dog.enter("step")
            time.sleep(0.05)
"""


@pytest.mark.rotating
def test_a_thread_has_a_clock_of_its_own(tmp_path: Path, python: Python) -> None:
    """Steps that go by do not set it back; each save starts it anew."""
    done = python("-c", _BESIDE, str(tmp_path / "hangs"))
    assert done.wait(25) == exit_codes.HUNG, done.stderr
    stacks = (tmp_path / "hangs" / "rank-3.txt").read_text()
    assert re.search(r"'checkpoint' .* 1\.5 s \(--checkpoint_timeout\)", stacks)
    assert "in save" in stacks


_ALIVE = """
import sys, time
from pathlib import Path
from finetrainers.utils.progress import Meter
from finetrainers.training.watchdog import Watchdog
from finetrainers.utils.alive import waiting
dog = Watchdog(Path(sys.argv[1]), rank=3, limits={"loading": 0.6, "encoding": 0.6, "step": 0.6})
with dog.running():
    dog.enter("encoding")
    with Meter("encoded", "clips", enabled=False) as meter:
        for done in range(8):
            time.sleep(0.2)
            meter(done, 8)
    dog.enter("loading")
    with waiting():  # for others, which load in their turns
        time.sleep(1)
    print("alive", flush=True)
    dog.enter("step")
    with waiting():  # nobody is to be waited for that long within a step
        time.sleep(30)
"""


@pytest.mark.rotating
def test_what_goes_on_and_what_waits_its_turn_is_not_ended(tmp_path: Path, python: Python) -> None:
    done = python("-c", _ALIVE, str(tmp_path / "hangs"))
    assert done.wait(25) == exit_codes.HUNG, done.stderr
    assert done.stdout == "alive\n"
    assert re.search(r"'step' .* 0\.6 s \(--step_timeout\)", done.stderr)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A watchdog of limits that adapt, and its clock: `now`, and after how many seconds it warns and ends."""
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(RunningClock, "now", lambda _: found.now)
    limits = {**dict.fromkeys(watchdog.SECTIONS), "sampling": 0, "checkpoint": 90}
    found.dog = Watchdog(tmp_path / "hangs", rank=0, limits=limits)

    def limits_of(clock: str = "main") -> tuple[float, float]:
        return found.dog._clocks[clock].warn_at - found.now, found.dog._clocks[clock].end_at - found.now

    def work(kind: object, seconds: float) -> tuple[float, float]:
        found.dog.begin_work(kind)
        limits = limits_of()
        found.now += seconds
        return limits

    found.limits, found.work = limits_of, work
    with found.dog.running():
        yield found


NONE = (math.inf, math.inf)


def test_a_limit_that_was_not_set_follows_the_median_of_three_occurrences(clock: SimpleNamespace) -> None:
    clock.dog.enter("step")
    assert [clock.work("small", seconds) for seconds in (100, 1, 100)] == [NONE] * 3
    assert clock.work("small", 1000) == (1000, 2000)
    # What once took so long and went well may take as long again. Other sizes are no measure.
    assert clock.work("small", 1) == (1000, 2000)
    assert clock.work("large", 50_000) == NONE
    assert clock.work(None, 50_000) == NONE
    for _ in range(50):
        clock.work("quick", 1)
    assert clock.work("quick", 1) == (300, 600)  # never ended under ten minutes, and never without a report before


def test_limits_of_the_user_are_plain_and_zero_is_none(clock: SimpleNamespace) -> None:
    for section, ends in (("checkpoint", 90), ("sampling", math.inf)):
        for _ in range(9):
            clock.dog.enter(section, "save")
            assert clock.limits() == (math.inf, ends)
            clock.now += 1
    # They hold from the beginning of the section, however many kinds of work it has; a heartbeat is progress.
    clock.dog.enter("checkpoint")
    clock.now += 50
    clock.dog.begin_work("more")
    assert clock.limits() == (math.inf, 40)
    clock.dog.on_heartbeat()
    assert clock.limits() == (math.inf, 90)


def test_waiting_for_others_is_no_time_of_a_section_and_heartbeats_are_progress(clock: SimpleNamespace) -> None:
    clock.dog.enter("step")
    for _ in range(4):
        clock.dog.begin_work("size")
        clock.now += 60
        with waiting():
            assert clock.limits() == NONE
            clock.now += 5000
    clock.work("size", 60)
    assert clock.limits() == (540, 1140)
    send_heartbeat()
    assert clock.limits() == (600, 1200)
    # Where each heartbeat ends a piece of work, limits follow these pieces, and other work begins anew.
    clock.dog.enter("encoding")
    for noun in ("captions", "clips", "captions"):
        with Meter("encoded", noun, enabled=False) as meter:
            for done in range(1, 4):
                assert clock.limits() == NONE
                clock.now += 200
                meter(done, 5)
            assert clock.limits() == (2000, 4000)
        assert clock.limits() == NONE
    # What happens once in a run, or depends on a network, is never ended; what closes a finished run is, soon.
    for section, limits in {"loading": NONE, "uploading": NONE, "exporting": NONE, "closing": (math.inf, 600)}.items():
        for _ in range(5):
            clock.dog.enter(section)
            assert clock.limits() == limits
            clock.now += 1


def test_a_host_program_does_not_exit_as_if_its_work_was_done(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    limits = dict.fromkeys(watchdog.SECTIONS)
    command = Watchdog(tmp_path / "command", rank=0, limits=limits, owns_process=True)
    with command.running():
        for dog in (command, clock.dog):
            monkeypatch.setattr(dog, "_dump", lambda message: None)
            dog.exit_code = exit_codes.DONE
            dog.enter("closing")
            dog._give_up(dog._clocks["main"])
    assert codes == [exit_codes.DONE, exit_codes.HUNG]


def test_a_run_in_time_leaves_nothing(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    limits = {"loading_timeout": 60, "step_timeout": 60, "checkpoint_timeout": 60, "sampling_timeout": 60}
    done = run(**options(train_steps=2, checkpointing_steps=1, async_checkpointing=True, **limits))
    assert not (done.root / "hangs").exists()


def test_sections_are_known_by_name(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path / "hangs", rank=0, limits={"step": None})
    with dog.running():
        dog.enter("step")
        with pytest.raises(KeyError):
            dog.enter("steps")
    assert not (tmp_path / "hangs").exists()


def test_entering_a_section_again_leaves_the_backstop_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set rarely. It strikes one to two backstops after the limit, whatever is entered when."""
    armed: list[float] = []
    monkeypatch.setattr(Backstop, "set", lambda _, left: armed.append(left))
    now = 0.0
    monkeypatch.setattr(RunningClock, "now", lambda _: now)
    dog = Watchdog(tmp_path / "hangs", rank=0, limits={"step": 600.0, "sampling": 60.0, "checkpoint": None})
    strikes = math.inf
    with dog.running():
        for section, entered in [*(("step", 0.1 * n) for n in range(500)), ("sampling", 60.0), ("checkpoint", 61.0)]:
            now, count = entered, len(armed)
            dog.enter(section)
            strikes = strikes if len(armed) == count else now + armed[-1]
            limit = dog.limits[section]
            if limit is None:
                assert strikes == math.inf
            else:
                assert now + limit + 10 <= strikes + 1e-9 <= now + limit + 20 + 1e-8
        assert len(armed) == 5 + 1 + 1  # every 10 s of the 50
    assert len(armed) == 5 + 1 + 1
