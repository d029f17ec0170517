"""Training from scratch on any CPU, without downloads: a small video model of random weights on two real clips.

All of it uses the toolkit's ordinary path: files and captions, decoding, VAE, text encoder, full finetuning,
checkpoints, samples. Only the model is small, and starts from random weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline, LTXVideoTransformer3DModel
from torch import Tensor

from finetrainers.config.root import TrainConfig
from finetrainers.data.video.decode import read_frames
from finetrainers.draw.contact_sheet import Strip, contact_sheet
from finetrainers.models.tiny import build_ltx_video, ltx_transformer, seeded
from finetrainers.plan.ready import get_ready
from finetrainers.plan.start_report import print_line
from finetrainers.runs.run import run
from finetrainers.utils.video import slug, write_mp4

from .clips import EXCERPTS, cut_excerpts, to_tensor
from .data import FPS, FRAMES
from .linear_vae import build_linear_vae
from .measure import sample, train_again
from .results import clear, clips_config, plot_losses, require_matplotlib

SIZE = 64
DEFAULT_STEPS = 700
#: Copies of each clip, so that a batch holds several noise levels of each.
COPIES = 3
_LATENT_CHANNELS = 48  # 8x8x4 compression


def from_scratch(directory: Path, *, steps: int | None = None) -> dict[str, float]:
    """Cut clips, build the model, train, sample, and print the paths of the results; return the PSNR per scene, in dB.

    Args:
        directory: output directory; an earlier result in it is replaced.
        steps: optimizer steps; default: about a minute and a half on two cores.
    """
    require_matplotlib()
    clear(directory, "scratch", ("clips", "model", "run"))
    print_line(f"1/4 cutting {len(EXCERPTS)} real clips into {directory / 'clips'}")
    cut_excerpts(directory / "clips", frames=FRAMES, size=SIZE, fps=FPS, copies=COPIES)

    print_line(
        f"2/4 building a small LTX-Video in {directory / 'model'}: a VAE fitted to the clips, random transformer"
    )
    truth = _frames(directory)
    build_model(directory / "model", [to_tensor(clip) for clip in truth.values()])

    config = _config(directory, steps or DEFAULT_STEPS)
    print_line(f"3/4 training; {train_again(directory / 'run')}")
    run(get_ready(config))

    print_line("4/4 sampling before and after")
    scores = _report(directory, truth)
    for caption, score in scores.items():
        print_line(f"  {caption!r}: {score:.1f} dB PSNR against the clip")
    print_line(
        "\nresults\n"
        f"  before, after and real clips  {directory / 'result.png'}\n"
        f"  loss curve                    {directory / 'loss.png'}\n"
        f"  sample videos                 {directory / 'run' / 'samples'}\n"
        f"  trained transformer           {directory / 'run' / 'transformer'}\n"
        f"  every setting                 {directory / 'run' / 'config.toml'}\n"
        "next: your own clips and a real model, see docs/tutorials/quickstart.md"
    )
    return scores


def build_model(directory: Path, clips: Sequence[Tensor]) -> None:
    """Write a small LTX-Video in diffusers layout, its VAE fitted to clips `[3, T, H, W]` in [-1, 1], T = 4k + 1."""
    vae = build_linear_vae(clips, latent_channels=_LATENT_CHANNELS)
    with seeded(0):
        transformer = ltx_transformer(_LATENT_CHANNELS, heads=4, head_width=32, layers=4)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = LTXPipeline.from_pretrained(build_ltx_video(scratch))
    LTXPipeline(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=tiny.text_encoder,
        tokenizer=tiny.tokenizer,
    ).save_pretrained(str(directory))


def _config(directory: Path, steps: int) -> TrainConfig:
    return clips_config(
        directory,
        bucket=(FRAMES, SIZE, SIZE),
        steps=steps,
        pretrained_model_name_or_path=str(directory / "model"),
        training_type="full-finetune",
        batch_size=COPIES * len(EXCERPTS),
        lr=3e-3,
        lr_warmup_steps=min(30, steps // 2),
        validation_prompts=":::".join(excerpt.caption for excerpt in EXCERPTS),
        validation_guidance_scale=1.0,
    )


def _frames(directory: Path) -> dict[str, torch.Tensor]:
    """Read the clips as training sees them, `[T, H, W, 3]` uint8, by caption."""
    paths = {excerpt.caption: directory / "clips" / f"{excerpt.name}-0.mp4" for excerpt in EXCERPTS}
    return {text: read_frames(path, range(FRAMES), height=SIZE, width=SIZE) for text, path in paths.items()}


def _report(directory: Path, truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Sample the untrained and the trained model with diffusers, and write images; return PSNR by caption."""
    before = LTXPipeline.from_pretrained(directory / "model")
    trained = LTXVideoTransformer3DModel.from_pretrained(directory / "run", subfolder="transformer")
    after = LTXPipeline.from_pretrained(directory / "model", transformer=trained)
    sections, scores = [], {}
    for caption, clip in truth.items():
        real = clip.numpy()
        sampled = {}
        for name, pipeline in (("before", before), ("after", after)):
            noise = [torch.Generator("cpu").manual_seed(0)]
            sampled[name] = sample(pipeline, [caption], generators=noise, guidance=1.0, height=SIZE, width=SIZE)[0]
            write_mp4(directory / f"{name}-{slug(caption)}.mp4", sampled[name], fps=FPS)
        scores[caption] = psnr(sampled["after"], real)
        labels = ("real clip", "before training", f"after, {scores[caption]:.1f} dB")
        sections.append((caption, list(map(Strip.of, labels, (real, *sampled.values())))))
    contact_sheet(sections).save(directory / "result.png")
    plot_losses(directory / "run" / "metrics.jsonl", directory / "loss.png")
    return scores


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio of two uint8 videos, in dB."""
    error = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return float(10 * np.log10(255**2 / max(error, 1e-10)))
