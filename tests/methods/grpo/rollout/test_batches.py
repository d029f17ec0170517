"""How kept clips are spread over micro-batches, updates and ranks: evenly, each once, with shares that make a mean."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from finetrainers.methods.grpo.rollout.batches import Part, parts_of_updates
from finetrainers.methods.grpo.rollout.collect import RolloutBatch


def parts(
    kept_by_rank: list[int], rank: int, *, updates: int, batch_size: int = 2, repeats: int = 1, rollout: int = 3
) -> list[list[Part]]:
    kept = list(range(kept_by_rank[rank]))
    collected = RolloutBatch(
        jobs=[], latents={i: torch.zeros(1) for i in kept or [0]}, replays={}, advantages=torch.zeros(0),
        trained_clips=kept, trained_by_rank=kept_by_rank, stats={},
    )  # fmt: skip
    return parts_of_updates(
        collected, data_rank=rank, batch_size=batch_size, updates=updates, repeats=repeats, seed=0, rollout=rollout
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
        assert max(sizes) - min(sizes) <= (2 if len(kept) > 1 else 1)
        # Each clip in one update, as often as it is repeated.
        assert sorted(chain.from_iterable(map(counted, rank))) == sorted(list(range(count)) * repeats)
    for update in range(updates):
        assert len({len(rank[update]) for rank in found}) == 1  # all ranks call the network equally often
        assert all(len(part.clips) == 2 for rank in found for part in rank[update])
        assert (len(found[0][update]) == 0) == (totals[update] == 0)
        shares = [sum(chain.from_iterable(part.shares for part in rank[update])) for rank in found]
        assert sum(shares) / len(shares) == pytest.approx(float(totals[update] > 0))
        assert [part.is_first for part in found[0][update]].count(True) == (totals[update] > 0)


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_updates_do_not_depend_on_the_number_of_ranks(updates: int) -> None:
    """A clip is counted through over all ranks, which hold the clips in their order."""

    def clips_of(kept: list[int]) -> list[list[int]]:
        found = [parts(kept, rank, updates=updates, batch_size=1) for rank in range(len(kept))]
        return [
            sorted(sum(kept[:rank]) + clip for rank, each in enumerate(found) for clip in counted(each[update]))
            for update in range(updates)
        ]

    alone = clips_of([12])
    assert all(clips_of(kept) == alone for kept in ([6, 6], [5, 7], [12, 0], [3, 4, 5], [2] * 6))
    if updates > 1:
        assert alone[0] != list(range(0, 12, updates))  # dealt at random


def test_clips_are_dealt_out_anew_in_every_rollout() -> None:
    def dealt(rollout: int) -> list[list[int]]:
        return [counted(update) for update in parts([8], 0, updates=2, rollout=rollout)]

    assert dealt(0) == dealt(0)
    assert len({str(dealt(rollout)) for rollout in range(5)}) > 1
