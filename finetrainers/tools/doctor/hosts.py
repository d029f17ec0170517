"""Ask machines over ssh for their facts and their clocks, all at once. Nobody is asked a question, and no answer is waited for long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.utils.files import not_there
from finetrainers.utils.text import printable, quoted

from ..sync import ASKS

#: What an answer's line begins with: a shell's start-up files may print lines of their own.
ANSWER = "finetrainers-doctor "
#: Questions, one a line on the standard input of the other machine's process.
CLOCK, FACTS, HEALTH = "clock", "facts", "health"
#: The shortest round trip of so many tells most about the clock.
_ROUND_TRIPS = 5
#: Connections at once; sshd and the local machine have limits.
_AT_ONCE = 64
_LINE_BYTES = 1 << 22
#: Seconds that a connection may take to close; its exit code says what was wrong.
_END_S = 10.0
_SSH_FAILED = 255
_NO_COMMAND = (126, 127)


@dataclass(frozen=True)
class Node:
    """A machine, and what it has said.

    Attributes:
        host: its name, as ssh takes it.
        slots: processes that the hosts file wants there.
        facts: as `host_facts` gives them; None: there are none.
        error: why there are none, and what to do.
        clock_skew_s: how far its clock is ahead of this machine's.
        round_trip_s: which bounds the error of that to its half.
    """

    host: str
    slots: int | None = None
    facts: dict[str, Any] | None = field(default=None, repr=False)
    error: str | None = None
    clock_skew_s: float | None = None
    round_trip_s: float | None = None


def read_hosts(path: Path) -> list[Node]:
    """The machines of a hosts file: `host` or `host slots=8` a line, as DeepSpeed and MPI have it; `#` begins a comment.

    Raises:
        ConfigError: it cannot be read, or lines of it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        told = not_there(path) if not path.exists() else f"cannot be read: {error}"
        raise ConfigError([Problem("--hosts", f"{path} {told}")]) from None
    nodes: dict[str, Node] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        host, *words = line.partition("#")[0].split() or [""]
        if not host:
            continue
        settings = dict(word.partition("=")[::2] for word in words)
        slots, where = settings.get("slots"), f"{path}:{number}"
        if host.startswith("-") or "=" in host:
            problems.append(Problem(where, f"{quoted(host)} is no name of a host"))
        elif settings.keys() - {"slots", "max_slots", "max-slots"} or (slots is not None and not slots.isdecimal()):
            problems.append(Problem(where, f"not understood: {quoted(line.strip())}; write `host` or `host slots=8`"))
        elif host in nodes:
            problems.append(Problem(where, f"{host} is there twice"))
        nodes[host] = Node(host, None if slots is None or not slots.isdecimal() else int(slots))
    if not nodes:
        problems.append(Problem("--hosts", f"{path} names no host; write one a line"))
    if problems:
        raise ConfigError(problems)
    return list(nodes.values())


