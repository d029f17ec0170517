"""Ask machines over ssh for their facts and their clocks, all at once.

No user is asked for input, and no answer is awaited for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.utils.reading import parse_json, read_text
from finetrainers.utils.text import printable, quoted, shortened

from ..sync import login_problem

#: Beginning of an answer's line: a shell's start-up files may print other lines.
ANSWER = "finetrainers-doctor "
#: Questions, one per line on the standard input of the other machine's process.
CLOCK, FACTS, HEALTH = "clock", "facts", "health"
#: Round trips to measure: the shortest one bounds the clock's error best.
_ROUND_TRIPS = 5
#: Simultaneous connections; sshd and the local machine have limits.
_AT_ONCE = 64
_LINE_BYTES = 1 << 22
#: Seconds that a connection may take to close; its exit code shows the failure.
_END_S = 10.0
_SLOTS = re.compile(r"[0-9]{1,5}")
_SSH_FAILED = 255
_NO_COMMAND = (126, 127)


@dataclass(frozen=True)
class Node:
    """Machine with its answers.

    Attributes:
        host: its name for ssh.
        slots: processes that the hosts file requests there.
        facts: as `host_facts` returns them, or None if there are none.
        error: why there are none, and the remedy.
        clock_skew_s: seconds that its clock is ahead of this machine's.
        round_trip_s: twice the maximum error of `clock_skew_s`.
    """

    host: str
    slots: int | None = None
    facts: dict[str, Any] | None = field(default=None, repr=False)
    error: str | None = None
    clock_skew_s: float | None = None
    round_trip_s: float | None = None


def read_hosts(path: Path) -> list[Node]:
    """Return the machines of a hosts file.

    It has `host` or `host slots=8` in each line, as for DeepSpeed and MPI; `#` begins a comment.

    Raises:
        ConfigError: the file or some of its lines cannot be read.
    """
    try:
        lines = read_text(path).splitlines()
    except ValueError as error:
        raise ConfigError([Problem.from_error("--hosts", error)]) from None
    nodes: dict[str, Node] = {}
    problems = []
    for line_number, line in enumerate(lines, 1):
        host, *assignments = line.partition("#")[0].split() or [""]
        if not host:
            continue
        settings = dict(assignment.partition("=")[::2] for assignment in assignments)
        slots, where = settings.get("slots", ""), f"{path}:{line_number}"
        if host.startswith("-") or "=" in host:
            problems.append(Problem(where, f"{shortened(quoted(host))} is not a host name"))
        elif settings.keys() - {"slots", "max_slots", "max-slots"} or not _SLOTS.fullmatch(settings.get("slots", "1")):
            problems.append(
                Problem(where, f"cannot parse {shortened(quoted(line.strip()))}; write `host` or `host slots=8`")
            )
        elif host in nodes:
            problems.append(Problem(where, f"duplicate host {host}", "duplicate"))
        nodes[host] = Node(host, int(slots) if _SLOTS.fullmatch(slots) else None)
    if not nodes:
        problems.append(Problem("--hosts", f"{path} names no host; write one per line", "required"))
    if problems:
        raise ConfigError(problems)
    return list(nodes.values())


@dataclass(frozen=True)
class HostGroup:
    """Settings for asking machines.

    Attributes:
        rsh: the command that connects.
        python: the interpreter there.
        arguments: of the command there.
        timeout_s: time after which a machine without an answer counts as dead.
        question: `FACTS`, after which clocks are compared, or `HEALTH`.
    """

    rsh: str
    python: str
    arguments: Sequence[str]
    timeout_s: float
    question: str = FACTS

    def ask(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes with their answers, in the same order."""

        async def ask_all() -> list[Node]:
            semaphore = asyncio.Semaphore(_AT_ONCE)
            return await asyncio.gather(*(self._ask(node, semaphore) for node in nodes))

        return asyncio.run(ask_all())

    def _command(self, host: str) -> list[str]:
        """Return the command that connects to a host and starts this program there.

        It starts in the same folder if that exists there, as on shared storage.
        """
        command = shlex.join([self.python, "-m", "finetrainers", *self.arguments])
        script = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {command}"
        return [*shlex.split(self.rsh), host, f"sh -c {shlex.quote(script)}"]

    async def _ask(self, node: Node, semaphore: asyncio.Semaphore) -> Node:
        pipe = asyncio.subprocess.PIPE
        async with semaphore:
            process = await asyncio.create_subprocess_exec(
                *self._command(node.host), stdin=pipe, stdout=pipe, stderr=pipe, limit=_LINE_BYTES,
                start_new_session=True,
            )  # fmt: skip
            assert process.stderr is not None, "it was asked for"
            errors = asyncio.ensure_future(process.stderr.read())
            try:
                return await asyncio.wait_for(_converse(node, process, self.question), self.timeout_s)
            except asyncio.TimeoutError:
                _kill(process)
                return replace(node, error=f"no answer within {self.timeout_s:g} s (--timeout)")
            except asyncio.CancelledError:  # Ctrl-C
                _kill(process)
                raise
            except (EOFError, ConnectionError, ValueError, RecursionError):
                code = await _wait_for_end(process)
                error = self._describe_failure(node.host, code, (await errors).decode("utf-8", "replace"))
                return replace(node, error=error)
            finally:
                await _wait_for_end(process)
                errors.cancel()

    def _describe_failure(self, host: str, code: int, output: str) -> str:
        """Return why a machine has no facts, and the remedy, by the exit code and the error output of ssh."""
        lines = [printable(line.strip()) for line in output.splitlines() if line.strip()]
        last = lines[-1] if lines else "no message"
        if (problem := login_problem(lines, host)) is not None:
            return problem
        if code == _SSH_FAILED:
            return f"{last}; check that it is up, and try `ssh {host}`"
        if code in _NO_COMMAND:
            return f"{self.python} not found there; set --python to the interpreter"
        if "No module named" in last:
            return f"{self.python} there: {last}; install finetrainers there, or set another --python"
        return f"`{self.python} -m finetrainers doctor` failed there with exit code {code}: {last}"


