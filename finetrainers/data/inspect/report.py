"""The report of `finetrainers check` as plain values, the source of the JSON file, table and page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from finetrainers.config.root import TrainConfig

from ..reading.status import MARKS, MEANINGS, STATUSES
from .plan import DatasetPlan

#: Changes when keys of a report change their meaning or are removed.
REPORT_FORMAT = 2
_MAX_NAMES = 5  # names that a reason lists
#: Marks that are a matter of degree, each with the key of its amount.
_DEGREES = {"cropped": "crop", "enlarged": "scale"}


def make_report(plan: DatasetPlan, config: TrainConfig, *, decoded: bool) -> dict[str, Any]:
    """Return the report on a dataset; its keys are described in docs/how-to/data.md.

    Args:
        plan: the plan of the dataset.
        config: the configuration that was checked.
        decoded: whether every file was decoded from end to end.
    """
    items = [item.record() for item in plan.items]
    unit, uses = plan.uses()
    return {
        "format": REPORT_FORMAT,
        "model": config.model.model_name,
        "data": config.data.model_dump(mode="json"),
        "decoded": decoded,
        "usable": plan.problem is None,
        "problem": str(plan.problem).partition("\n")[0] if plan.problem else None,
        "counts": counts_of(items),
        "totals": {"unit": unit, "count": len(uses), **_count_uses(uses)},
        "noun": plan.noun,
        "buckets": plan.bucket_rows(),
        "reasons": reasons_of(items),
        "notes": list(plan.notes),
        "warnings": list(plan.remarks),
        "items": items,
    }


def counts_of(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of a manifest's items by use, status and mark."""
    statuses = Counter(item["status"] for item in items)
    marks = Counter(mark for item in items for mark in item["marks"])
    return {
        "items": len(items),
        **_count_uses([item["use"] for item in items]),
        "statuses": {status: statuses[status] for status in STATUSES if statuses[status]},
        "marks": {mark: marks[mark] for mark in MARKS if marks[mark]},
    }


def _count_uses(uses: Sequence[str]) -> dict[str, int]:
    return {use: uses.count(use) for use in ("train", "eval", "skipped", "rejected")}


def reasons_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the reasons why items of a manifest are left out, and marks, each with a count and the first names.

    Where the mark is a matter of degree, these are the names of the items that have most of it.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for item in items:
        for kind in (item["status"], *(mark for mark in item["marks"] if mark not in _DEGREES)):
            names[kind].append(item["name"])
    for mark, key in _DEGREES.items():  # records of earlier versions have no scale
        marked = sorted((item for item in items if mark in item["marks"]), key=lambda item: -(item.get(key) or 0))
        names[mark] = [item["name"] for item in marked]
    return [
        {
            "kind": kind,
            "rejected": kind in STATUSES and kind != "skipped",
            "count": len(names[kind]),
            "meaning": MEANINGS[kind],
            "names": names[kind][:_MAX_NAMES],
        }
        for kind in (*STATUSES[1:], *MARKS)
        if names[kind]
    ]
