"""`finetrainers report`: HTML page of one run, or a comparison of several."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from finetrainers.config.arguments import path_argument
from finetrainers.config.errors import Problem
from finetrainers.utils import exit_codes
from finetrainers.utils.files import folder_problem, write_text_atomic
from finetrainers.utils.text import file_size

from .overview import described
from .sync import seconds

_MORE = (
    "The page is a single HTML file that works offline: curves, samples by prompt and step, rollouts, memory, data, "
    "events, settings, and the command that repeats the run. It reads the run directory, even while the run trains "
    "or after a crash. Several runs share the charts, and their settings are compared"
)


def add_report(commands: Any) -> None:
    """Add the subcommand to the parser."""
    about = "write an HTML report of one or more runs"
    examples = ("report runs/mystyle", "report runs/rank16 runs/rank64 --output compared.html")
    report = commands.add_parser("report", **described(about, *examples, more=f"{_MORE}."))
    report.add_argument("directory", type=path_argument, nargs="+", metavar="RUN", help="a run's --output_dir")
    where = "output file [RUN/report.html; for several runs report.html here]"
    report.add_argument("--output", type=path_argument, metavar="FILE|FOLDER", help=where)
    count = "maximum number of videos; larger ones are scaled down [36]"
    report.add_argument("--videos", type=_parse_count, metavar="N|none", help=count)
    every = "write the page again until training ends; the browser reloads it"
    report.add_argument("--every", type=seconds, metavar="SECONDS", help=every)
    report.set_defaults(run=_report, check=_check)


def _parse_count(text: str) -> int:
    """Return a number of videos; `none` is 0."""
    if text == "none":
        return 0
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number or none, got {text!r}")
    return int(text)


def _check(arguments: argparse.Namespace) -> list[Problem]:
    from finetrainers.rundir.run_records import run_problem

    arguments.directory = roots = list(dict.fromkeys(arguments.directory))
    problems = [
        Problem("RUN", f"{root} {problem}", "invalid" if root.exists() else "not_found")
        for root in roots
        if (problem := run_problem(root)) is not None
    ]
    if arguments.output is None and problems:
        return problems
    return [*problems, *_output_problems(_output_path(arguments.output, roots), is_given=arguments.output is not None)]


def _output_path(requested: Path | None, roots: list[Path]) -> Path:
    """Return the file of the page."""
    output = requested or (roots[0] if len(roots) == 1 else Path())
    return output / "report.html" if requested is None or output.is_dir() else output


def _report(arguments: argparse.Namespace) -> int:
    from finetrainers.results.reports.media import VideoLimits
    from finetrainers.results.reports.page import MOST_VIDEOS, make_report
    from finetrainers.rundir.run_records import read_run

    roots: list[Path] = arguments.directory
    output = _output_path(arguments.output, roots)
    limits = VideoLimits(MOST_VIDEOS if arguments.videos is None else arguments.videos)
    while True:
        runs = [read_run(root, name=name) for root, name in zip(roots, _run_names(roots), strict=True)]
        is_training = any(run.status == "training" for run in runs)
        write_text_atomic(output, make_report(runs, limits, reload_s=arguments.every if is_training else None))
        print(f"{output} ({file_size(output.stat().st_size)})", flush=True)
        if arguments.every is None or not is_training:
            return exit_codes.DONE
        try:
            time.sleep(arguments.every)
        except KeyboardInterrupt:
            return exit_codes.DONE


def _run_names(roots: list[Path]) -> list[str]:
    """Return the names of runs: their paths as given, or the shortest distinct ends of their paths."""
    if not any(root.is_absolute() or set(root.parts) <= {"..", "."} for root in roots):
        return [root.as_posix() for root in roots]
    if len(roots) == 1:
        return [""]
    paths = [root.resolve().parts for root in roots]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [str(root) for root in roots]


def _output_problems(output: Path, *, is_given: bool) -> list[Problem]:
    """Return the reasons why the page cannot be written."""
    from finetrainers.plan.ownership import page_problem

    if output.is_dir():
        return [Problem("--output", f"{output} is a directory; use a file name")]
    if output.suffix.lower() not in (".html", ".htm"):
        message = f"{output} is not the name of an HTML page; use a name that ends in .html, or an existing directory"
        return [Problem("--output", message)]
    if (problem := folder_problem(output.absolute().parent)) is not None:
        remedy = "" if is_given else "; set another file with --output"
        return [Problem("--output", f"{problem}{remedy}", "unavailable")]
    other = page_problem(output)
    return [] if other is None else [Problem("--output", other, "occupied")]
