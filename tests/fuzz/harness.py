"""Runs damaged files through what reads them, one process for each target, with limits on time and memory."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finetrainers.config.errors import ConfigError
from finetrainers.utils.failures import ExpectedError, InputError

from .damage import Format, damaged

#: Errors that refuse an input.
REFUSALS = (ConfigError, InputError, ExpectedError)
#: Processor time and time of an input, in seconds, and memory above that of the process before.
CPU_S, WALL_S, MEMORY = 10, 60, 2 << 30
_FINISHED = "finished.json"


@dataclass(frozen=True)
class Case:
    """A file and something that reads it.

    Attributes:
        name: the file and its reader.
        path: the file.
        read: the reader; it returns, or raises one of `REFUSALS`.
        form: what the file consists of.
        prepare: called after the file is damaged, such as to renew a checksum of it.
    """

    name: str
    path: Path
    read: Callable[[], Any]
    form: Format = "bytes"
    prepare: Callable[[random.Random], None] = lambda rng: None


@dataclass
class Crash:
    """An input with another end than a result or a refusal.

    Attributes:
        number: of the input; with target and seed it gives the input again.
        case: its name.
        error: the exception and where it was raised.
        input: the file with the input.
        details: the end of the traceback.
    """

    number: int
    case: str
    error: str
    input: str
    details: str = ""


@dataclass
class Report:
    """Result of a target.

    Attributes:
        target: its name.
        inputs: how many were read.
        seconds: the time it took.
        outcomes: number of inputs that were usable and refused, by case.
        crashes: the first input of each kind of crash.
        repeated: number of further inputs of these kinds.
        slowest_s: longest processor time of an input, and its case.
    """

    target: str
    inputs: int = 0
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    crashes: list[Crash] = field(default_factory=list)
    repeated: int = 0
    slowest_s: tuple[float, str] = (0.0, "")


class TooLongError(BaseException):
    """Error in an input that takes too long; not an Exception, so that what reads it does not handle it."""


def run_target(
    name: str,
    make: Callable[[Path], Sequence[Case]],
    directory: Path,
    *,
    seed: int,
    seconds: float,
    count: int | None = None,
    only: int | None = None,
    content: bytes | None = None,
) -> Report:
    """Read damaged files in a separate process; return what came of them.

    Args:
        name: of the target.
        make: writes its files into a directory, and returns its cases.
        directory: of the target; the inputs of crashes are written to `crashes` next to it.
        seed: of the damage.
        seconds: time after which no further input is read.
        count: number of damaged files to read instead; without it, each file is first read as it was written.
        only: the number of the only input.
        content: of that input, instead of a damaged file.
    """
    directory.mkdir(parents=True)
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            _as_worker(directory)
            report = _read_inputs(
                name, make, directory, seed=seed, seconds=seconds, count=count, only=only, content=content
            )
            (directory.parent / f"{name}.{_FINISHED}").write_text(json.dumps(asdict(report)))
            status = 0
        except BaseException:
            (directory.parent / f"{name}.error").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    finished = directory.parent / f"{name}.{_FINISHED}"
    if finished.is_file():
        values = json.loads(finished.read_text())
        crashes = [Crash(**crash) for crash in values.pop("crashes")]
        return Report(**{**values, "crashes": crashes})
    return _died(name, directory, status)


def _died(name: str, directory: Path, status: int) -> Report:
    """Return the report of a process that did not finish, with the input that it read."""
    error = directory.parent / f"{name}.error"
    code = os.waitstatus_to_exitcode(status)
    reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    details = error.read_text() if error.is_file() else ""
    state = directory.parent / f"{name}.input.json"
    if not state.is_file():
        return Report(name, crashes=[Crash(-1, "", reason, "", details)])
    last = json.loads(state.read_text())
    saved = directory.parent / "crashes" / f"{name}-{last['number']}"
    saved.parent.mkdir(exist_ok=True)
    shutil.copy(last["input"], saved)
    crash = Crash(last["number"], last["case"], reason, str(saved), details)
    return Report(name, inputs=last["number"] + 1, crashes=[crash])


def _as_worker(directory: Path) -> None:
    """Prepare this process: no output, no network, small stacks of threads, the directory, limits."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir(directory)
    warnings.simplefilter("ignore")  # PIL warns of much in damaged images
    import torch

    torch.set_num_threads(1)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Raise TooLongError in the block after `CPU_S` of processor time or `WALL_S`."""

    def interrupt(number: int, frame: Any) -> None:
        raise TooLongError(f"more than {CPU_S} s of processor time" if number == signal.SIGPROF else f"over {WALL_S} s")

    signal.signal(signal.SIGPROF, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory() -> None:
    """Allow `MEMORY` above what this process has: libraries keep some of each command."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    if pages is not None:
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _read_inputs(
    name: str,
    make: Callable[[Path], Sequence[Case]],
    directory: Path,
    *,
    seed: int,
    seconds: float,
    count: int | None,
    only: int | None,
    content: bytes | None,
) -> Report:
    report = Report(name)
    cases = make(directory)
    originals = {case.path: case.path.read_bytes() for case in cases}
    others = list(originals.values())
    state = directory.parent / f"{name}.input.json"
    started = time.monotonic()
    signatures: set[str] = set()
    numbers = range(sys.maxsize) if count is None else range(len(cases), len(cases) + count)
    for number in numbers if only is None else [only]:
        if count is None and only is None and time.monotonic() - started > seconds:
            break
        if number % 100 == 0:
            gc.collect()
        case = cases[number % len(cases)]
        rng = random.Random(f"{name}/{seed}/{number}")
        original = originals[case.path]
        # Each is read as it was written, first.
        damage = original if number < len(cases) else damaged(original, case.form, rng, others)
        case.path.write_bytes(damage if content is None else content)
        saved = directory.parent / "crashes" / f"{name}-{seed}-{number}"
        state.write_text(json.dumps({"number": number, "case": case.name, "input": str(case.path)}))
        before = time.process_time()
        outcome, error = _read(case, rng)
        report.slowest_s = max(report.slowest_s, (round(time.process_time() - before, 2), f"{case.name} {number}"))
        report.inputs += 1
        if number < len(cases) and content is None and outcome == "refused":
            outcome, error = "crash", (f"refused as it was written: {error}", "")
        if outcome != "crash":
            kind = f"{case.name}: {outcome}"
            report.outcomes[kind] = report.outcomes.get(kind, 0) + 1
        elif error[0] in signatures:
            report.repeated += 1
        else:
            signatures.add(error[0])
            saved.parent.mkdir(exist_ok=True)
            saved.write_bytes(case.path.read_bytes())
            report.crashes.append(Crash(number, case.name, error[0], str(saved), error[1]))
        case.path.write_bytes(original)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _read(case: Case, rng: random.Random) -> tuple[str, tuple[str, str]]:
    """Return `usable`, `refused` or `crash`, and the error with its traceback."""
    try:
        _limit_memory()
        with _limits():
            case.prepare(rng)
            case.read()
    except REFUSALS as error:
        if not str(error).strip():
            return "crash", (f"{type(error).__name__} without a message", "")
        return "refused", (str(error), "")
    except (Exception, TooLongError, SystemExit) as error:
        return "crash", (_signature(error), "".join(traceback.format_exception(error))[-3000:])
    return "usable", ("", "")


def _signature(error: BaseException) -> str:
    """Return the kind of an error and the line of the package that it comes from: crashes of one cause are equal."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}finetrainers{os.sep}" in frame.filename]
    place = (own or frames)[-1]
    line = "" if isinstance(error, TooLongError) else f":{place.lineno}"
    return f"{type(error).__name__} at {Path(place.filename).name}{line} {place.name}"
