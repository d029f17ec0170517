"""Python programs in processes of their own that start at once: forks of a server that has imported the libraries.

`python("-m", "finetrainers", "train", ...)`, `python("train.py", ...)` and `python("-c", code)` do what the interpreter
does with these arguments: another process, in a process group of its own, with the environment and directory given, its
output in files, ended by signals, with an exit code. Only the interpreter's start and the imports, seconds each time,
are the server's. The server runs no tensor operation, so there are no threads that a fork would lose.
`python.launch(...)` is such a process whose `sys.executable` asks for forks, too, so that a launcher's processes cost
as little. What imports no torch starts by `subprocess` as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")
#: A directory for questions; `_become` takes the stand-in next to it for the interpreter.
_REQUESTS = "PYTHON_FORKS_REQUESTS"
_STAND_IN = rf"""#!/usr/bin/env bash
# An interpreter that asks the test for a fork, and ends with its exit code.
request=$(mktemp -d "${_REQUESTS}/XXXXXX")
printf '%s\0' "$@" > "$request/arguments"
env -0 > "$request/environment"
pwd > "$request/directory"
echo $$ > "$request/asker"
mkfifo "$request/exit"
touch "$request/asked"
read -r code < "$request/exit"
exit "$code"
"""


class RealProcess:
    """A program that has been started; killed with its whole process group by `kill`."""

    def __init__(
        self, arguments: list[str], *, cwd: Path, env: Mapping[str, str], log: Path, like: int | None = None
    ) -> None:
        """Args:
        arguments: as after `python` on a command line.
        cwd, env: its directory and its whole environment.
        log: `LOG.out` and `LOG.err` get its output.
        like: a process whose output and network are those of this one; `log` stays empty.
        """
        self._output, self._errors = log.with_suffix(".out"), log.with_suffix(".err")
        streams = (str(self._output), str(self._errors))
        if like is not None:
            streams = (f"/proc/{like}/fd/1", f"/proc/{like}/fd/2")
        network = None if like is None else f"/proc/{like}/ns/net"
        self._process = _CONTEXT.Process(target=_become, args=(arguments, str(cwd), dict(env), streams, network))
        start_server()
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._output.read_text() if self._output.exists() else ""

    @property
    def stderr(self) -> str:
        return self._errors.read_text() if self._errors.exists() else ""

    @property
    def returncode(self) -> int | None:
        """Its exit code, -N if signal N ended it, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Its exit code, once it has ended.

        Raises:
            TimeoutError: it has not.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"still running after {timeout:g} s\n{self.stdout[-2000:]}\n{self.stderr[-4000:]}")
        return code

    def wait_until(self, condition: Callable[[], bool], timeout: float = TIMEOUT_S) -> None:
        """Return when the condition holds; fail if it ends before, or takes too long."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.returncode is None, f"it has ended with {self.returncode}\n{self.stderr[-4000:]}"
            assert time.monotonic() < deadline, f"waited too long\n{self.stderr[-4000:]}"
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """End it and all that it has started."""
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.join(10)


class Python:
    """`python(*arguments, cwd=..., **environment)` starts a program; those that still run when the test ends are
    killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[RealProcess] = []

    def __call__(self, *arguments: str, cwd: Path = ROOT, like: int | None = None, **environment: str) -> RealProcess:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment}
        log = self.directory / f"process-{len(self.started)}"
        process = RealProcess([str(argument) for argument in arguments], cwd=cwd, env=env, log=log, like=like)
        self.started.append(process)
        return process

    def ranks(self, count: int, *arguments: str, **environment: str) -> list[RealProcess]:
        """As many processes with what a launcher would tell them, on CPUs: gloo joins them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        company = {
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
        return [
            self(*arguments, **{**company, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment})
            for rank in range(count)
        ]

    def launch(self, *arguments: str, timeout: float, **environment: str) -> str:
        """Run a launcher to its end, and fork what it starts with its own interpreter; what all of them have written.

        Raises:
            TimeoutError: it has not ended.
        """
        requests = self.directory / f"launch-{len(self.started)}"
        requests.mkdir()
        _stand_in(requests).write_text(_STAND_IN)
        _stand_in(requests).chmod(0o755)
        launcher = self(*arguments, **environment, **{_REQUESTS: str(requests)})
        running: dict[Path, RealProcess] = {}
        written = [launcher]
        deadline = time.monotonic() + timeout
        while launcher.returncode is None:
            written += self._answer(requests, running)
            if time.monotonic() > deadline:
                raise TimeoutError("".join(one.stderr[-3000:] for one in written))
            time.sleep(0.02)
        return "".join(one.stdout + one.stderr for one in written)

    @contextlib.contextmanager
    def stand_ins(self, command: str, *before: str) -> Iterator[dict[str, str]]:
        """Within the block, forks take the place of a command and of what it starts; the environment that this needs.

        Args:
            command: its name on the PATH.
            before: arguments of the interpreter that do the same, in front of the command's own.
        """
        requests = self.directory / f"stand-ins-{len(self.started)}"
        requests.mkdir()
        stand_in, named = _stand_in(requests), self.directory / f"{requests.name}-path" / command
        named.parent.mkdir()
        for path, text in ((stand_in, _STAND_IN), (named, f'#!/bin/sh\nexec "{stand_in}" {shlex.join(before)} "$@"\n')):
            path.write_text(text)
            path.chmod(0o755)
        ended = threading.Event()
        thread = threading.Thread(target=self._answer_until, args=(ended, requests))
        thread.start()
        try:
            yield {_REQUESTS: str(requests), "PATH": f"{named.parent}{os.pathsep}{os.environ['PATH']}"}
        finally:
            ended.set()
            thread.join()

    def _answer_until(self, ended: threading.Event, requests: Path) -> None:
        running: dict[Path, RealProcess] = {}
        while not ended.wait(0.02):
            self._answer(requests, running, like_asker=True)

    def _answer(
        self, requests: Path, running: dict[Path, RealProcess], *, like_asker: bool = False
    ) -> list[RealProcess]:
        """Fork what was asked for, and hand over the exit codes of what has ended; the processes that were started."""
        started = []
        for asked in requests.glob("*/asked"):
            asked.unlink()
            running[asked.parent] = self._asked_for(asked.parent, like_asker=like_asker)
            started.append(running[asked.parent])
        for request, process in [*running.items()]:
            if (code := process.returncode) is not None:
                del running[request]
                with contextlib.suppress(OSError):  # the launcher has killed who asked
                    answer = os.open(request / "exit", os.O_WRONLY | os.O_NONBLOCK)
                    os.write(answer, f"{code % 256}\n".encode())
                    os.close(answer)
        return started

    def _asked_for(self, request: Path, *, like_asker: bool) -> RealProcess:
        arguments = (request / "arguments").read_text().split("\0")[:-1]
        environment = dict(entry.split("=", 1) for entry in (request / "environment").read_text().split("\0")[:-1])
        return self(
            *(one for one in arguments if one != "-u"),
            cwd=Path((request / "directory").read_text().strip()),
            like=int((request / "asker").read_text()) if like_asker else None,
            **environment,
        )

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            process.kill()


def _stand_in(requests: Path) -> Path:
    return requests.with_name(f"{requests.name}-python")


def server_pid() -> int:
    """The server's process."""
    start_server()
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def start_server() -> None:
    """Start the server if it does not run; what it imports lies in this folder and in the repository."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent), *filter(None, [before])])
    try:
        _CONTEXT.set_forkserver_preload(["preloaded", __name__])
        forkserver.ensure_running()
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _become(arguments: list[str], cwd: str, env: dict[str, str], streams: tuple[str, str], network: str | None) -> None:
    """In the forked process: be `python ARGUMENTS`."""
    assert "preloaded" in sys.modules, "the server did not import what it should have"
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if network is not None:
        with open(network) as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    for stream, path in enumerate(streams, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    if _REQUESTS in env:
        sys.executable = str(_stand_in(Path(env[_REQUESTS])))
    import torch

    # After a fork torch makes a new thread pool when one is asked for; two threads that ask at once get none.
    # `finetrainers run` forks its stages, once more from here.
    make_pool = functools.partial(torch.set_num_threads, torch.get_num_threads())
    make_pool()
    os.register_at_fork(after_in_child=make_pool)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    first, *rest = arguments
    paths = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]
    if first in ("-c", "-m"):
        what, *rest = rest
        sys.argv, sys.path = [first, *rest], [cwd, *paths, *sys.path]
        if first == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path = arguments, [str((Path(cwd) / first).parent), *paths, *sys.path]
        runpy.run_path(first, run_name="__main__")
