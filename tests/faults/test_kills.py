"""A process that is killed anywhere loses the steps since its last checkpoint, and the run ends as if nothing had
been."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from finetrainers.rundir.find import scan_checkpoints
from finetrainers.utils import exit_codes

#: Kills in one run, each of the process that continued after the one before; and the checkpoints that are left then.
#: A continued process saves first after the step that follows its checkpoint.
KILLS: list[tuple[str, list[int]]] = [
    ("kill@save.write:2", [1]),  # of step 2
    ("kill@backward", [1]),
    ("kill@save.seal:1", [1]),
    ("kill@save.publish:1", [1]),
    ("kill@save.prune:1", [1, 2]),
    ("kill@save.remove:1", [2, 3]),  # step 1 has lost its name, its files are still there
    ("kill@update:2", [3, 4]),  # step 4 was saved, step 5 not reached
    ("kill@save.copy:1", [3, 4]),  # a save in the background
    ("term@save.write:1", [5, 6]),  # a preemption in the middle of saving: finished; the next step is the last
    ("kill@save:2", [6, 7]),
    ("kill@resume", [6, 7]),
    ("kill@export", [7, 8]),
]


def test_a_run_that_is_killed_again_and_again_ends_like_any_other(
    train: Callable[..., Any], files: Any, straight: Any
) -> None:
    killed = train("kill@start")
    assert killed.wait() == -signal.SIGKILL
    for fault, left in KILLS:
        in_background = {"async_checkpointing": True} if "copy" in fault else {}
        killed = train(fault, resume=files.root.joinpath("checkpoints").exists(), **in_background)
        expected = exit_codes.STOPPED if fault.startswith("term") else -signal.SIGKILL
        assert killed.wait() == expected, f"{fault}\n{killed.stderr}"
        assert f"FINETRAINERS_FAULT: {fault.partition(':')[0].replace('@', ' at ')}, visit" in killed.stderr
        assert files.checkpoints == left, fault
    done = train(resume=True)
    assert done.wait() == 0, done.stderr
    assert files.same_as(straight)
    names = {path.name for path in (files.root / "checkpoints").iterdir()}
    assert names == {found.path.name for found in scan_checkpoints(files.root) if found.damage is None}, (
        "half-done directories are left"
    )
