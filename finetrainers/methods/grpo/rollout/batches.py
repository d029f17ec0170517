"""Micro-batches of a rollout's clips: equally many on every rank, with shares that make a mean."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from finetrainers.models.spec import even_bounds
from finetrainers.utils.seeding import derive_seed

from ..prompts.prompts import RolloutSample


class Rollout(Protocol):
    """The clips of this rank and their training data, which are cut into optimizer steps."""

    @property
    def jobs(self) -> Sequence[RolloutSample]:
        """The clips of this rank."""

    @property
    def trained_clips(self) -> Sequence[int]:
        """Indices of the clips to train on."""

    @property
    def trained_by_rank(self) -> Sequence[int]:
        """Number of clips to train on, by rank."""

    @property
    def spare(self) -> Sequence[int]:
        """Indices of clips that can fill up a micro-batch, at least one."""

    @property
    def stats(self) -> Mapping[str, float]:
        """Named numbers of the whole rollout, equal on every rank."""


@dataclass(frozen=True)
class Part:
    """The clips of one micro-batch.

    Attributes:
        clips: indices among this rank's clips.
        shares: share of each clip in the loss of its optimizer step; 0 for clips that only fill up.
        repeat: number of times that these clips were trained earlier in this step, each with another transition or
            noise level.
        update: index of the step among those of its rollout.
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
        """Return exactly `pieces` parts with unchanged shares; if too few, the first clip repeats with share 0."""
        bounds = even_bounds(len(self), min(pieces, len(self)))
        parts = [replace(self, clips=self.clips[a:b], shares=self.shares[a:b], is_first=False) for a, b in bounds]
        parts[0] = replace(parts[0], is_first=self.is_first)
        spare = replace(parts[0], clips=self.clips[:1], shares=[0.0], is_first=False)
        return parts + [spare] * (pieces - len(parts))


def parts_of_updates(
    collected: Rollout, *, data_rank: int, batch_size: int, updates: int, repeats: int, seed: int, rollout: int
) -> list[list[Part]]:
    """Return the micro-batches of each update of a rollout; its clips do not depend on the number of ranks.

    The clips that are trained on, of all ranks, are dealt out in turns of one clip to each update, in random order. So
    the updates differ by one clip at most, and by two clips of each rank. An update without a clip, on whatever rank,
    has no micro-batches. Ranks may train different numbers of clips: a rank with fewer fills up with clips of share 0,
    since all ranks must make equally many micro-batches of equal size. The mean over ranks of the sums of a step's
    shares is 1.

    Args:
        collected: this rank's clips.
        data_rank: rank of this process.
        batch_size: clips of a micro-batch.
        updates: optimizer steps of the rollout.
        repeats: number of times that each clip is trained in its step.
        seed, rollout: seed of the run and number of the rollout, which decide how clips are dealt.
    """
    counts = collected.trained_by_rank
    owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
    update_by_clip: list[int] = []  # index of the update, for every clip that is trained
    while len(update_by_clip) < len(owners):
        turn = list(range(updates))
        random.Random(derive_seed(seed, "updates", rollout, len(update_by_clip))).shuffle(turn)
        update_by_clip += turn[: len(owners) - len(update_by_clip)]
    before = sum(counts[:data_rank])
    own_updates = dict(zip(collected.trained_clips, update_by_clip[before : before + counts[data_rank]], strict=True))
    spare = collected.spare
    parts = []
    for update in range(updates):
        sizes = Counter(owner for owner, index in zip(owners, update_by_clip, strict=True) if index == update)
        groups = max((-(-count // batch_size) for count in sizes.values()), default=0)
        clips = [clip for clip, index in own_updates.items() if index == update]
        missing = groups * batch_size - len(clips)
        total = float(sizes.total()) * repeats / len(counts)
        shares = [1.0 / total for _ in clips] + [0.0] * missing
        clips += [spare[i % len(spare)] for i in range(missing)]
        parts.append(
            [
                Part(clips[i : i + batch_size], shares[i : i + batch_size], repeat, update, i == repeat == 0)
                for i in range(0, len(clips), batch_size)
                for repeat in range(repeats)
            ]
        )
    return parts
