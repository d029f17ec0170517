"""`finetrainers check`: the status of every item of a dataset, without model weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from finetrainers.config.arguments import ArgumentParser, path_argument
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.utils import exit_codes
from finetrainers.utils.files import folder_problem, write_json_lines_atomic, write_text_atomic
from finetrainers.utils.launch import print_error
from finetrainers.utils.progress import Stages
from finetrainers.utils.text import plural, printable

from .options import positive_integer, read_run_config

_MAX_REASONS = 30  # printed in full on the terminal
_MAX_LEAST_USED = 5
_EPILOG = """All options of `finetrainers train` are valid too. The config file may come first:
  finetrainers check run.toml

exit codes:
  0   success
  2   invalid configuration
  65  the data cannot be read, no item can be used, or more are rejected than `max_bad_samples` allows
"""


def own_options() -> ArgumentParser:
    """Return the parser of the command's own options."""
    parser = ArgumentParser(
        prog="finetrainers check",
        description="Report the status of every item of a dataset: its bucket, or why it cannot be used.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--decode",
        choices=("header", "full"),
        default="header",
        help="read headers, or decode every file from end to end [header]",
    )
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", type=path_argument, metavar="FILE", help="write it as one HTML file, with thumbnails")
    parser.add_argument("--jobs", type=positive_integer, help="processes that decode [one for each processor]")
    parser.add_argument("--fresh", action="store_true", help="probe every file again, and ignore stored facts")
    return parser


def check_command(argv: Sequence[str]) -> int:
    """Check as the flags say; return an exit code (`utils.exit_codes`)."""
    parser = own_options()
    try:
        arguments, run_flags = parser.parse_known_args(argv)
        own_problems = [*parser.problems([]), *_path_problems(arguments)]
        try:
            config, invalid = read_run_config(parser, run_flags, own_problems), ConfigError([])
        except ConfigError as error:
            if error.rest is None or own_problems:
                raise
            config, invalid = error.rest, error
        return _check(config, arguments, invalid)
    except ConfigError as error:
        print_error(error)
        return exit_codes.refused([problem.where for problem in error.problems])


def _check(config: TrainConfig, arguments: argparse.Namespace, invalid: ConfigError) -> int:
    """Check the data of `config`, which lacks the options that `invalid` refuses; print and write the reports.

    Raises:
        ConfigError: the problems of the configuration, including those of `invalid`.
    """
    from finetrainers.data.inspect.html_report import make_page
    from finetrainers.data.inspect.probe_all import ProbeOptions
    from finetrainers.plan.check import examine

    with Stages() as progress:
        options = ProbeOptions(
            decode=arguments.decode == "full",
            duplicates=True,
            recall=not arguments.fresh,
            jobs=arguments.jobs,
            progress=progress,
        )
        report, further = examine(config, options)
        # A problem that names an invalid option may be a consequence of it.
        problems = [
            *invalid.problems,
            *(problem for problem in further if not any(name in str(problem) for name in invalid.wrong)),
        ]
        if report is None:
            raise ConfigError(problems)
        page = make_page(report, jobs=arguments.jobs, progress=progress) if arguments.html else None
    _print(report)
    if arguments.json is not None:
        write_json_lines_atomic(arguments.json, [report])
    if page is not None:
        # A lone half of a character, from a file name that is not UTF-8, becomes a visible escape.
        write_text_atomic(arguments.html, page.encode("utf-8", "backslashreplace").decode("utf-8"))
    for report_path in (arguments.json, arguments.html):
        if report_path is not None:
            print(f"written: {report_path}")
    if problems:
        raise ConfigError(problems)
    return exit_codes.DONE if report["usable"] else exit_codes.UNUSABLE_DATA


