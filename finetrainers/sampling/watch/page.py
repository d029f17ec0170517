"""The contact sheet and the page of a watch: prompts by checkpoints, and mean scores of all checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..plan import SamplePlan, Variant
from ..run import PageText, SampleResult, show
from .scores import TRIGGER_GAP, Scores

#: Number of newest checkpoints with clips on the page, excluding the best.
_NEWEST = 8


@dataclass(frozen=True)
class Column:
    """A sampled checkpoint.

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
        problems: reasons for missing clips, by key.
        by: the reward that selects the best checkpoint.
    """
    selected = [column for column in columns if column in columns[-_NEWEST:] or column.is_best]
    variants = [
        replace(column.variant, label=f"{column.variant.label}{', best' * column.is_best}") for column in selected
    ]
    plan = replace(plan, variants=variants)
    clips = {key: file for column in selected for key, file in column.clips.items()}
    clip_facts = {sample.key: _clip_facts(scores, sample.key) for sample in plan.samples()}
    facts = [("preset", preset)]
    facts += [("best", f"step {column.step}, by {by}") for column in columns if column.is_best]
    facts += _trigger_facts(columns, scores.labels)
    if len(selected) < len(columns):
        facts.append(("shown", f"{len(selected)} of {len(columns)} checkpoints"))
    text = PageText(f"Watch of {plan.given[0]}", facts, clip_facts, _table(columns, scores.labels))
    show(plan, SampleResult(clips, 0, problems), text=text)


def _trigger_facts(columns: Sequence[Column], labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the checkpoint that tells a prompt with the trigger word best from the same prompt without it."""
    for label in labels:
        gaps = [
            (column.means[label + TRIGGER_GAP], column.step)
            for column in columns
            if label + TRIGGER_GAP in column.means
        ]
        if gaps:
            gap, step = max(gaps)
            yield "trigger word", f"largest difference in {label}: {gap:.4g} at step {step}"


def _clip_facts(scores: Scores, key: str) -> dict[str, str]:
    recorded = scores.of_clip(key)
    values = {label: recorded[label] for label in [*scores.labels, *recorded] if label in recorded}
    return {label: "failed" if value is None else f"{value:.4g}" for label, value in values.items()}


def _table(columns: Sequence[Column], labels: Sequence[str]) -> list[list[str]]:
    """Return mean scores with a row for each checkpoint, headed by the rewards' names, or no row without rewards."""
    labels = list(dict.fromkeys([*labels, *(label for column in columns for label in column.means)]))
    if not labels:
        return []
    rows = [["mean of all clips", *labels]]
    for column in columns:
        values = [f"{column.means[label]:.4g}" if label in column.means else "" for label in labels]
        rows.append([f"step {column.step}{', best' * column.is_best}", *values])
    return rows
