"""A command that has ended exits soon after, whatever keeps its process, with its own exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from refusals import refused

from finetrainers.utils import faults

_STAYS = """
import atexit, ctypes, sys, threading, time
from pathlib import Path
from finetrainers.utils import exit_in_time

exit_in_time._BACKSTOP_S = 0.3
what, code, stacks = sys.argv[1:]

def stays():
    ctypes.PyDLL(None).sleep(20) if what == "no Python" else time.sleep(20)

def command():
    if stacks:
        exit_in_time.leave_stacks_in(Path(stacks))
    if what in ("atexit", "no Python"):
        atexit.register(stays)
    elif what != "nothing":
        threading.Thread(target=stays).start()
    print("results")
    if code == "raises":
        raise RuntimeError("failed")
    return int(code)

sys.exit(exit_in_time.exit_in_time(command))
"""


def start(what: str, code: str, stacks: str = "") -> subprocess.Popen[str]:
    environment = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2]), faults.PATIENCE: "0.5"}
    command = [sys.executable, "-c", _STAYS, what, code, stacks]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment, "PYTHONUNBUFFERED": ""}
    )


def test_what_hangs_at_exit_does_not_keep_a_process(tmp_path: Path) -> None:
    """Also where no Python runs any more: then the kernel ends it."""
    stacks = tmp_path / "run" / "hangs" / "rank-0.txt"
    begun = time.monotonic()
    cases = [
        ("thread", "0", 0), ("atexit", "75", 75), ("thread", "raises", 1), ("no Python", "0", -signal.SIGALRM),
        ("nothing", "0", 0),
    ]  # fmt: skip
    started = [(case, start(*case[:2], str(stacks) if case[0] == "atexit" else "")) for case in cases]
    for (what, _, expected), process in started:
        output, errors = process.communicate(timeout=30)
        assert process.returncode == expected, (what, errors)
        assert output == "results\n"
        assert ("in stays" in errors) == (what in ("thread", "no Python")), (what, errors)
    assert "in stays" in stacks.read_text()
    assert time.monotonic() - begun < 18, "none has waited for what stays"


@pytest.mark.parametrize("wrong", ["soon", "0", "-1", "nan", "inf"])
def test_patience_is_a_number_of_seconds(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults.min_hang_seconds() == 600
    monkeypatch.setenv(faults.PATIENCE, wrong)
    with refused("invalid", faults.PATIENCE, repr(wrong)):
        faults.min_hang_seconds()
