"""Evaluation on held-out clips: at fixed noise levels with fixed noise, so comparable over steps and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def held_out_means(
    batches: Iterable[tuple[T, bool]],
    values: Callable[[T, float], Mapping[str, Tensor]],
    *,
    num_levels: int,
    parallel: Any,
) -> dict[str, float]:
    """Return means over all ranks' held-out items, of all noise levels together and of each: `NAME` and `NAME_LEVEL`.

    Levels are quantiles of the training noise levels, at the centers of equal intervals of [0, 1].

    Args:
        batches: this rank's batches, each with whether it counts; ranks have equally many, since sharded networks hang
            otherwise.
        values: returns named numbers of a batch at a quantile, one per item `[B]`.
        num_levels: number of levels.
        parallel: the processes of the run.
    """
    levels = [(i + 0.5) / num_levels for i in range(num_levels)]
    sums: dict[str, Tensor] = {}
    count = torch.zeros(1, dtype=torch.float64)
    for batch, counts in batches:
        for index, level in enumerate(levels):
            for name, numbers in values(batch, level).items():
                level_sums = sums.setdefault(name, torch.zeros(num_levels, dtype=torch.float64))
                if counts:
                    level_sums[index] += numbers.double().sum().cpu()
        count += numbers.shape[0] if counts else 0
    totals = parallel.sum(torch.cat([*sums.values(), count])).cpu()
    record: dict[str, float] = {}
    for name, total in zip(sums, totals[:-1].split(num_levels), strict=True):
        means = (total / totals[-1]).tolist()
        record[name] = sum(means) / num_levels
        record |= {f"{name}_{level:.2f}": mean for level, mean in zip(levels, means, strict=True)}
    return record
