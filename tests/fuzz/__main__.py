"""Reads damaged files of every kind: each is usable or refused with a reason, within limits of time and memory.

    python -m tests.fuzz --minutes 60 --seed 1
    python -m tests.fuzz --target headers --minutes 10
    python -m tests.fuzz --target headers --seed 1 --only 1234       an input again
    python -m tests.fuzz --target headers --only 1234 --input FILE   with the content of a file

The minutes are those of all targets together. Equal seeds give equal inputs. The first input of each kind of crash is
kept, and printed with the command that reads it again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

from .harness import Report, run_target
from .targets import TARGETS


def main(argv: list[str] | None = None) -> int:
    """Run targets; return 1 if an input crashed, else 0."""
    about = f"one of {', '.join(TARGETS)}, and how many inputs instead of a time; may be repeated"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="time of all targets together [1]")
    parser.add_argument("--target", action="append", type=_parse_target, metavar="NAME[=COUNT]", help=f"{about} [all]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage [0]")
    parser.add_argument("--only", type=int, help="number of one input")
    parser.add_argument("--input", type=Path, help="content of that input")
    parser.add_argument("--directory", type=Path, help="a new directory for the files [a temporary one]")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    given = parser.parse_args(argv)
    targets: list[tuple[str, int | None]] = given.target or [(name, None) for name in TARGETS]
    directory = given.directory or Path(tempfile.mkdtemp(prefix="fuzz-"))
    directory.mkdir(parents=True, exist_ok=True)
    reports = []
    for name, count in targets:
        report = run_target(
            name,
            TARGETS[name],
            directory.absolute() / name,
            seed=given.seed,
            seconds=60 * given.minutes / len(targets),
            count=count,
            only=given.only,
            content=None if given.input is None else given.input.read_bytes(),
        )
        reports.append(report)
        if not given.json:
            _print_report(report, given.seed)
    if given.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
    return int(any(report.crashes for report in reports))


def _parse_target(text: str) -> tuple[str, int | None]:
    """Return a target's name and number of inputs."""
    name, _, count = text.partition("=")
    if name not in TARGETS or (count and not count.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(TARGETS)}, got {text!r}")
    return name, int(count) if count else None


def _print_report(report: Report, seed: int) -> None:
    usable = sum(count for case, count in report.outcomes.items() if case.endswith(": usable"))
    refused = sum(report.outcomes.values()) - usable
    crashes = len(report.crashes)
    print(
        f"{report.target}: {report.inputs} inputs in {report.seconds:.0f} s, {usable} usable, "
        f"{refused} refused, {crashes} kinds of crashes ({crashes + report.repeated} inputs); "
        f"slowest {report.slowest_s[0]:.1f} s ({report.slowest_s[1]})",
        flush=True,
    )
    for crash in report.crashes:
        print(f"\n{report.target}: {crash.case}, input {crash.number}: {crash.error}\n{crash.details}")
        again = f"--target {report.target} --seed {seed} --only {crash.number}"
        print(f"read it again: python -m tests.fuzz {again} --input {crash.input}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
