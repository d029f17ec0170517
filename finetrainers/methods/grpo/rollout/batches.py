"""How a rollout's clips become micro-batches: as many on every rank, and shares that make a mean."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from finetrainers.models.spec import even_bounds
from finetrainers.utils.seeding import derive_seed

from ..prompts.prompts import Job


class Rollout(Protocol):
    """What optimizer steps are cut from: this rank's clips, with whatever a method trains them on."""

    @property
    def jobs(self) -> Sequence[Job]:
        """What the clips are."""

    @property
    def kept(self) -> Sequence[int]:
        """Indices of the clips to train on."""

    @property
    def kept_by_rank(self) -> Sequence[int]:
        """How many each rank has."""

    @property
    def spare(self) -> Sequence[int]:
        """Indices of clips that can fill up a micro-batch, at least one."""

    @property
    def stats(self) -> Mapping[str, float]:
        """Named numbers of the whole rollout, the same on every rank."""


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
    latent_size: ClassVar[tuple[int, ...]] = ()

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
    collected: Rollout, *, data_rank: int, batch_size: int, updates: int, repeats: int, seed: int, rollout: int
) -> list[list[Part]]:
    """For each update of a rollout its micro-batches. Which clips an update has does not depend on the number of ranks.

    Of all ranks' kept clips, each run of as many as there are updates is dealt out at random, one to each. So the updates
    differ by one clip at most, and by two clips of each rank. An update without a clip, on whatever rank, has no
    micro-batches. Ranks may keep different numbers of clips: who has fewer fills up with clips of share 0, since all
    ranks must make equally many micro-batches of equal size. The mean over ranks of the sums of a step's shares is 1.

    Args:
        collected: this rank's clips.
        data_rank: of this process.
        batch_size: clips of a micro-batch.
        updates: optimizer steps of the rollout.
        repeats: how often each clip is trained in its step.
        seed, rollout: they decide who is dealt what.
    """
    counts = collected.kept_by_rank
    owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
    dealt: list[int] = []  # to which update, of every kept clip
    while len(dealt) < len(owners):
        turn = list(range(updates))
        random.Random(derive_seed(seed, "updates", rollout, len(dealt))).shuffle(turn)
        dealt += turn[: len(owners) - len(dealt)]
    before = sum(counts[:data_rank])
    mine = dict(zip(collected.kept, dealt[before : before + counts[data_rank]], strict=True))
    spare = collected.spare
    found = []
    for update in range(updates):
        sizes = Counter(owner for owner, to in zip(owners, dealt, strict=True) if to == update)
        groups = max((-(-count // batch_size) for count in sizes.values()), default=0)
        clips = [clip for clip, to in mine.items() if to == update]
        missing = groups * batch_size - len(clips)
        total = float(sizes.total()) * repeats / len(counts)
        shares = [1.0 / total for _ in clips] + [0.0] * missing
        clips += [spare[i % len(spare)] for i in range(missing)]
        found.append(
            [
                Part(clips[at : at + batch_size], shares[at : at + batch_size], repeat, update, at == repeat == 0)
                for at in range(0, len(clips), batch_size)
                for repeat in range(repeats)
            ]
        )
    return found
