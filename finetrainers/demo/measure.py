"""Prompt adherence of a pipeline on captions of the little world: sample with diffusers, read the clips back, count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import LTXPipeline

from finetrainers.config.root import TrainConfig
from finetrainers.plan.initial_weights import find_initial_weights
from finetrainers.plan.ready import get_ready
from finetrainers.plan.start_report import print_line
from finetrainers.runs.run import run
from finetrainers.utils.failures import InputError
from finetrainers.utils.packaged import model_path
from finetrainers.utils.progress import Meter
from finetrainers.utils.seeding import generator

from .data import FPS, FRAMES, HEIGHT, WIDTH
from .verify import Reading, has_speed, matches, read
from .world import Pixels

MODEL = "demo://ltx"
#: Recommended sampling settings of the demo model.
STEPS, GUIDANCE = 20, 2.0
_BATCH_SIZE = 16


@dataclass(frozen=True)
class Measured:
    """Samples with their recognized content.

    Attributes:
        captions: captions of the samples.
        clips: `[T, H, W, 3]` uint8, one per caption.
        readings: recognized content of each clip.
        prompt_adherence: by attribute, the share of the captions naming it whose clip shows it.
    """

    captions: list[str]
    clips: list[Pixels]
    readings: list[Reading]
    prompt_adherence: dict[str, float]

    @property
    def share(self) -> float:
        """The share of all attributes in the captions that the clips show."""
        hits = [value for c, r in zip(self.captions, self.readings, strict=True) for value in matches(r, c).values()]
        return sum(hits) / len(hits)


def find_lora(source: Path) -> Path:
    """Return the file of a LoRA, or of the one that a run directory or a checkpoint holds.

    Raises:
        ValueError: there is none, or it is of another model.
    """
    weights = find_initial_weights(str(source))
    if weights.kind != "lora":
        raise InputError(f"{weights.path} holds all weights of a network; use a LoRA", "mismatch")
    if weights.model_name not in (None, "ltx_video"):
        raise InputError(f"{source} is a LoRA of {weights.model_name}, and the demo model is ltx_video", "mismatch")
    return weights.path


def load_pipeline(weights: Path) -> LTXPipeline:
    """Load a model in diffusers layout, in fp32, in which CPUs compute fastest."""
    return LTXPipeline.from_pretrained(weights, torch_dtype=torch.float32)


def measure(
    pipeline: LTXPipeline, captions: Sequence[str], *, steps: int = STEPS, guidance: float = GUIDANCE
) -> Measured:
    """Sample each caption once, from separate noise, and measure."""
    clips: list[Pixels] = []
    with Meter("sampled", "captions", transient=True) as meter:
        for start in range(0, len(captions), _BATCH_SIZE):
            meter(len(clips), len(captions))
            batch = list(captions[start : start + _BATCH_SIZE])
            noise = [generator("cpu", 0, "measure", start + i) for i in range(len(batch))]
            clips += sample(pipeline, batch, generators=noise, steps=steps, guidance=guidance)
    readings = [read(clip) for clip in clips]
    return Measured(list(captions), clips, readings, prompt_adherence(captions, readings))


def sample(
    pipeline: LTXPipeline,
    captions: list[str],
    *,
    generators: list[torch.Generator],
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    height: int = HEIGHT,
    width: int = WIDTH,
) -> list[Pixels]:
    """Sample clips `[T, H, W, 3]` uint8, as long as the world's and by default of its size."""
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        captions,
        num_frames=FRAMES,
        height=height,
        width=width,
        frame_rate=FPS,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=generators,
        output_type="np",
    ).frames
    return list((np.asarray(frames) * 255).round().clip(0, 255).astype(np.uint8))


def around_training(
    config: TrainConfig, *captions: list[str], guidance: float = GUIDANCE, announcements: tuple[str, str, str]
) -> tuple[list[Measured], list[Measured]]:
    """Sample lists of captions, train a LoRA, and sample them again from the same noise.

    Args:
        config: of the run that trains the LoRA on the demo model.
        captions: one list or more.
        guidance: scale of classifier-free guidance.
        announcements: lines to print before sampling, training, and sampling again.
    """
    output_dir = config.run.output_dir
    print_line(announcements[0])
    pipeline = load_pipeline(Path(model_path(MODEL)))
    before = [measure(pipeline, prompts, guidance=guidance) for prompts in captions]
    print_line(f"{announcements[1]}; {train_again(output_dir)}")
    run(get_ready(config))
    print_line(announcements[2])
    pipeline.load_lora_weights(str(output_dir))
    return before, [measure(pipeline, prompts, guidance=guidance) for prompts in captions]


def train_again(output_dir: Path) -> str:
    """Return a hint that shows how to repeat a run with other settings."""
    command = f"finetrainers train --config {output_dir / 'config.toml'} --output_dir another"
    return f"to train again with other settings: {command}"


def prompt_adherence(captions: Sequence[str], readings: Sequence[Reading]) -> dict[str, float]:
    """Return, by attribute, the share of the captions naming it whose clip shows it.

    `all` is everything that a caption names but speed: a shape that moves too slowly still does what it should.
    """
    hits: dict[str, list[bool]] = defaultdict(list)
    for caption, reading in zip(captions, readings, strict=True):
        attributes = matches(reading, caption)
        for name, value in attributes.items():
            hits[name].append(value)
        if attributes:
            hits["all"].append(all(attributes.values()))
        if (speed := has_speed(reading, caption)) is not None:
            hits["speed"].append(speed)
    return {name: float(np.mean(values)) for name, values in hits.items()}
