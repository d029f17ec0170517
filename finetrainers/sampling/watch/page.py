"""The contact sheet and the page of a watch: prompts by checkpoints, and the mean scores of all checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..plan import SamplePlan, Variant
from ..run import Drawn, Told, show
from .scores import Scores

#: The newest checkpoints whose clips are shown, besides the best.
_SHOWN = 8


@dataclass(frozen=True)
class Column:
    """A checkpoint that has been sampled.

    Attributes:
        step: the optimizer steps that it holds.
        variant: its weights.
        clips: files by key.
        means: the mean score by each reward.
        is_best: whether it is marked as the best.
    """

    step: int
    variant: Variant
    clips: Mapping[str, Path]
    means: Mapping[str, float]
    is_best: bool


def write_page(
    plan: SamplePlan,
    preset: str,
    columns: Sequence[Column],
    scores: Scores,
    problems: dict[str, str],
    *,
    by: str | None,
) -> None:
    """Write `sheet.png` and `index.html`.

    Args:
        plan: of the preset.
        preset: its name.
        columns: all checkpoints, by step.
        scores: of the clips.
        problems: why clips are missing, by key.
        by: the reward by which a checkpoint is the best.
    """
    shown = [one for one in columns if one in columns[-_SHOWN:] or one.is_best]
    variants = [replace(one.variant, label=f"{one.variant.label}{', best' * one.is_best}") for one in shown]
    plan = replace(plan, variants=variants)
    clips = {key: file for one in shown for key, file in one.clips.items()}
    found = {sample.key: _of_clip(scores, sample.key) for sample in plan.samples()}
    best = next((one for one in columns if one.is_best), None)
    facts = [("preset", preset)]
    if best is not None:
        facts.append(("best", f"step {best.step}, by {by}"))
    if len(shown) < len(columns):
        facts.append(("shown", f"{len(shown)} of {len(columns)} checkpoints"))
    told = Told(f"Watch of {plan.given[0]}", facts, found, _table(columns, scores.labels))
    show(plan, Drawn(clips, 0, problems), told=told)


def _of_clip(scores: Scores, key: str) -> dict[str, str]:
    known = scores.of_clip(key)
    values = {label: known[label] for label in [*scores.labels, *known] if label in known}
    return {label: "failed" if value is None else f"{value:.4g}" for label, value in values.items()}


def _table(columns: Sequence[Column], labels: Sequence[str]) -> list[list[str]]:
    """Mean scores, a row for each checkpoint, below the names of the rewards; nothing without rewards."""
    if not labels:
        return []
    rows = [["mean of all clips", *labels]]
    for one in columns:
        values = [f"{one.means[label]:.4g}" if label in one.means else "" for label in labels]
        rows.append([f"step {one.step}{', best' * one.is_best}", *values])
    return rows
