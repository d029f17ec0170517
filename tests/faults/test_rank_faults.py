"""What happens to one of two ranks ends both, within seconds and with an exit code; continued, nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetrainers.utils import exit_codes


def test_a_rank_that_dies_hangs_or_fails_ends_both(train: Callable[..., Any], files: Any, tmp_path: Path) -> None:
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
    # A rank that writes nothing fails while saving.
    both = train("raise@save:rank=1", resume=True, **two)
    assert [process.wait() for process in both] == [exit_codes.FAILED] * 2
    assert all(f"saving {files.root / 'checkpoints' / 'step-3'}" in process.stderr for process in both)
    assert files.checkpoints == [1, 2]
    # So does one that cannot load its network.
    both = train("raise@load:rank=1", resume=True, **two)
    assert [process.wait() for process in both] == [exit_codes.FAILED] * 2
    assert all("loading the network failed on" in process.stderr for process in both)
    both = train(resume=True, **two)
    assert [process.wait() for process in both] == [0, 0], [process.stderr for process in both]
    undisturbed = train(output_dir=tmp_path / "undisturbed", **two)
    assert [process.wait() for process in undisturbed] == [0, 0]
    assert files.same_as(type(files)(tmp_path / "undisturbed"))
