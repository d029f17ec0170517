"""Report of runs as a file: its path, the names of the runs, and what prevents it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.plan.ownership import page_problem
from finetrainers.rundir.run_records import RunRecords, read_run, run_problem
from finetrainers.utils.files import folder_problem, write_text_atomic

from .media import VideoLimits
from .page import MOST_VIDEOS, make_report


def report(
    run: str | PathLike[str], *others: str | PathLike[str], output: str | Path | None = None, videos: int = MOST_VIDEOS
) -> Path:
    """Write an HTML report of one or several runs, which are compared; return its path.

        report("runs/first", "runs/second", output="compared.html")

    Args:
        run: run directory or result, even of a run that trains or has crashed.
        others: directories of further runs.
        output: file or existing directory; default: report.html in the run directory, or here for several runs.
        videos: maximum number of videos.

    Raises:
        ConfigError: a directory is not that of a run, or the file cannot be written.
    """
    roots = list(dict.fromkeys(map(Path, (run, *others))))
    requested = None if output is None else Path(output)
    if problems := report_problems(roots, requested):
        raise ConfigError(problems, of="this report")
    path = output_path(requested, roots)
    write_text_atomic(path, make_report(read_runs(roots), VideoLimits(videos)))
    return path


def report_problems(roots: Sequence[Path], requested: Path | None) -> list[Problem]:
    """Return the reasons why a report of these run directories cannot be written."""
    problems = [
        Problem("RUN", f"{root} {problem}", "invalid" if root.exists() else "not_found")
        for root in roots
        if (problem := run_problem(root)) is not None
    ]
    if requested is None and problems:
        return problems
    return [*problems, *_output_problems(output_path(requested, roots), is_given=requested is not None)]


def read_runs(roots: Sequence[Path]) -> list[RunRecords]:
    """Return the records of run directories, with distinct names."""
    return [read_run(root, name=name) for root, name in zip(roots, _run_names(roots), strict=True)]


def output_path(requested: Path | None, roots: Sequence[Path]) -> Path:
    """Return the file of the page."""
    output = requested or (roots[0] if len(roots) == 1 else Path())
    return output / "report.html" if requested is None or output.is_dir() else output


def _run_names(roots: Sequence[Path]) -> list[str]:
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
