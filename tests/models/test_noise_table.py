"""Noise levels and latents of plain runs against the official trainers of each family, whose formulas stand here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_family import CHECKPOINTS, required_options, sampled_frames

from finetrainers import load_config, load_model
from finetrainers.config.facts import Facts
from finetrainers.diffusion.timesteps import NoiseLevels
from finetrainers.models.files.files import read_configs
from finetrainers.models.noise_table import SIZES
from finetrainers.models.registry import families
from finetrainers.plan.chosen import choose_defaults

#: Draws noise levels for clips of so many tokens.
Trainer = Callable[[int, np.random.Generator], np.ndarray]
DRAWS = 50_000


def shifted(levels: np.ndarray, shift: float) -> np.ndarray:
    return shift * levels / (1 + (shift - 1) * levels)


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def lightricks_mu(tokens: int) -> float:
    """`_get_shift_for_sequence_length` of both of Lightricks' trainers: a line through two lengths, not clamped."""
    return 0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024)


def ltx_video(tokens: int, rng: np.random.Generator) -> np.ndarray:
    return sigmoid(rng.normal(lightricks_mu(tokens), 1.0, DRAWS))


def ltx2(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Percentiles 0.5 and 99.9 become 0 and 1, what is below 0.001 is reflected there, and a tenth is uniform."""
    mu = lightricks_mu(tokens)
    low, high = sigmoid(np.array([mu - 2.5758, mu + 3.0902]))
    levels = (sigmoid(rng.normal(mu, 1.0, DRAWS)) - low) / (high - low)
    levels = np.clip(np.where(levels < 1e-3, 2e-3 - levels, levels), 0, 1)
    return np.where(rng.random(DRAWS) < 0.1, rng.uniform(1e-3, 1, DRAWS), levels)


def log_normal(shift: float) -> Trainer:
    """`lognorm` of Tencent's trainers."""
    return lambda tokens, rng: shifted(sigmoid(rng.normal(0.0, 1.0, DRAWS)), shift)


def uniform(shift: float = 1.0, least: float = 0.0) -> Trainer:
    """Levels of a uniform variable after the shift, above the boundary of an expert for high noise."""

    def draw(tokens: int, rng: np.random.Generator) -> np.ndarray:
        levels = shifted(rng.random(20 * DRAWS if least else DRAWS), shift)
        return levels[levels >= least]

    return draw


#: By family and version: the levels, and whether clips have their mean latents.
OFFICIAL: dict[tuple[str, str], tuple[Trainer, bool]] = {
    ("ltx_video", ""): (ltx_video, False),
    ("ltx2", ""): (ltx2, True),
    ("hunyuan_video", ""): (log_normal(7.0), True),
    ("hunyuan_video_15", ""): (log_normal(3.0), False),
    ("cogvideox", ""): (uniform(), False),
    ("mochi", ""): (uniform(), False),
    ("kandinsky5", ""): (uniform(5.0), False),
    ("wan", "t2v"): (uniform(3.0), True),
    ("wan", "i2v"): (uniform(3.0), True),
    ("wan", "flf2v"): (uniform(16.0), True),
    ("wan", "ti2v"): (uniform(5.0), True),
    ("wan", "a14b"): (uniform(12.0, least=0.875), True),
    ("wan", "a14b_i2v"): (uniform(5.0, least=0.9), True),
    ("skyreels_v2", "t2v"): (uniform(8.0), True),
    ("skyreels_v2", "i2v"): (uniform(5.0), True),
    ("skyreels_v2", "flf2v"): (uniform(5.0), True),
    ("skyreels_v2", "df"): (uniform(8.0), True),
}
#: Parts of published names, the first that fits, and their versions.
VERSIONS = {
    "T2V-A14B": "a14b", "I2V-A14B": "a14b_i2v", "TI2V": "ti2v", "FLF2V": "flf2v", "I2V": "i2v", "DF": "df", "T2V": "t2v"
}  # fmt: skip
PUBLISHED = [(family, name) for family in families().values() for name in family.published]


def official(family: str, version: str) -> tuple[Trainer, bool]:
    return OFFICIAL.get((family, "")) or OFFICIAL[family, version]


def distance(levels: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest distance of two cumulative distributions (Kolmogorov-Smirnov)."""
    levels, reference = np.sort(levels), np.sort(reference)
    counts = np.searchsorted(reference, levels) / len(reference)
    return float(np.abs(counts - (np.arange(len(levels)) + 0.5) / len(levels)).max())


def as_levels(times: torch.Tensor, facts: Facts) -> np.ndarray:
    """Return process times as levels from 0 to 1; those of CogVideoX are 1000 timesteps."""
    return times.double().flatten().numpy() / (1.0 if facts.is_flow else 999.0)


@pytest.mark.parametrize(("family", "checkpoint"), PUBLISHED, ids=lambda value: getattr(value, "name", value))
def test_published_checkpoints_are_trained_as_by_the_official_trainer(family: Any, checkpoint: str) -> None:
    config = load_config(model_name=family.name, pretrained_model_name_or_path=checkpoint, data_root="clips")
    facts, model = family.facts_of(config.model), config.model.for_estimate()
    config = choose_defaults(config, facts)
    draw, has_mean = official(family.name, next((v for part, v in VERSIONS.items() if part in checkpoint), ""))
    assert config.diffusion.sample_posterior is not has_mean
    assert config.chosen["sample_posterior"] == "family"
    assert facts.noise_source
    scheduler = read_configs(model, ("scheduler",)).get("scheduler", {})
    levels = NoiseLevels(config.diffusion, is_flow=facts.is_flow, scheduler_config=scheduler, within=facts.noise_range)
    # One generator drawn from many times stands in for many generators.
    generators = [torch.Generator().manual_seed(0)] * 2000
    for size in SIZES:
        tokens = facts.geometry.num_tokens(*size)
        drawn = levels.sample(generators, tokens).double().numpy()
        assert distance(drawn, draw(tokens, np.random.default_rng(0))) < 0.03, size


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version"), [c for c in CHECKPOINTS if c != ("cogvideox", "control")])
def test_plain_runs_draw_these_noise_levels(family: str, version: str | None, tiny_repo: Callable[..., Path]) -> None:
    """At two sizes, by the library's own loop over a clip; latents that are not drawn are equal."""
    deep = {"layers": 8} if family == "ltx_video" else {}  # the demo model has fewer blocks
    repo = tiny_repo(family, **deep, **({} if version is None else {"version": version}))
    config = load_config(pretrained_model_name_or_path=str(repo), model_name=family)
    facts = families()[family].facts_of(config.model)
    model = load_model(load_config(config, **required_options(facts)), device="cpu")
    draw, has_mean = official(family, version or "")
    sizes = [(sampled_frames(facts), 64, 64), (sampled_frames(facts) + 2 * facts.geometry.temporal, 64, 128)]
    for size in [size for size in sizes if not facts.geometry.problems(*size)]:
        frames = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        batch = model.encode([frames], ["a clip"])
        noisy = [model.noise(replace(batch, sample_keys=[(0, item)])) for item in range(400)]
        drawn = as_levels(torch.stack([clip.t for clip in noisy]), facts)
        reference = draw(facts.geometry.num_tokens(*size), np.random.default_rng(0))
        assert distance(drawn, reference) < 0.08, size
        assert torch.equal(noisy[0].x0, noisy[1].x0) is has_mean
