"""Jobs that ranks do as tests ask for them: ranks start once in a module, and a job that no test of a run looks at
costs nothing.

`Jobs` is the tests' side: it puts a job into a folder and waits for what each rank writes down. `served` is the ranks'
side.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from real_process import Python, RealProcess

#: How long a job may take, and a launcher with the start of its ranks: more than any needs on a machine with much else
#: to do.
TIMEOUT_S = 300.0
#: How long ranks may live, however many tests have their turn between two jobs.
_LIFE_S = 3600.0
_POLL_S = 0.01


class Jobs:
    """`jobs[name]`: what each rank wrote down of a job, which is done when a test first looks at it."""

    def __init__(
        self,
        root: Path,
        script: Path,
        jobs: Mapping[str, dict[str, Any]] | None = None,
        *,
        needs: Mapping[str, Sequence[str]] | None = None,
        launcher: Sequence[str] = (),
        processes: int = 2,
        **environment: str,
    ) -> None:
        """Args:
        root: gets the ranks' output and what they write down.
        script: of a rank; its last two arguments are the folder of jobs and that of answers.
        jobs: what the script does, by name.
        needs: jobs that must be done before a job.
        launcher: a module and its arguments; without one, ranks are plain processes that are told of each other.
        processes: how many ranks there are.
        environment: of all of them.
        """
        self.root = root
        self._script, self._jobs, self._needs = script, jobs or {}, needs or {}
        self._launcher, self._processes, self._environment = launcher, processes, environment
        self._found: dict[str, list[dict[str, Any]]] = {}
        self._python: Python | None = None
        self._said: list[str] = []
        self._numbers, self._starts = count(), count()

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        if name not in self._found:
            for before in self._needs.get(name, ()):
                self[before]
            self._found[name] = self.do(self._jobs[name])
        return self._found[name]

    def directory(self, name: str) -> Path:
        """The run directory of a job, which is done if it was not."""
        self[name]
        return Path(self._jobs[name]["output_dir"])

    def close(self) -> None:
        """End the ranks."""
        if self._python is None:
            return
        if self._thread.is_alive():
            _write(self._folder / f"{next(self._numbers)}.json", None)
            self._thread.join(30)
        self._python.close()
        self._thread.join(30)
        self._python = None

    def do(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank wrote down of a job without a name, which is done now.

        Raises:
            AssertionError: a rank has ended.
        """
        if self._python is None or not self._thread.is_alive():
            self.close()  # of ranks that a job has ended: another one is none the worse for it
            self._start()
        number = next(self._numbers)
        answers = [self._folder / f"{number}-rank{rank}.json" for rank in range(self._processes)]
        _write(self._folder / f"{number}.json", job)
        deadline = time.monotonic() + TIMEOUT_S
        while not all(answer.exists() for answer in answers):
            # Of ranks that have ended meanwhile, all answers may be there.
            alive = self._thread.is_alive() or all(answer.exists() for answer in answers)
            assert alive, f"{job}: the ranks have ended\n{''.join(self._said)[-9000:]}"
            assert time.monotonic() < deadline, f"{job}: not done within {TIMEOUT_S:g} s\n{self._output()}"
            time.sleep(_POLL_S)
        return [json.loads(answer.read_text()) for answer in answers]

    def _start(self) -> None:
        self._folder = self.root / f"ranks-{next(self._starts)}"
        self._folder.mkdir(parents=True)
        self._python = python = Python(self._folder)
        self._numbers = count()
        command = (str(self._script), str(self._folder), str(self._folder))
        if self._launcher:
            launched = ("-m", *self._launcher, *command)
            until_ended = lambda: python.launch(*launched, timeout=_LIFE_S, **self._environment)  # noqa: E731
        else:
            started = python.ranks(self._processes, *command, **self._environment)
            until_ended = lambda: _until_one_ends(started)  # noqa: E731
        self._said.clear()
        self._thread = threading.Thread(target=lambda: self._said.append(until_ended()), daemon=True)
        self._thread.start()

    def _output(self) -> str:
        return "".join(one.stdout + one.stderr for one in self._python.started)[-9000:] if self._python else ""


def _until_one_ends(started: list[RealProcess]) -> str:
    """What ranks have said when one of them has ended: the others would wait for its next job."""
    while all(one.returncode is None for one in started):
        time.sleep(_POLL_S)
    return "".join(one.stdout + one.stderr for one in started)


def _write(file: Path, content: Any) -> None:
    """In one piece: somebody waits for the file."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.rename(file)


def served(folder: Path, out: Path, rank: int, do: Callable[[dict[str, Any]], Any]) -> None:
    """Do the jobs that are put into a folder until `null` is, or until the tests are gone; on each rank."""
    parent = os.getppid()
    for number in count():
        file = folder / f"{number}.json"
        while not file.exists():
            if os.getppid() != parent:
                os._exit(1)
            time.sleep(_POLL_S)
        job = json.loads(file.read_text())
        if job is None:
            return
        _write(out / f"{number}-rank{rank}.json", do(job))
