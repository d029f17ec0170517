"""What happens to one of two ranks ends both, within seconds and with an exit code; continued, nothing is lost."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetrainers.utils import exit_codes


def test_a_rank_that_dies_or_hangs_ends_both(train: Callable[..., Any], files: Any, tmp_path: Path) -> None:
    two = {"ranks": 2, "train_steps": 4}
    # A rank is killed: the other hears of it at the next exchange.
    first, second = train("kill@step:3:rank=1", **two)
    assert second.wait() == -signal.SIGKILL
    assert first.wait() == exit_codes.FAILED
    assert files.checkpoints == [1, 2]
    # A rank hangs: the other waits for as long as the process group allows.
    first, second = train("hang@step:1:rank=1", resume=True, nccl_timeout=3, **two)
    assert first.wait(20) == exit_codes.FAILED
    assert files.checkpoints == [1, 2]
    second.kill()
    both = train(resume=True, **two)
    assert [process.wait() for process in both] == [0, 0], [process.stderr for process in both]
    undisturbed = train(output_dir=tmp_path / "undisturbed", **two)
    assert [process.wait() for process in undisturbed] == [0, 0]
    assert files.same_as(type(files)(tmp_path / "undisturbed"))


@pytest.mark.rotating
def test_a_rank_that_fails_ends_both(train: Callable[..., Any], files: Any) -> None:
    """It writes nothing, and fails while saving; or it cannot load its network."""
    two = {"ranks": 2, "train_steps": 4}
    both = train("raise@save:2:rank=1", **two)
    assert [process.wait() for process in both] == [exit_codes.FAILED] * 2
    assert all(f"saving {files.root / 'checkpoints' / 'step-2'}" in process.stderr for process in both)
    assert files.checkpoints == [1]
    both = train("raise@load:rank=1", resume=True, **two)
    assert [process.wait() for process in both] == [exit_codes.FAILED] * 2
    assert all(re.search(r"network failed on .*rank 1", process.stderr) for process in both)
    assert files.checkpoints == [1]


@pytest.mark.rotating
def test_a_rank_that_is_stopped_ends_the_wait_of_the_others_and_one_at_work_does_not(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    """In a save, where they may wait for a day; the store that they look into is of rank 0."""
    faults = {0: "hang@save.write:1:rank=0", 1: "hang@save:1:rank=1"}
    runs = {
        busy: train(fault, ranks=2, train_steps=2, nccl_timeout=3, output_dir=tmp_path / f"stopped-{busy}")
        for busy, fault in faults.items()
    }
    for busy, both in runs.items():
        both[busy].wait_until(lambda process=both[busy]: "hang at save" in process.stderr)
    # All of them are suspended for a while, as by a scheduler or a laptop's lid; then one works for longer than the
    # timeout.
    for number, seconds in ((signal.SIGSTOP, 4), (signal.SIGCONT, 3.2)):
        for process in (process for both in runs.values() for process in both):
            process.send_signal(number)
        time.sleep(seconds)
    assert [process.returncode for both in runs.values() for process in both] == [None] * 4
    for busy, both in runs.items():
        both[busy].send_signal(signal.SIGSTOP)
    for busy, both in runs.items():
        assert both[1 - busy].wait(25) == exit_codes.FAILED, both[1 - busy].stderr
        assert f"(rank {busy}: silent for" in both[1 - busy].stderr or busy == 0
        assert "does not answer" in both[1 - busy].stderr
        both[busy].kill()
