"""The batch size of each bucket by the estimate of memory: no weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import reserved
from finetrainers.memory.phases import RunPlan
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.preflight import Preflight
from finetrainers.utils.phases import label

from .request import Bucket, BucketSearch
from .sizes import largest_fitting


def estimate_sizes(
    checked: Preflight,
    searches: Sequence[BucketSearch],
    *,
    limit: float,
    on_cpu: bool,
    say: Callable[[BucketSearch], Any],
) -> None:
    """Fill in what the estimate says of each bucket.

    Args:
        checked: the run.
        searches: its buckets.
        limit: GiB that may be taken.
        on_cpu: whether that is memory of the host, which has all of the run.
        say: called with each bucket that is estimated.
    """
    memory = RunMemory(checked, gpu_gib=limit)

    def plan_of(bucket: Bucket, clips: int) -> RunPlan:
        return memory.choose(batch=(bucket, clips)).plan

    def needed(bucket: Bucket, clips: int) -> float:
        plan = plan_of(bucket, clips)
        return (plan.local_processes * plan.peak + plan.machine_bytes if on_cpu else reserved(plan.peak)) / GIB

    for one in searches:
        one.estimated = largest_fitting(partial(needed, one.bucket), limit=limit, most=one.most)
        clips = max(1, one.estimated)
        one.needed, one.phase = needed(one.bucket, clips), label(plan_of(one.bucket, clips).peak_phase)
        say(one)
