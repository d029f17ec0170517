"""The processes that tests start behave as an interpreter that is started from a shell, and the server that forks them
is fit to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from real_process import Python, server_pid


def test_a_program_is_a_process_of_its_own(python: Python, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(__name__, sys.argv, os.getcwd(), os.environ['COLOR'], os.getpgid(0) == os.getpid())\n"
        "print('said', file=sys.stderr)\nsys.exit(7)\n"
    )
    done = python("script.py", "--a", "b", cwd=tmp_path, COLOR="red")
    assert done.wait() == done.returncode == 7
    assert done.stdout.splitlines()[-1] == f"__main__ ['script.py', '--a', 'b'] {tmp_path} red True"
    assert done.stderr == "said\n"
    assert python("-c", "raise ValueError('no')").wait() == 1
    assert python("-m", "finetrainers", "--version").wait() == 0
    assert "COLOR" not in os.environ


def test_signals_reach_it_and_all_that_it_started(python: Python) -> None:
    program = "import os, time\nprint(os.fork(), flush=True)\ntime.sleep(60)\n"
    process = python("-c", program)
    process.wait_until(lambda: len(process.stdout.splitlines()) == 2)
    process.signal_group(signal.SIGINT)
    assert process.wait() == 1
    assert "KeyboardInterrupt" in process.stderr
    process = python("-c", program)
    process.wait_until(lambda: len(process.stdout.splitlines()) == 2)
    process.kill()
    assert process.returncode == -signal.SIGKILL


def test_a_launchers_processes_are_forks_of_the_server(python: Python, tmp_path: Path) -> None:
    inner = (
        "import os, sys\nprint(sys.argv, os.environ['COLOR'], os.getcwd(), 'preloaded' in sys.modules)\nsys.exit(3)\n"
    )
    outer = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-u', '-c', {inner!r}, 'a b']\n"
        f"some = [subprocess.Popen(command, cwd={str(tmp_path)!r}, env={{**os.environ, 'COLOR': 'red'}}) for _ in "
        f"range(2)]\n"
        "print([one.wait() for one in some])\n"
    )
    said = python.launch("-c", outer, timeout=60).splitlines()
    assert [line for line in said if line.startswith("[")] == ["[3, 3]", *[f"['-c', 'a b'] red {tmp_path} True"] * 2]


def test_the_server_has_no_threads_that_a_fork_would_lose() -> None:
    assert len(list(Path(f"/proc/{server_pid()}/task").iterdir())) == 1
