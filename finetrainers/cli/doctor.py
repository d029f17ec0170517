"""`finetrainers doctor`: problems of the machines of a run, and differences between them, before it starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.arguments import command_text, path_argument
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.flags import parse_flags
from finetrainers.utils import exit_codes
from finetrainers.utils.files import append_jsonl, folder_problem
from finetrainers.utils.process_state import planning
from finetrainers.utils.text import plural

from .options import make_number_type
from .overview import described
from .sync import seconds

if TYPE_CHECKING:
    from finetrainers.tools.doctor.findings import Finding, Needs
    from finetrainers.tools.doctor.hosts import HostGroup, Node

_MORE = """It prints versions, GPUs with load, power and temperature, speed and free space of the disk, limits, shared
memory and clocks, marks differences from most machines, and suggests fixes. With --hosts it queries all machines at
once over ssh, which must work without a password; a machine that does not answer is a row of the table. Nothing is
installed or changed; the file that measures the disk is deleted again. With --every it reads power, clocks,
temperatures, ECC and InfiniBand counters repeatedly, prints increases, and appends to RUN/health.jsonl, which the run's
report shows. Exit code 1: a problem was detected."""
_DISK_MIB = 256


def add_doctor(commands: Any) -> None:
    """Add the subcommand to the parser."""
    examples = (
        "doctor",
        "doctor run.toml",
        "doctor run.toml --hosts nodes.txt",
        'doctor --hosts nodes.txt --output_dir /shared/runs --rsh "ssh -p 2222"',
        "doctor runs/mystyle --hosts nodes.txt --every 60",
    )
    about = "diagnose this machine, or compare several"
    doctor = commands.add_parser("doctor", **described(about, *examples, more=_MORE))
    doctor.add_argument(
        "config",
        type=path_argument,
        nargs="?",
        metavar="CONFIG",
        help="a run's config file or directory, to compare the disk with its checkpoints",
    )
    doctor.add_argument(
        "--hosts",
        type=path_argument,
        metavar="FILE",
        help="file of machines to connect to over ssh: `host` or `host slots=8` per line",
    )
    doctor.add_argument(
        "--output_dir",
        type=path_argument,
        metavar="DIR",
        help="directory whose disk is measured [the config's, or the current directory]",
    )
    doctor.add_argument(
        "--disk_mib",
        type=make_number_type("must be a whole number of MiB from 0 to 1048576", 0, 1 << 20),
        metavar="N",
        help=f"size of the file to write and read; 0 skips the measurement [{_DISK_MIB}]",
    )
    doctor.add_argument("--python", metavar="PATH", help="interpreter on the other machines [the path of this one]")
    doctor.add_argument(
        "--rsh", type=command_text, metavar="COMMAND", help="command that connects to them [ssh -o BatchMode=yes ...]"
    )
    doctor.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="seconds to wait for a machine's answers [120; with --every its value]",
    )
    doctor.add_argument(
        "--every", type=seconds, metavar="SECONDS", help="read GPUs and InfiniBand ports every N seconds, until Ctrl-C"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON: every fact of every machine, sizes in bytes")
    doctor.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    doctor.set_defaults(run=_doctor, check=_problems)


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    from finetrainers.tools.doctor.hosts import read_hosts

    problems = []
    if arguments.hosts is None:
        for name in ("python", "rsh"):
            if getattr(arguments, name):
                problems.append(Problem(f"--{name}", "requires --hosts", "conflict"))
        problem = None if arguments.output_dir is None else folder_problem(arguments.output_dir)
        problems += [] if problem is None else [Problem("--output_dir", problem)]
    else:
        if shutil.which("ssh") is None and not arguments.rsh:
            problems.append(Problem("ssh", "is not installed; apt-get install openssh-client", "not_installed"))
        read_hosts(arguments.hosts)
    if arguments.every is not None and arguments.disk_mib is not None:
        message = "cannot be combined with --every, which does not measure the disk; remove it"
        problems.append(Problem("--disk_mib", message, "conflict"))
    return problems


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.disk_mib is None:
        arguments.disk_mib = _DISK_MIB
    if arguments.answer:
        return _answer(arguments)
    from finetrainers.tools.doctor.findings import findings

    try:
        if arguments.every is not None:
            return _watch(arguments)
        needs, folder = _needs(arguments.config)
        folder = (arguments.output_dir or folder or Path()).absolute()
        nodes = _nodes(arguments, folder)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return exit_codes.killed_by(signal.SIGINT)
    host_findings = findings(nodes, needs)
    if arguments.json:
        print(json.dumps(_as_json(nodes, host_findings, needs), indent=2))
    else:
        from finetrainers.tools.doctor.table import report_lines

        for line in report_lines(nodes, host_findings, needs, width=min(shutil.get_terminal_size().columns, 160)):
            print(line)
    return exit_codes.FAILED if any(finding.is_problem for finding in host_findings) else exit_codes.DONE


def _answer(arguments: argparse.Namespace) -> int:
    """Answer the questions on standard input until the facts are sent; this is what runs on the other machines."""
    from finetrainers.rundir.health import health_facts
    from finetrainers.tools.doctor.facts import host_facts
    from finetrainers.tools.doctor.hosts import ANSWER, CLOCK, FACTS, HEALTH

    answers = {
        CLOCK: time.time,
        FACTS: lambda: host_facts(arguments.output_dir, disk_mib=arguments.disk_mib),
        HEALTH: health_facts,
    }
    for question in map(str.strip, sys.stdin):
        if question in answers:
            print(f"{ANSWER}{json.dumps(answers[question]())}", flush=True)
        if question in (FACTS, HEALTH):
            break
    return exit_codes.DONE


def _nodes(arguments: argparse.Namespace, folder: Path) -> list[Node]:
    """Return the machines with their facts."""
    from finetrainers.tools.doctor.hosts import FACTS, Node, read_hosts

    if arguments.hosts is None:
        from finetrainers.tools.doctor.facts import host_facts

        return [Node(socket.gethostname(), facts=host_facts(folder, disk_mib=arguments.disk_mib))]
    nodes = read_hosts(arguments.hosts)
    fleet = _fleet(arguments, FACTS, "--output_dir", str(folder), "--disk_mib", str(arguments.disk_mib))
    print(f"querying {plural(len(nodes), 'machine')}, for at most {fleet.timeout_s:g} s", file=sys.stderr, flush=True)
    return fleet.ask(nodes)


def _fleet(arguments: argparse.Namespace, question: str, *options: str) -> HostGroup:
    """Return the fleet that queries the machines of the hosts file, with options for the command there."""
    from finetrainers.tools.doctor.hosts import HostGroup
    from finetrainers.tools.sync import SSH

    timeout = arguments.timeout or arguments.every or 120.0
    command = ["doctor", "--answer", *options]
    return HostGroup(arguments.rsh or SSH, arguments.python or sys.executable, command, timeout, question)


def _watch(arguments: argparse.Namespace) -> int:
    """Read the machines repeatedly until Ctrl-C; print increases, and append each reading to the run."""
    from finetrainers.rundir.health import HEALTH as FILE
    from finetrainers.rundir.health import Rises, health_facts, reading, round_lines
    from finetrainers.tools.doctor.hosts import HEALTH, Node, read_hosts

    run = _run_directory(arguments)
    nodes = [Node(socket.gethostname())] if arguments.hosts is None else read_hosts(arguments.hosts)
    fleet, rises = _fleet(arguments, HEALTH), Rises()
    suffix = "" if run is None else f", appended to {run / FILE}"
    print(
        f"reading {plural(len(nodes), 'machine')} every {arguments.every:g} s{suffix}; Ctrl-C stops",
        file=sys.stderr,
        flush=True,
    )
    due = time.monotonic()
    while True:
        now = time.time()
        answers = [replace(nodes[0], facts=health_facts())] if arguments.hosts is None else fleet.ask(nodes)
        records = [reading(node.host, node.facts, now, error=node.error) for node in answers]
        if run is not None:
            _append(run / FILE, records)
        first, *others = round_lines(records, [rises.of(record) for record in records])
        lines = [f"{time.strftime('%H:%M:%S')}  {first}", *others]
        for line in map(json.dumps, records) if arguments.json else lines:
            print(line, flush=True)
        due = max(due + arguments.every, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _run_directory(arguments: argparse.Namespace) -> Path | None:
    """Return the directory of the run that readings are appended to, or None if no run is named."""
    path: Path | None = arguments.config
    if path is None or path.is_dir():
        return path or arguments.output_dir
    with planning(), contextlib.redirect_stdout(sys.stderr):
        return _config(path).run.output_dir


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append readings to the run. Nothing is written before a run has begun there: it begins in an empty directory."""
    if not (path.parent / "events.jsonl").is_file():
        return
    try:
        for record in records:
            append_jsonl(path, record)
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def _needs(path: Path | None) -> tuple[Needs | None, Path | None]:
    """Return the disk needs and the directory of a run; if torch cannot be imported, the facts report it.

    Raises:
        ConfigError: the configuration cannot be run.
    """
    if path is None:
        return None, None
    with planning(), contextlib.redirect_stdout(sys.stderr):
        config = _config(path / "config.toml" if path.is_dir() else path)
        try:
            return _disk_sizes(config), config.run.output_dir
        except (ImportError, OSError) as error:
            print(f"size of a checkpoint unknown: {error}", file=sys.stderr)
            return None, config.run.output_dir


