"""How kept clips are spread over micro-batches, updates and ranks: evenly, each once, with shares that make a mean."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from finetrainers.methods.grpo.batches import Part, parts_of_updates
from finetrainers.methods.grpo.collect import Collected


def parts(
    kept_by_rank: list[int], rank: int, *, updates: int, batch_size: int = 2, repeats: int = 1
) -> list[list[Part]]:
    kept = list(range(kept_by_rank[rank]))
    collected = Collected(
        jobs=[], latents={i: torch.zeros(1) for i in kept or [0]}, replays={}, advantages=torch.zeros(0), kept=kept,
        kept_by_rank=kept_by_rank, stats={},
    )  # fmt: skip
    return parts_of_updates(
        collected, rank=rank, batch_size=batch_size, updates=updates, repeats=repeats, seed=0, rollout=3
    )


def counted(update: list[Part]) -> list[int]:
    """Clips of an update that count, repeats included."""
    return [clip for part in update for clip, share in zip(part.clips, part.shares, strict=True) if share]


@pytest.mark.parametrize("kept", [[8, 8], [5, 2], [1, 1], [0, 3], [0, 1], [7, 0, 1], [9]])
@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("repeats", [1, 2])
def test_updates_are_even(kept: list[int], updates: int, repeats: int) -> None:
    found = [parts(kept, rank, updates=updates, repeats=repeats) for rank in range(len(kept))]
    totals = [sum(len(counted(rank[update])) for rank in found) // repeats for update in range(updates)]
    assert sum(totals) == sum(kept)
    assert max(totals) - min(totals) <= 1
    for rank, count in zip(found, kept, strict=True):
        sizes = [len(counted(update)) // repeats for update in rank]
        assert max(sizes) - min(sizes) <= 1
        # Each clip in one update, as often as it is repeated.
        assert sorted(chain.from_iterable(map(counted, rank))) == sorted(list(range(count)) * repeats)
    for update in range(updates):
        assert len({len(rank[update]) for rank in found}) == 1  # all ranks call the network equally often
        assert all(len(part.clips) == 2 for rank in found for part in rank[update])
        assert (len(found[0][update]) == 0) == (totals[update] == 0)
        shares = [sum(chain.from_iterable(part.shares for part in rank[update])) for rank in found]
        assert sum(shares) / len(shares) == pytest.approx(float(totals[update] > 0))
        assert [part.is_first for part in found[0][update]].count(True) == (totals[update] > 0)


def test_the_order_is_drawn_anew() -> None:
    orders = {tuple(counted(parts([8, 8], rank, updates=1)[0])) for rank in (0, 1)}
    assert len(orders) == 2
    assert tuple(range(8)) not in orders
