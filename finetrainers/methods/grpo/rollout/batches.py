"""Micro-batches of a rollout's clips: equally many on every rank, with shares that make a mean."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
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
class SharedInputs:
    """Clips that are equal until their first trained step, where the network sees one of them for all.

    Attributes:
        by_rank: for each clip to train on, by rank, the place of its prompt in the rollout, or None if the input of its
            first trained step is its own.
        rows: inputs of a micro-batch.
    """

    by_rank: Sequence[Sequence[int | None]]
    rows: int


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
        sharing: numbers of consecutive clips that share an input of the network, or None if each has its own.
    """

    clips: list[int]
    shares: list[float]
    repeat: int
    update: int
    is_first: bool
    sharing: list[int] | None = None

    #: All clips of a rollout have one size.
    latent_size: ClassVar[tuple[int, ...]] = ()

    def __len__(self) -> int:
        return len(self.sharing or self.clips)

    def split(self, pieces: int) -> list[Part]:
        """Return exactly `pieces` parts with unchanged shares; if too few, the first clip repeats with share 0."""
        bounds = even_bounds(len(self), min(pieces, len(self)))
        ends = [0, *accumulate(self.sharing or [1] * len(self))]
        parts = [
            replace(
                self, clips=self.clips[ends[a] : ends[b]], shares=self.shares[ends[a] : ends[b]], is_first=False,
                sharing=self.sharing and self.sharing[a:b],
            )
            for a, b in bounds
        ]  # fmt: skip
        parts[0] = replace(parts[0], is_first=self.is_first)
        sharing = None if self.sharing is None else [1]
        spare = replace(parts[0], clips=self.clips[:1], shares=[0.0], is_first=False, sharing=sharing)
        return parts + [spare] * (pieces - len(parts))


def parts_of_updates(
    collected: Rollout, *, data_rank: int, batch_size: int, updates: int, repeats: int, seed: int, rollout: int,
    shared: SharedInputs | None = None,
) -> list[list[Part]]:  # fmt: skip
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
        shared: inputs that clips share the first time that they are trained in a step, or None if they share none.
    """
    steps = []
    for update, clips_by_rank in enumerate(_deal(collected.trained_by_rank, updates, seed=seed, rollout=rollout)):
        share = len(clips_by_rank) / (float(sum(map(len, clips_by_rank))) * repeats or 1.0)
        singles = [[[clip] for clip in clips] for clips in clips_by_rank]
        cut = partial(_cut, collected, data_rank, share=share, update=update)
        if shared is None:
            parts = [replace(part, repeat=repeat) for part in cut(singles, batch_size) for repeat in range(repeats)]
        else:
            groups = [_group(clips, inputs) for clips, inputs in zip(clips_by_rank, shared.by_rank, strict=True)]
            parts = cut([both for both, _ in groups], shared.rows, is_shared=True)
            parts += cut([rest for _, rest in groups], batch_size)
            parts += [replace(part, repeat=repeat) for part in cut(singles, batch_size) for repeat in range(1, repeats)]
        steps.append([replace(part, is_first=index == 0) for index, part in enumerate(parts)])
    return steps


def _deal(counts: Sequence[int], updates: int, *, seed: int, rollout: int) -> list[list[list[int]]]:
    """Return the clips of each update by rank, as numbers among the trained clips of the rank."""
    clips = [(rank, clip) for rank, count in enumerate(counts) for clip in range(count)]
    by_update: list[list[list[int]]] = [[[] for _ in counts] for _ in range(updates)]
    for first in range(0, len(clips), updates):
        turn = list(range(updates))
        random.Random(derive_seed(seed, "updates", rollout, first)).shuffle(turn)
        for update, (rank, clip) in zip(turn, clips[first : first + updates], strict=False):
            by_update[update][rank].append(clip)
    return by_update


def _group(clips: Sequence[int], inputs: Sequence[int | None]) -> tuple[list[list[int]], list[list[int]]]:
    """Return clips grouped by the input that they share, and those that share none, each in a list by itself."""
    groups: dict[int, list[int]] = {}
    singles = []
    for clip in clips:
        if (shared := inputs[clip]) is None:
            singles.append([clip])
        else:
            groups.setdefault(shared, []).append(clip)
    return list(groups.values()), singles


def _cut(
    collected: Rollout, data_rank: int, inputs_by_rank: Sequence[Sequence[Sequence[int]]], rows: int, *,
    share: float, update: int, is_shared: bool = False,
) -> list[Part]:  # fmt: skip
    """Return this rank's micro-batches of `rows` inputs, as many as of every rank; an input is that of some clips."""
    own = [([collected.trained_clips[clip] for clip in clips], share) for clips in inputs_by_rank[data_rank]]
    length = rows * max(-(-len(inputs) // rows) for inputs in inputs_by_rank)
    spare = [collected.spare[i % len(collected.spare)] for i in range(length - len(own))]
    filled = [*own, *(([clip], 0.0) for clip in spare)]
    parts = []
    for first in range(0, length, rows):
        clips = [(clip, share) for clips, share in filled[first : first + rows] for clip in clips]
        sharing = [len(clips) for clips, _ in filled[first : first + rows]] if is_shared else None
        parts.append(Part([c for c, _ in clips], [s for _, s in clips], 0, update, is_first=False, sharing=sharing))
    return parts
