"""`finetrainers plot`: plot the metrics of a run to an image."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetrainers.config.arguments import path_argument
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.utils.files import folder_problem

from .overview import described

_MAX_ROLLOUTS = 6  # in one image


def add_plot(commands: Any) -> None:
    """Add the subcommand to the parser."""
    about = "draw curves.png (losses, rewards, timings) and rollouts.png of a run"
    plot = commands.add_parser("plot", **described(about, "plot runs/first", "plot runs/*"))
    plot.add_argument(
        "directory", type=path_argument, nargs="+", metavar="RUN", help="a run's --output_dir, even while it trains"
    )
    plot.set_defaults(run=_plot, check=_check)


def _check(arguments: argparse.Namespace) -> Iterator[Problem]:
    if find_spec("matplotlib") is None:
        yield Problem("matplotlib", "is not installed; pip install matplotlib", "not_installed")
    for directory in arguments.directory:
        if directory.is_dir() and (problem := folder_problem(directory)) is not None:
            yield Problem("RUN", problem, "unavailable")


def _plot_rollouts(directory: Path) -> Path | None:
    """Write the best and the worst clips of kept rollouts below each other, with their scores.

    Returns the image, or None if none were kept.
    """
    from finetrainers.draw.sample_files import video_sheet
    from finetrainers.utils.video import evenly_spaced

    folders = [path.parent for path in sorted(directory.glob("rollouts/step-*/best.mp4"))]
    if not folders:
        return None
    selected = [folders[index] for index in evenly_spaced(len(folders), _MAX_ROLLOUTS)]
    videos = [path for folder in selected for kind in ("best", "worst") if (path := folder / f"{kind}.mp4").is_file()]
    sheet = directory / "rollouts.png"
    video_sheet(videos).save(sheet)
    return sheet


def _plot(arguments: argparse.Namespace) -> int:
    from finetrainers.draw.curves import plot_run

    problems = []
    for directory in arguments.directory:
        try:
            print(plot_run(directory))
            if (sheet := _plot_rollouts(directory)) is not None:
                print(sheet)
        except ValueError as error:
            problems.append(Problem.from_error("RUN", error))
    if problems:
        raise ConfigError(problems)
    return 0
