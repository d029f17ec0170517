"""Loads clips in the order of the batch sampler, ahead of time and in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from torch import Tensor

from finetrainers.utils.seeding import generator

from ..buckets.clip import Clip
from ..buckets.windows import cut_latents, encoded_clip
from ..cache.keys import CacheKeys
from ..video.decode import load_clip
from ..video.masks import load_mask, weights_of
from .bad_samples import PROBLEMS, BadSample, Substitutes, load_clips, twice
from .batch_sampler import BatchSampler, MicroBatch
from .prefetch import prefetch
from .workers import Workers, note_reading


@dataclass(frozen=True)
class RawBatch:
    """A micro-batch in memory, before encoding.

    Attributes:
        clips: what it is made of.
        sample_keys: per sample `(epoch, item)`.
        weight: see `MicroBatch`.
        pixels: of each clip as `load_clip` gives it, or of the segment whose latents its own are cut from; empty if cached.
        cached: tensors from the cache, batch first; else empty.
        bad: clips that could not be loaded, others in whose place are among `clips`.
        masks: of each clip, the weights of its latents `[1, 1, T, H, W]`; None: it has no mask.
    """

    clips: tuple[Clip, ...]
    sample_keys: tuple[tuple[int, int], ...]
    weight: float
    pixels: tuple[Tensor, ...] = ()
    cached: Mapping[str, Tensor] = field(default_factory=dict)
    bad: tuple[BadSample, ...] = ()
    masks: tuple[Tensor | None, ...] = ()

    def pin_memory(self) -> RawBatch:
        """The same batch in page-locked memory; called by the data loader."""
        return replace(
            self,
            pixels=tuple(pixels.pin_memory() for pixels in self.pixels),
            cached={name: tensor.pin_memory() for name, tensor in self.cached.items()},
            masks=tuple(None if mask is None else mask.pin_memory() for mask in self.masks),
        )

    def repeated(self, times: int, *, weight: float) -> RawBatch:
        """The same clips so many times, each time with sample keys of their own, as a batch of that weight."""
        return replace(
            self,
            clips=self.clips * times,
            sample_keys=tuple((epoch + k, item) for k in range(times) for epoch, item in self.sample_keys),
            weight=weight,
            pixels=self.pixels * times,
            masks=self.masks * times,
            cached={name: tensor.repeat(times, *[1] * (tensor.ndim - 1)) for name, tensor in self.cached.items()},
        )


@dataclass(frozen=True)
class DecodeFetch:
    """Decodes clips. Random starts and crops depend on (seed, epoch, item) alone, not on workers or ranks.

    Attributes:
        seed: of the run.
        substitutes: what takes the place of clips that cannot be decoded; None: they are errors.
    """

    seed: int
    substitutes: Substitutes | None = None

    def __call__(self, batch: MicroBatch) -> RawBatch:
        clips, loaded, bad = load_clips(batch, self._load, substitutes=self.substitutes)
        pixels, masks = zip(*loaded, strict=True)
        return RawBatch(clips, batch.sample_keys, batch.weight, pixels=pixels, bad=bad, masks=masks)

    def _load(self, clip: Clip, key: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        encoded = encoded_clip(clip)
        # First, since its file is the smaller one: if it cannot be used, nothing else need be decoded.
        mask = self._mask(clip, encoded, key)
        return load_clip(encoded, generator=generator("cpu", self.seed, "clip", *key)), mask

    def _mask(self, clip: Clip, encoded: Clip, key: tuple[int, int]) -> Tensor | None:
        if clip.mask is None:
            return None
        whole = load_mask(encoded, generator=generator("cpu", self.seed, "clip", *key))
        return weights_of(clip, cut_latents(whole, clip))


@dataclass(frozen=True)
class PixelFetch:
    """Decodes one clip, or its mask, for the cache; of an optional one gives the reason if it cannot be.

    It is defined here and not with the encoders: a worker that is not forked imports this module alone, without diffusers.
    """

    keys: CacheKeys
    optional: Collection[int]
    load: Callable[[Clip], Tensor]

    def __call__(self, batch: MicroBatch) -> Tensor | str:
        [clip] = batch.clips
        note_reading(clip)
        try:
            return twice(self.load, clip)
        except PROBLEMS as error:
            if clip.index not in self.optional:
                raise
            return str(error)


@dataclass(frozen=True)
class StepSampler:
    """The micro-batches of one data rank from an optimizer step on, without end; the same at each iteration."""

    batches: BatchSampler
    start: int = 0
    data_rank: int = 0
    data_size: int = 1

    def counts(self) -> Iterator[int]:
        """Yield the number of this data rank's micro-batches of each optimizer step, without end."""
        return (self.batches.num_micro_batches(step, data_size=self.data_size) for step in count(self.start))

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in count(self.start):
            yield from self.batches.step(step, data_rank=self.data_rank, data_size=self.data_size)


def iterate_steps(
    sampler: StepSampler,
    fetch: Callable[[MicroBatch], RawBatch],
    *,
    num_workers: int = 0,
    threads: int = 0,
    pin_memory: bool = False,
    timeout_s: float = 0.0,
    on_restart: Callable[[str], None] = lambda why: None,
) -> Iterator[list[RawBatch]]:
    """Yield the micro-batches of each optimizer step, without end.

    Worker processes or threads prefetch; without either, each batch is fetched in this process when it is asked for.
    Workers that die or hang are restarted at the batch that is due.

    Args:
        sampler: which micro-batches.
        fetch: brings a micro-batch into memory.
        num_workers: processes that fetch.
        threads: threads of this process that fetch instead, where there is nothing to compute; see `prefetch`.
        pin_memory: whether batches come in page-locked memory.
        timeout_s: how long to wait for a batch before the workers count as hung; 0: for ever.
        on_restart: called with the reason whenever workers are restarted.

    Raises:
        WorkersLost: they die or hang at the same batch again and again.
    """
    batches: Iterator[RawBatch]

    def load(batch: MicroBatch) -> RawBatch:
        raw = fetch(batch)
        return raw.pin_memory() if pin_memory else raw

    if threads:
        batches = prefetch(sampler, load, threads=threads)
    elif num_workers == 0:
        batches = map(load, sampler)
    else:
        batches = Workers(
            sampler, fetch, clips=sampler.batches.clips, count=num_workers, pin_memory=pin_memory, timeout_s=timeout_s,
            on_restart=on_restart,
        ).batches()  # fmt: skip
    for number in sampler.counts():
        yield [next(batches) for _ in range(number)]
