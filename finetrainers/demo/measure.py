"""Prompt adherence of a pipeline on captions of the little world: sample with diffusers, read the clips back, count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import LTXPipeline
from numpy.typing import NDArray

from finetrainers.config.root import TrainConfig
from finetrainers.plan.ready import get_ready
from finetrainers.plan.start_report import print_line
from finetrainers.runs.run import run
from finetrainers.utils.packaged import model_path
from finetrainers.utils.seeding import generator

from .data import FPS, FRAMES, HEIGHT, WIDTH
from .verify import Reading, has_speed, matches, read

MODEL = "demo://ltx"
#: Settings that the embedded model is meant to be sampled with.
STEPS, GUIDANCE = 20, 2.0


@dataclass(frozen=True)
class Measured:
    """Samples and what they show.

    Attributes:
        captions: what was asked for.
        clips: `[T, H, W, 3]` uint8, one per caption.
        readings: what each clip shows.
        prompt_adherence: by attribute, the share of the captions naming it whose clip shows it.
    """

    captions: list[str]
    clips: list[NDArray[np.uint8]]
    readings: list[Reading]
    prompt_adherence: dict[str, float]

    @property
    def share(self) -> float:
        """Of all that the captions say, the share that is shown."""
        shown = [value for c, r in zip(self.captions, self.readings, strict=True) for value in matches(r, c).values()]
        return sum(shown) / len(shown)


def load_pipeline(weights: Path) -> LTXPipeline:
    """A model in diffusers layout, in fp32, as CPUs compute fastest."""
    return LTXPipeline.from_pretrained(weights, torch_dtype=torch.float32)


def measure(
    pipeline: LTXPipeline,
    captions: Sequence[str],
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
    batch_size: int = 16,
) -> Measured:
    """Sample each caption once, from noise of its own, and measure."""
    clips: list[NDArray[np.uint8]] = []
    for start in range(0, len(captions), batch_size):
        part = list(captions[start : start + batch_size])
        clips += sample(
            pipeline,
            part,
            steps=steps,
            guidance=guidance,
            generators=[generator("cpu", seed, "measure", start + i) for i in range(len(part))],
        )
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
) -> list[NDArray[np.uint8]]:
    """Clips `[T, H, W, 3]` uint8, as long as the world's and by default of its size."""
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
    config: TrainConfig, *captions: list[str], guidance: float = GUIDANCE, said: tuple[str, str, str]
) -> tuple[list[Measured], list[Measured]]:
    """Sample lists of captions, train a LoRA, and sample them again from the same noise.

    Args:
        config: of the run that trains it on the embedded model.
        captions: one list or more.
        guidance: scale of classifier-free guidance.
        said: what is printed before each of the three.
    """
    output_dir = config.run.output_dir
    print_line(said[0])
    pipeline = load_pipeline(Path(model_path(MODEL)))
    before = [measure(pipeline, texts, guidance=guidance) for texts in captions]
    print_line(f"{said[1]}; {train_again(output_dir)}")
    run(get_ready(config))
    print_line(said[2])
    pipeline.load_lora_weights(str(output_dir))
    return before, [measure(pipeline, texts, guidance=guidance) for texts in captions]


def train_again(output_dir: Path) -> str:
    """How to repeat a run with other settings."""
    return f"to train again with other settings: finetrainers train --config {output_dir / 'config.toml'} --output_dir another"


def prompt_adherence(captions: Sequence[str], readings: Sequence[Reading]) -> dict[str, float]:
    """By attribute, the share of the captions naming it whose clip shows it.

    `all` is everything that a caption names but speed: a shape that moves too slowly still does what it should.
    """
    found: dict[str, list[bool]] = defaultdict(list)
    for caption, reading in zip(captions, readings, strict=True):
        shown = matches(reading, caption)
        for name, value in shown.items():
            found[name].append(value)
        if shown:
            found["all"].append(all(shown.values()))
        if (speed := has_speed(reading, caption)) is not None:
            found["speed"].append(speed)
    return {name: float(np.mean(values)) for name, values in found.items()}
