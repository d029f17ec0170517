"""Helpers of the demonstrations: the output directory, configurations, contact sheets and plots."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.draw.contact_sheet import Strip, contact_sheet
from finetrainers.draw.curves import averaged, finish, points
from finetrainers.utils.reading import read_jsonl, read_text

if TYPE_CHECKING:
    from .measure import Measured

_MARKER = ".finetrainers-demo"


def clear(directory: Path, name: str, folders: Sequence[str]) -> None:
    """Create the output directory, and remove the subdirectories of an earlier run of the same demonstration.

    Args:
        directory: of the demonstration.
        name: of the demonstration, which is written there.
        folders: subdirectories that it makes.

    Raises:
        ConfigError: the directory is not empty, and not from this demonstration.
    """
    marker = directory / _MARKER
    if directory.is_file():
        raise ConfigError([Problem("directory", f"{directory} is a file; use a directory")])
    if directory.is_dir() and any(directory.iterdir()):
        made_by = read_text(marker).strip() if marker.is_file() else None
        if made_by != name:
            message = f"{directory} holds other files; use an empty directory"
            raise ConfigError([Problem("directory", message, "occupied")])
    for folder in folders:
        shutil.rmtree(directory / folder, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    marker.write_text(name, encoding="utf-8")


def require_matplotlib() -> None:
    """Refuse to start without matplotlib, instead of failing after training.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError([Problem("matplotlib", "is not installed; pip install matplotlib", "not_installed")])


def demo_config(directory: Path, **options: Any) -> TrainConfig:
    """Return the configuration of a run in `directory/run`: the options common to demonstrations, and `options`."""
    common = {
        "model_name": "ltx_video",
        "transformer_dtype": "fp32",
        "vae_dtype": "fp32",
        "text_encoder_dtype": "fp32",
        "optimizer": "adamw",
        "weight_decay": 0.0,
        "checkpointing_limit": 2,
        "output_dir": str(directory / "run"),
    }
    return load_config(**{**common, **options})


def clips_config(directory: Path, *, bucket: tuple[int, int, int], steps: int, **options: Any) -> TrainConfig:
    """Return the configuration of supervised finetuning on `directory/clips`, in one bucket (frames, height, width)."""
    common = {
        "data_root": str(directory / "clips"),
        "dataset_file": str(directory / "clips" / "captions.jsonl"),
        "video_resolution_buckets": ["x".join(map(str, bucket))],
        "precompute_conditions": True,
        "first_frame_conditioning_p": 0.0,
        "train_steps": steps,
        "lr_scheduler": "linear",
        "beta2": 0.99,
        "flow_weighting_scheme": "logit_normal",
        "flow_logit_std": 1.2,
        "checkpointing_steps": max(steps // 2, 1),
        "validation_steps": max(steps // 2, 1),
        "validation_inference_steps": 20,
        "logging_steps": 10,
    }
    return demo_config(directory, **{**common, **options})


def compared(before: Measured, after: Measured, count: int) -> Image.Image:
    """Return a sheet of samples of the first captions without and with a LoRA, below each other."""
    return contact_sheet(
        [
            (before.captions[i], [Strip.of("without", before.clips[i]), Strip.of("with the LoRA", after.clips[i])])
            for i in range(count)
        ]
    )


def plot_losses(metrics: Path, image: Path) -> None:
    """Draw the loss on held-out clips over steps, and the training loss as a moving average."""
    lines = {"eval_loss": ("held-out clips, always with the same noise", "o-"), "loss": ("training, smoothed", "")}
    _plot(metrics, image, lines, ylabel="loss")


def plot_rewards(metrics: Path, image: Path) -> None:
    """Draw the scores of held-out prompts over steps, and that of the rollouts as a moving average, all in [0, 1]."""
    lines = {
        "eval_reward/preferred_color_shown": ("held-out captions: preferred color shown", "s-"),
        "eval_reward/preferred_color": ("held-out captions: similarity to it", "o-"),
        "reward/preferred_color": ("rollouts: similarity to it, smoothed", ""),
        "eval_reward/demo.shape": ("held-out captions: shape as asked", "^:"),
        "eval_reward/demo.motion": ("held-out captions: motion as asked", "v:"),
    }
    _plot(metrics, image, lines, ylabel="mean score")


def _plot(metrics: Path, image: Path, lines: Mapping[str, tuple[str, str]], *, ylabel: str) -> None:
    """Draw named numbers over steps, as far as the records have them.

    Args:
        metrics: a run's `metrics.jsonl`.
        image: path of the image.
        lines: for each number its label and line style; none for a moving average.
        ylabel: of the vertical axis.
    """
    from matplotlib.figure import Figure

    records, _ = read_jsonl(metrics)
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, (label, style) in lines.items():
        steps, values = points(records, name)
        if steps and style:
            axes.plot(steps, values, style, label=label, markersize=5)
        elif steps:
            averaged(axes, (steps, values), label)
    axes.set(xlabel="optimizer step", ylabel=ylabel)
    finish(axes, several=False)
    figure.legend(fontsize="small", frameon=False, loc="outside lower left", ncols=2)
    figure.savefig(image, dpi=120)
