"""The batch size of each bucket by the memory estimate: no weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import with_reserve
from finetrainers.memory.phases import RunPlan
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.utils.phases import label

from .request import Bucket, BucketSearch
from .sizes import largest_fitting


def estimate_sizes(
    checked: ResolvedRun,
    searches: Sequence[BucketSearch],
    *,
    limit: float,
    on_cpu: bool,
    say: Callable[[BucketSearch], Any],
) -> None:
    """Set the estimate of each bucket.

    Args:
        checked: the run.
        searches: its buckets.
        limit: GiB that may be used.
        on_cpu: whether that is host memory, which holds the whole run.
        say: called with each estimated bucket.
    """
    memory = RunMemory(checked, gpu_gib=limit)

    def make_plan(bucket: Bucket, clips: int) -> RunPlan:
        return memory.choose(batch=(bucket, clips)).plan

    def needed(bucket: Bucket, clips: int) -> float:
        plan = make_plan(bucket, clips)
        return (plan.local_processes * plan.peak + plan.machine_bytes if on_cpu else with_reserve(plan.peak)) / GIB

    for search in searches:
        search.estimated = largest_fitting(partial(needed, search.bucket), limit=limit, max_clips=search.most)
        clips = max(1, search.estimated)
        search.needed, search.phase = needed(search.bucket, clips), label(make_plan(search.bucket, clips).peak_phase)
        say(search)