def _config(path: Path) -> Any:
    """Return the configuration in a file.

    Raises:
        ConfigError: it cannot be run, or the path is not a config file.
    """
    try:
        config, _ = parse_flags([f"--config={path}"], prog="finetrainers doctor")
    except ConfigError as error:
        places = {"--config": "CONFIG"}
        raise ConfigError([replace(p, where=places.get(p.where, p.where)) for p in error.problems]) from None
    if config is None:
        raise ConfigError([Problem("CONFIG", f"{path} is not a config file")])
    return config


def _disk_sizes(config: Any) -> Needs:
    from finetrainers.plan.estimate import checked_sizes
    from finetrainers.tools.doctor.findings import Needs

    checked, _ = checked_sizes(config)
    from finetrainers.plan.room import disk_needs
    from finetrainers.plan.trainable import network_without_weights

    needs = disk_needs(checked, network_without_weights(checked))
    return Needs(needs.checkpoint, needs.least)


def _as_json(nodes: Sequence[Node], findings: Sequence[Finding], needs: Needs | None) -> dict[str, Any]:
    """Return the report for programs."""
    texts: dict[bool, list[dict[str, str]]] = {True: [], False: []}
    for finding in findings:
        texts[finding.is_problem].append({"host": finding.host, "text": finding.text})
    return {
        "machines": [asdict(node) for node in nodes],
        "problems": texts[True],
        "notes": texts[False],
        "needs": None if needs is None else asdict(needs),
    }
