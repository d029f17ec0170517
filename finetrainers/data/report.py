"""What a check has found, as plain values: the JSON file, and what the table and the page are made of."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from finetrainers.config.root import TrainConfig

from .fates import FATES, MARKS, MEANINGS
from .survey import Survey
from .verdict import Verdict

#: Changes when keys of a report change their meaning or go.
REPORT_FORMAT = 1
_NAMED = 5  # names beside a reason


def make_report(survey: Survey, config: TrainConfig, *, decoded: bool) -> dict[str, Any]:
    """The report on a data set; its keys are described in docs/data.md.

    Args:
        survey: what was found.
        config: what was checked.
        decoded: whether every file was decoded from end to end.
    """
    verdicts = survey.verdicts
    fates = Counter(v.fate for v in verdicts)
    marks = Counter(mark for v in verdicts for mark in v.marks)
    uses = Counter(v.use for v in verdicts)
    return {
        "format": REPORT_FORMAT,
        "model": config.model.model_name,
        "data": config.data.model_dump(mode="json"),
        "decoded": decoded,
        "usable": survey.problem is None,
        "problem": str(survey.problem).partition("\n")[0] if survey.problem else None,
        "counts": {
            "items": len(verdicts),
            **{use: uses[use] for use in ("train", "eval", "rejected")},
            "fates": {fate: fates[fate] for fate in FATES if fates[fate]},
            "marks": {mark: marks[mark] for mark in MARKS if marks[mark]},
        },
        "buckets": _buckets(verdicts, batch_size=config.dataloader.batch_size),
        "reasons": _reasons(verdicts),
        "notes": list(survey.notes),
        "warnings": list(survey.warnings),
        "items": [verdict.record() for verdict in verdicts],
    }


def _buckets(verdicts: Sequence[Verdict], *, batch_size: int) -> list[dict[str, Any]]:
    """A row for each bucket in use, largest first."""
    by_bucket: dict[tuple[int, int, int], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.bucket is not None:
            by_bucket[verdict.bucket].append(verdict)
    rows = []
    for bucket, found in sorted(by_bucket.items(), reverse=True):
        train = sum(v.examples for v in found if v.use == "train")
        rates = [v.fps for v in found if v.fps is not None]
        rows.append({
            "bucket": "x".join(map(str, bucket)),
            "clips": train,
            "held_out": sum(v.use == "eval" for v in found),
            "batches": math.ceil(train / batch_size),
            "enlarged": sum("enlarged" in v.marks for v in found),
            "crop": round(sum(v.crop for v in found) / len(found), 4),
            "fps": [min(rates), max(rates)],
        })  # fmt: skip
    return rows


def _reasons(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """What keeps items out, and what is remarkable about the others, each with a count and the first names."""
    names: dict[str, list[str]] = defaultdict(list)
    for verdict in verdicts:
        for kind in (verdict.fate, *verdict.marks):
            names[kind].append(verdict.name)
    return [
        {
            "kind": kind,
            "rejected": kind in FATES,
            "count": len(names[kind]),
            "meaning": MEANINGS[kind],
            "names": names[kind][:_NAMED],
        }
        for kind in (*FATES[1:], *MARKS)
        if names[kind]
    ]
