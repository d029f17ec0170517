"""What the demonstrations share: a directory of their own, and curves."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.utils.contact_sheet import Strip, contact_sheet
from finetrainers.utils.files import read_jsonl

if TYPE_CHECKING:
    from .measure import Measured

_MARKER = ".finetrainers-demo"


def clear(directory: Path, name: str, folders: Sequence[str]) -> None:
    """Make the directory, without the folders of an earlier run of the same demonstration.

    Args:
        directory: of the demonstration.
        name: of the demonstration, which is written there.
        folders: what it makes.

    Raises:
        ConfigError: the directory holds something, and is not this demonstration's.
    """
    marker = directory / _MARKER
    if directory.is_file():
        raise ConfigError([Problem("directory", f"{directory} is a file; give a directory")])
    if directory.is_dir() and any(directory.iterdir()):
        made_by = marker.read_text(encoding="utf-8").strip() if marker.is_file() else None
        if made_by != name:
            raise ConfigError([Problem("directory", f"{directory} holds other things; give an empty directory")])
    for folder in folders:
        shutil.rmtree(directory / folder, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    marker.write_text(name, encoding="utf-8")


def require_matplotlib() -> None:
    """Say at once that curves cannot be drawn, not after training.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError([Problem("matplotlib", "is not installed; pip install matplotlib")])


def compared(before: Measured, after: Measured, count: int) -> Image.Image:
    """Samples of the first captions without and with a LoRA, below each other."""
    return contact_sheet(
        [
            (before.captions[i], [Strip.of("without", before.clips[i]), Strip.of("with the LoRA", after.clips[i])])
            for i in range(count)
        ]
    )


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw the training loss over steps, and the evaluation loss if there is one."""
    curves = {"loss": ("training loss", "-"), "eval_loss": ("loss on held-out clips", "o-")}
    _plot(metrics, picture, curves, ylabel="loss", yscale="log")


def plot_rewards(metrics: Path, picture: Path) -> None:
    """Draw the score of the rollouts over steps, and those of the held-out prompts, all in [0, 1]."""
    curves = {
        "reward/taste": ("rollouts: nearness to the liked colour", "-"),
        "eval_reward/taste": ("held-out captions: the same", "o-"),
        "eval_reward/taste_shown": ("held-out captions: liked colour shown", "s-"),
        "eval_reward/demo.shape": ("held-out captions: shape as asked", "^:"),
        "eval_reward/demo.motion": ("held-out captions: motion as asked", "v:"),
    }
    _plot(metrics, picture, curves, ylabel="mean score", yscale="linear")


def _plot(metrics: Path, picture: Path, curves: Mapping[str, tuple[str, str]], *, ylabel: str, yscale: str) -> None:
    """Draw named numbers over steps, as far as the records have them.

    Args:
        metrics: a run's `metrics.jsonl`.
        picture: where to.
        curves: for each number its label and line style.
        ylabel, yscale: of the vertical axis.
    """
    from matplotlib.figure import Figure

    records, _ = read_jsonl(metrics)
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, (label, style) in curves.items():
        points = [(record["step"], record[name]) for record in records if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="optimizer step", ylabel=ylabel, yscale=yscale)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(picture, dpi=120)
