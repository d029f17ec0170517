"""How a rollout's clips become micro-batches: the same number on every rank, and weights that make a mean."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from finetrainers.utils.seeding import derive_seed

from .collect import Collected, Collector

#: Clips of one micro-batch, and the share of each in the loss of its optimizer step.
Group = tuple[list[int], list[float]]


def shares_of_updates(
    collected: Collected, collector: Collector, *, updates: int, repeats: int, seed: int, rollout: int
) -> Iterator[list[Group]]:
    """For each update of a rollout its micro-batches: kept clips in random order, cut into equal parts.

    Ranks may keep different numbers of clips. Who has fewer fills up with clips of share 0, since all ranks must make
    equally many micro-batches of equal size. The mean over ranks of the sums of a step's shares is 1.

    Args:
        collected: this rank's clips.
        collector: how they were made.
        updates: optimizer steps of the rollout.
        repeats: how often each micro-batch is trained, with another transition or noise level each time.
        seed, rollout: they decide the order.
    """
    parallel, size = collector.parallel, collector.batch_size
    order = list(collected.kept)
    random.Random(derive_seed(seed, "order", rollout, parallel.rank)).shuffle(order)
    groups = max(-(-collected.most_kept // size), updates)
    missing = groups * size - len(order)
    weights = [1.0] * len(order) + [0.0] * missing
    order += [i % len(collected.jobs) for i in range(missing)]
    for update in range(updates):
        first, last = update * groups // updates * size, (update + 1) * groups // updates * size
        clips = float(parallel.sum(torch.tensor(sum(weights[first:last]))))
        total = max(clips, 1.0) * repeats / parallel.world_size
        yield [
            (order[start : start + size], [w / total for w in weights[start : start + size]])
            for start in range(first, last, size)
        ]
