"""How a rollout's clips become micro-batches: as many on every rank, and shares that make a mean."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from finetrainers.models.spec import even_bounds
from finetrainers.utils.seeding import derive_seed

from .collect import Collected


@dataclass(frozen=True)
class Part:
    """What one micro-batch is made of.

    Attributes:
        clips: of this rank.
        shares: share of each clip in the loss of its optimizer step; 0 for clips that only fill up.
        repeat: how often these clips have been trained in this step already, with another transition or noise level each.
        update: place of the step among those of its rollout.
        is_first: whether it is the first micro-batch of its step.
    """

    clips: list[int]
    shares: list[float]
    repeat: int
    update: int
    is_first: bool

    #: All clips of a rollout have one size.
    bucket: ClassVar[tuple[int, ...]] = ()

    def __len__(self) -> int:
        return len(self.clips)

    def split(self, pieces: int) -> list[Part]:
        """Exactly so many parts of the same clips with the same shares; where there are too few, the first comes again."""
        bounds = even_bounds(len(self), min(pieces, len(self)))
        found = [replace(self, clips=self.clips[a:b], shares=self.shares[a:b], is_first=False) for a, b in bounds]
        found[0] = replace(found[0], is_first=self.is_first)
        spare = replace(found[0], clips=self.clips[:1], shares=[0.0], is_first=False)
        return found + [spare] * (pieces - len(found))


def parts_of_updates(
    collected: Collected, *, rank: int, batch_size: int, updates: int, repeats: int, seed: int, rollout: int
) -> list[list[Part]]:
    """For each update of a rollout its micro-batches: kept clips in random order, dealt out in turn over all ranks.

    So the updates differ by one clip at most, and by one clip of each rank. An update without a clip, on whatever rank, has
    no micro-batches. Ranks may keep different numbers of clips: who has fewer fills up with clips of share 0, since all
    ranks must make equally many micro-batches of equal size. The mean over ranks of the sums of a step's shares is 1.

    Args:
        collected: this rank's clips.
        rank: this process.
        batch_size: clips of a micro-batch.
        updates: optimizer steps of the rollout.
        repeats: how often each clip is trained in its step.
        seed, rollout: they decide the order.
    """
    counts = collected.kept_by_rank
    order = list(collected.kept)
    random.Random(derive_seed(seed, "order", rollout, rank)).shuffle(order)
    spare = list(collected.latents)
    found = []
    for update in range(updates):
        # A rank's first clip goes to where the last clip of the rank before it has left off.
        first = [(update - sum(counts[:other])) % updates for other in range(len(counts))]
        dealt = [len(range(start, count, updates)) for start, count in zip(first, counts, strict=True)]
        mine = order[first[rank] :: updates]
        groups = max(-(-count // batch_size) for count in dealt)
        missing = groups * batch_size - len(mine)
        total = float(sum(dealt)) * repeats / len(counts)
        clips = mine + [spare[i % len(spare)] for i in range(missing)]
        shares = [1.0 / total for _ in mine] + [0.0] * missing
        found.append(
            [
                Part(clips[at : at + batch_size], shares[at : at + batch_size], repeat, update, at == repeat == 0)
                for at in range(0, len(clips), batch_size)
                for repeat in range(repeats)
            ]
        )
    return found
