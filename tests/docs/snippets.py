"""What the pages show as code, taken out of them and run: blocks, and a shell whose programs are forks of the test
server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from real_process import Python

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/**/README.md")])
#: Programs that the shell hands to the server; `bash` and its tools run as they are.
PROGRAMS = ("accelerate", "deepspeed", "finetrainers", "python", "torchrun")
#: First words of the commands in tables.
COMMANDS = {*PROGRAMS, "bash", "hf", "pip", "HOSTS=nodes.txt"}
_TIMEOUT_S = 300.0  # of a block; a busy machine is many times slower
_STAND_IN = r"""#!/usr/bin/env bash
# Asks the test to run a program, and waits for its exit code.
request=$(mktemp -d "$SNIPPET_REQUESTS/XXXXXX")
printf '%s\0' "${0##*/}" "$@" > "$request/arguments"
env -0 > "$request/environment"
pwd > "$request/directory"
mkfifo "$request/exit"
mv "$request" "$request.asked"
read -r code < "$request.asked/exit"
cat "$request.asked/output"
exit "$code"
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"


def page_id(path: Path) -> str:
    """A page's path in the repository."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, *languages: str) -> Iterator[Block]:
    """The fenced blocks of a page in the given languages."""
    pattern = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    text = path.read_text(encoding="utf-8")
    for match in pattern.finditer(text):
        if match[1] in languages:
            yield Block(page_id(path), text.count("\n", 0, match.start()) + 1, match[1], match[2])


def table_commands(path: Path) -> Iterator[Block]:
    """The commands in the last column of tables whose header calls it so, a block for each row."""
    is_table = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        last = line.rstrip("| ").rpartition(" | ")[2]
        is_table = line.startswith("|") and (is_table or last == "command here")
        commands = [text for text in re.findall(r"`([^`]+)`", last) if text.split()[0] in COMMANDS] if is_table else []
        if commands:
            yield Block(page_id(path), number, "sh", "\n".join(commands) + "\n")


def logical_lines(text: str) -> list[str]:
    """The commands of a shell block, one each, without comments and blank lines."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


class Shell:
    """`shell(lines)` runs a script with bash in a directory; programs of ours are forked by `python`."""

    def __init__(self, python: Python, directory: Path, scratch: Path) -> None:
        """Args:
        python: the fixture.
        directory: where the script runs.
        scratch: an empty directory for the stand-ins of programs.
        """
        self._python, self._directory = python, directory
        self._requests, bin_dir = scratch / "requests", scratch / "bin"
        self._requests.mkdir()
        bin_dir.mkdir()
        for name in PROGRAMS:
            (bin_dir / name).write_text(_STAND_IN)
            (bin_dir / name).chmod(0o755)
        path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "SNIPPET_REQUESTS": str(self._requests)}

    def __call__(self, script: str) -> str:
        """Run a script to its end; what it printed.

        Raises:
            AssertionError: a command failed.
        """
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script], cwd=self._directory, env=self._environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + _TIMEOUT_S
        answered: dict[Path, int] = {}
        try:
            while shell.poll() is None:
                for request in {*self._requests.glob("*.asked")} - answered.keys():
                    answered[request] = self._answer(request)
                assert time.monotonic() < deadline, f"this takes too long:\n{script}"
                time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            for request, pipe in answered.items():
                os.close(pipe)
                request.rename(request.with_suffix(".answered"))
        assert shell.stdout is not None
        printed = shell.stdout.read()
        assert shell.returncode == 0, f"exit code {shell.returncode} of\n{script}\n{printed[-6000:]}"
        return printed

    def _answer(self, request: Path) -> int:
        """Run a program, and return the pipe with its exit code, open until the code has been read."""
        name, *arguments = (request / "arguments").read_text().split("\0")[:-1]
        environment = dict(entry.split("=", 1) for entry in (request / "environment").read_text().split("\0")[:-1])
        done = self._python(
            *as_python(name, arguments, environment), cwd=Path((request / "directory").read_text().strip()),
            **environment,
        )  # fmt: skip
        code = done.wait(_TIMEOUT_S)
        code = code if code >= 0 else 128 - code  # as a shell counts signals
        (request / "output").write_text(done.stdout + done.stderr)
        pipe = os.open(request / "exit", os.O_RDWR)  # does not wait for the reader, who may have been killed
        os.write(pipe, f"{code}\n".encode())
        return pipe


def as_python(name: str, arguments: list[str], environment: dict[str, str]) -> list[str]:
    """What the interpreter is given instead of a program's name; a launcher of several processes becomes a dry run of
    one."""
    if name == "python":
        return arguments
    if name == "finetrainers":
        return ["-m", "finetrainers", *arguments]
    start = next(n for n, word in enumerate(arguments) if word == "-m" or word.rpartition("/")[2] == "train.py")
    options, program = arguments[:start], arguments[start:]
    if "--config_file" in options:
        assert (ROOT / options[options.index("--config_file") + 1]).is_file()
    count = re.search(r"--(?:num_processes|nproc_per_node|num_gpus)[ =](\d+)", " ".join(options))
    if count is None or count[1] == "1":
        return program
    environment.update(WORLD_SIZE=count[1], RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    planned = ["--gpu", "80GB"] if program[0] == "train.py" else []  # weights of rewards are on the machine that trains
    return [*program, "--dry_run", *planned]


def substituted(text: str, table: dict[str, str]) -> str:
    """A text with every entry of a table put in."""
    for old, new in table.items():
        text = text.replace(old, new)
    return text
