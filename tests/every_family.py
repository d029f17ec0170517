"""The registered model families and the versions of their tiny models, for tests that are parametrized over all of
them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetrainers.config.facts import Facts
from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import families
from finetrainers.utils.addresses import resolve

#: Names of all families.
FAMILIES = tuple(families())
#: Family and version of every tiny model; None: there is one version.
CHECKPOINTS = tuple(
    (name, version) for name, family in families().items() for version in family.tiny_versions or (None,)
)


def short_clip(family: str) -> int:
    """Frames of a clip of at least two latent frames: 9, or the fewest where a latent frame has other than 4 or 8."""
    return sampled_frames(families()[family].facts)


def sampled_frames(facts: Facts) -> int:
    """Frames of a short sample by diffusers' own pipeline."""
    return max(facts.geometry.temporal + 1 if 8 % facts.geometry.temporal else 9, facts.least_frames)


def deep_repo(tiny_repo: Callable[..., Path], family: str, *, layers: int) -> Path:
    """A family's tiny model with at least four blocks: of two kinds, or `layers` of one."""
    build: Any = resolve(families()[family].tiny or "")
    return tiny_repo(family, **({"layers": layers} if "layers" in inspect.signature(build).parameters else {}))


def required_options(facts: Facts) -> dict[str, Any]:
    """Options that a run of a checkpoint must have, and others need not: the expert that is trained."""
    return {} if facts.boundary is None else {"expert": "high"}


def in_fp32(facts: Facts) -> list[str]:
    """Values of `--part` that load the networks in fp32 that have no option for their dtype."""
    networks = (part for part in facts.networks if part != facts.trained)
    return [f"{part}=,fp32" for part in networks if f"{part}_dtype" not in ModelSection.model_fields]