async def _converse(node: Node, process: asyncio.subprocess.Process, question: str) -> Node:
    """Ask for the clock several times, then for the facts; or for the health alone.

    Raises:
        EOFError: the process has ended.
        ConnectionError: its input is closed.
        ValueError: it answers something else.
    """
    trips = []
    for _ in range(_ROUND_TRIPS if question == FACTS else 0):
        sent = time.time()
        remote_time = float(await _request(process, CLOCK))
        received = time.time()
        if not math.isfinite(remote_time):
            raise ValueError("the clock is not a number")
        trips.append((received - sent, remote_time - (sent + received) / 2))
    round_trip, skew = min(trips, default=(None, None))
    facts = _make_printable(parse_json(await _request(process, question)))
    if not isinstance(facts, dict):
        raise ValueError("the facts are not a JSON object")
    return replace(node, facts=facts, clock_skew_s=skew, round_trip_s=round_trip)


def _make_printable(value: Any) -> Any:
    """Return JSON whose strings cannot control the terminal that displays them: they come from another machine."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): _make_printable(inner) for name, inner in value.items()}
    return [_make_printable(inner) for inner in value] if isinstance(value, list) else value


async def _request(process: asyncio.subprocess.Process, question: str) -> str:
    assert process.stdin is not None, "it was asked for"
    assert process.stdout is not None, "it was asked for"
    process.stdin.write(f"{question}\n".encode())
    await process.stdin.drain()
    while line := await process.stdout.readline():
        text = line.decode("utf-8", "replace")
        if text.startswith(ANSWER):
            return text.removeprefix(ANSWER)
    raise EOFError


async def _wait_for_end(process: asyncio.subprocess.Process) -> int:
    """Return the exit code of a process that ends by itself, or is killed after a while."""
    with contextlib.suppress(asyncio.TimeoutError):
        return await asyncio.wait_for(process.wait(), _END_S)
    _kill(process)
    return await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process with those that it has started, such as ssh's ProxyCommand."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