@dataclass(frozen=True)
class Fleet:
    """How machines are asked.

    Attributes:
        rsh: the command that connects.
        python: the interpreter there.
        arguments: of the command there.
        timeout_s: until a machine that has not answered counts as dead.
        question: `FACTS`, after which clocks are compared, or `HEALTH`.
    """

    rsh: str
    python: str
    arguments: Sequence[str]
    timeout_s: float
    question: str = FACTS

    def ask(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes with what they have said; in the same order."""
        return asyncio.run(self._ask_all(nodes))

    async def _ask_all(self, nodes: Sequence[Node]) -> list[Node]:
        places = asyncio.Semaphore(_AT_ONCE)
        return list(await asyncio.gather(*(self._ask(node, places) for node in nodes)))

    def _command(self, host: str) -> list[str]:
        """What connects to a host and starts this program there, in the same folder if it is there, as on shared storage."""
        called = shlex.join([self.python, "-m", "finetrainers", *self.arguments])
        script = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {called}"
        return [*shlex.split(self.rsh), host, f"sh -c {shlex.quote(script)}"]

    async def _ask(self, node: Node, places: asyncio.Semaphore) -> Node:
        pipe = asyncio.subprocess.PIPE
        async with places:
            process = await asyncio.create_subprocess_exec(
                *self._command(node.host), stdin=pipe, stdout=pipe, stderr=pipe, limit=_LINE_BYTES,
                start_new_session=True,
            )  # fmt: skip
            assert process.stderr is not None, "it was asked for"
            errors = asyncio.ensure_future(process.stderr.read())
            try:
                return await asyncio.wait_for(_conversation(node, process, self.question), self.timeout_s)
            except asyncio.TimeoutError:
                _kill(process)
                return Node(node.host, node.slots, error=f"no answer within {self.timeout_s:g} s (--timeout)")
            except asyncio.CancelledError:  # Ctrl-C
                _kill(process)
                raise
            except (EOFError, ConnectionError, ValueError, RecursionError):
                code = await _ended(process)
                return Node(
                    node.host,
                    node.slots,
                    error=self._reason(node.host, code, (await errors).decode("utf-8", "replace")),
                )
            finally:
                await _ended(process)
                errors.cancel()

    def _reason(self, host: str, code: int, said: str) -> str:
        """Why a machine has given no facts, and what to do, by the exit code and the error output of ssh."""
        lines = [printable(line.strip()) for line in said.splitlines() if line.strip()]
        last = lines[-1] if lines else "no message"
        if (asked := next((line for line in lines if ASKS.search(line)), None)) is not None:
            return f"{asked}; let `ssh {host}` work without a question first (ssh-copy-id), or give --rsh"
        if code == _SSH_FAILED:
            return f"{last}; see whether it is up, and try `ssh {host}`"
        if code in _NO_COMMAND:
            return f"there is no {self.python} there; --python names the interpreter"
        if "No module named" in last:
            return f"{self.python} there: {last}; install finetrainers there, or give another --python"
        return f"`{self.python} -m finetrainers doctor` failed there with exit code {code}: {last}"


async def _conversation(node: Node, process: asyncio.subprocess.Process, question: str) -> Node:
    """Ask for the clock several times, then for the facts; or for the health alone.

    Raises:
        EOFError: the process has ended.
        ConnectionError: its input is closed.
        ValueError: it answers something else.
    """
    trips = []
    for _ in range(_ROUND_TRIPS if question == FACTS else 0):
        sent = time.time()
        there = float(await _answer(process, CLOCK))
        received = time.time()
        if not math.isfinite(there):
            raise ValueError("the clock is not a number")
        trips.append((received - sent, there - (sent + received) / 2))
    round_trip, skew = min(trips, default=(None, None))
    facts = _printable(json.loads(await _answer(process, question)))
    if not isinstance(facts, dict):
        raise ValueError("the facts are not a JSON object")
    return Node(node.host, node.slots, facts, clock_skew_s=skew, round_trip_s=round_trip)


def _printable(value: Any) -> Any:
    """Return JSON whose texts cannot control the terminal that they are shown on: they come from another machine."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): _printable(one) for name, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list) else value


async def _answer(process: asyncio.subprocess.Process, question: str) -> str:
    assert process.stdin is not None, "it was asked for"
    assert process.stdout is not None, "it was asked for"
    process.stdin.write(f"{question}\n".encode())
    await process.stdin.drain()
    while line := await process.stdout.readline():
        text = line.decode("utf-8", "replace")
        if text.startswith(ANSWER):
            return text.removeprefix(ANSWER)
    raise EOFError


async def _ended(process: asyncio.subprocess.Process) -> int:
    """The exit code of a process that ends by itself, or is killed after a while."""
    with contextlib.suppress(asyncio.TimeoutError):
        return await asyncio.wait_for(process.wait(), _END_S)
    _kill(process)
    return await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process with those that it has started, as ssh's ProxyCommand."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
