"""`finetrainers report`: HTML page of one run, or a comparison of several."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from finetrainers.config.arguments import ArgumentType, path_argument
from finetrainers.config.errors import Problem
from finetrainers.utils import exit_codes
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.text import file_size

from .options import make_number_type
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
    report.add_argument("--videos", type=ArgumentType(_parse_count), metavar="N|none", help=count)
    every = "write the page again until training ends; the browser reloads it"
    report.add_argument("--every", type=seconds, metavar="SECONDS", help=every)
    report.set_defaults(run=_report, check=_check)


_NUMBER = make_number_type("must be a number or none", 0)


def _parse_count(text: str) -> int:
    """Return a number of videos; `none` is 0."""
    if text == "none":
        return 0
    return _NUMBER(text)


def _check(arguments: argparse.Namespace) -> list[Problem]:
    from finetrainers.results.reports.write import report_problems

    return report_problems(arguments.directory, arguments.output)


def _report(arguments: argparse.Namespace) -> int:
    from finetrainers.results.reports.media import VideoLimits
    from finetrainers.results.reports.page import MOST_VIDEOS, make_report
    from finetrainers.results.reports.write import output_path, read_runs

    roots: list[Path] = arguments.directory
    output = output_path(arguments.output, roots)
    limits = VideoLimits(MOST_VIDEOS if arguments.videos is None else arguments.videos)
    while True:
        runs = read_runs(roots)
        is_training = any(run.status == "training" for run in runs)
        write_text_atomic(output, make_report(runs, limits, reload_s=arguments.every if is_training else None))
        print(f"{output} ({file_size(output.stat().st_size)})", flush=True)
        if arguments.every is None or not is_training:
            return exit_codes.DONE
        try:
            time.sleep(arguments.every)
        except KeyboardInterrupt:
            return exit_codes.DONE