def _path_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield why reports cannot be written, found before hours of decoding rather than after."""
    from finetrainers.plan.ownership import json_problem, page_problem

    for option, file in (("--json", arguments.json), ("--html", arguments.html)):
        if file is None:
            continue
        try:
            if file.is_dir():
                yield Problem(option, f"{file} is a directory; give a file in it")
            elif (problem := folder_problem(file.parent)) is not None:
                yield Problem(option, problem)
            elif (other := json_problem(file, "items") if option == "--json" else page_problem(file)) is not None:
                yield Problem(option, other, "occupied")
        except OSError as error:
            yield Problem(option, f"{file}: {error.strerror or error}")


def _print(report: dict[str, Any]) -> None:
    """Print the report for the terminal. Names come from files: they must not act on the terminal."""
    from finetrainers.plan.start_report import print_line

    _print_buckets(report["buckets"], report["noun"])
    reasons = report["reasons"]
    width = max((len(row["kind"]) for row in reasons), default=0)
    for heading, rejected in (("cannot be used:", True), ("good to know:", False)):
        rows = [row for row in reasons if row["rejected"] == rejected]
        if rows:
            print_line(heading)
        for row in rows:
            more = ", ..." if row["count"] > len(row["names"]) else ""
            names = ", ".join(map(printable, row["names"]))
            print_line(f"  {row['kind']:<{width}}  {row['count']:>6}  {names}{more}")
    rejected_items = [item for item in report["items"] if item["use"] == "rejected"]
    if rejected_items:
        print_line("why:")
    for item in rejected_items[:_MAX_REASONS]:
        where = f" ({item['where']})" if item["where"] else ""
        print_line(f"  - {printable(item['name'] + ': ' + item['reason'] + where)}")
    if len(rejected_items) > _MAX_REASONS:
        print_line(f"  ... and {len(rejected_items) - _MAX_REASONS} more; --json FILE and --html FILE have all of them")
    _print_usage(report["items"])
    for kind in ("warning", "note"):
        for text in report[f"{kind}s"]:
            print_line(f"{kind}: {printable(text)}")
    totals = report["totals"]
    skipped = f"{totals['skipped']} skipped, " if totals["skipped"] else ""
    print_line(
        f"{plural(totals['count'], totals['unit'])}: {totals['train']} trained on, {totals['eval']} held out, {skipped}"
        f"{totals['rejected']} cannot be used"
    )
    if report["problem"]:
        print_line(f"error: this data cannot be trained on as it is: {printable(report['problem'])}")


def _print_usage(items: Sequence[Mapping[str, Any]]) -> None:
    """Print the clips that lose most, by area and frames."""
    from finetrainers.data.inspect.usage import MOST_LOST, describe_usage, frame_loss, least_used
    from finetrainers.plan.start_report import print_line

    clips = least_used(items)
    if not clips:
        return
    count = sum(max(item["crop"], frame_loss(item)) > MOST_LOST for item in clips)
    print_line(f"least used ({count} of {plural(sum(bool(item['bucket']) for item in items), 'clip')} lose over a "
                  "third of their area or frames):")  # fmt: skip
    for item in clips[:_MAX_LEAST_USED]:
        print_line(f"  {printable(item['name'])}: {describe_usage(item)}")
    if len(clips) > _MAX_LEAST_USED:
        print_line(f"  ... and {len(clips) - _MAX_LEAST_USED} more that are not used whole")


def _print_buckets(rows: list[dict[str, Any]], noun: str) -> None:
    from finetrainers.plan.start_report import print_line

    table = Table(box=None)
    for heading in ("bucket", f"{noun}s", "held out", "batches", "enlarged", "cropped", "fps"):
        table.add_column(heading, justify="left" if heading == "bucket" else "right")
    for row in rows:
        low, high = (f"{rate:.4g}" for rate in row["fps"])
        table.add_row(
            row["bucket"], str(row["clips"]), str(row["held_out"]), str(row["batches"]), str(row["enlarged"]),
            f"{row['crop']:.1%}", low if low == high else f"{low}-{high}",
        )  # fmt: skip
    if rows:
        print_line(table)
