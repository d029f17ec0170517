"""Loading of clips in the order of the batch sampler, ahead of time and in worker processes."""

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
from ..video.masks import latent_weights, load_mask
from .bad_samples import PROBLEMS, BadSample, ReplacementClips, call_with_retry, load_clips
from .batch_sampler import BatchSampler, MicroBatch
from .prefetch import prefetch
from .workers import Workers, note_reading


@dataclass(frozen=True)
class RawBatch:
    """A micro-batch in memory, before encoding.

    Attributes:
        clips: the clips in the batch.
        sample_keys: per sample `(epoch, item)`.
        weight: see `MicroBatch`.
        pixels: of each clip as `load_clip` returns them, or of the segment whose latents the clip's are cut from; empty
            if cached.
        cached: tensors from the cache, batch first, or empty if not cached.
        bad: clips that could not be loaded; their substitutes are among `clips`.
        masks: the weights of each clip's latents `[1, 1, T, H, W]`, or None if it has no mask.
    """

    clips: tuple[Clip, ...]
    sample_keys: tuple[tuple[int, int], ...]
    weight: float
    pixels: tuple[Tensor, ...] = ()
    cached: Mapping[str, Tensor] = field(default_factory=dict)
    bad: tuple[BadSample, ...] = ()
    masks: tuple[Tensor | None, ...] = ()

    def pin_memory(self) -> RawBatch:
        """Return the same batch in page-locked memory; called by the data loader."""
        return replace(
            self,
            pixels=tuple(pixels.pin_memory() for pixels in self.pixels),
            cached={name: tensor.pin_memory() for name, tensor in self.cached.items()},
            masks=tuple(None if mask is None else mask.pin_memory() for mask in self.masks),
        )

    def repeated(self, times: int, *, weight: float) -> RawBatch:
        """Return a batch of the clips repeated `times` times, each time with different sample keys."""
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
    """A decoder of clips. Random starts and crops depend only on (seed, epoch, item), not on workers or ranks.

    Attributes:
        seed: of the run.
        substitutes: replacements of clips that cannot be decoded, or None if such clips are errors.
    """

    seed: int
    substitutes: ReplacementClips | None = None

    def __call__(self, batch: MicroBatch) -> RawBatch:
        clips, loaded, bad_samples = load_clips(batch, self._load, substitutes=self.substitutes)
        pixels, masks = zip(*loaded, strict=True)
        return RawBatch(clips, batch.sample_keys, batch.weight, pixels=pixels, bad=bad_samples, masks=masks)

    def _load(self, clip: Clip, key: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        encoded = encoded_clip(clip)
        mask = None
        # First, since its file is smaller: if it cannot be used, nothing else need be decoded.
        if clip.mask is not None:
            pooled = load_mask(encoded, generator=generator("cpu", self.seed, "clip", *key))
            mask = latent_weights(clip, cut_latents(pooled, clip))
        return load_clip(encoded, generator=generator("cpu", self.seed, "clip", *key)), mask


@dataclass(frozen=True)
class PixelFetch:
    """A decoder of one clip, or its mask, for the cache; returns the reason if an optional one cannot be decoded.

    It is defined here and not with the encoders: a worker that is not forked imports only this module, without
    diffusers.
    """

    keys: CacheKeys
    optional: Collection[int]
    load: Callable[[Clip], Tensor]

    def __call__(self, batch: MicroBatch) -> Tensor | str:
        [clip] = batch.clips
        note_reading(clip)
        try:
            return call_with_retry(self.load, clip)
        except PROBLEMS as error:
            if clip.index not in self.optional:
                raise
            return str(error)


@dataclass(frozen=True)
class StepSampler:
    """The endless micro-batches of one data rank from an optimizer step on; the same at each iteration."""

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
    on_restart: Callable[[str], None] = lambda reason: None,
) -> Iterator[list[RawBatch]]:
    """Yield the micro-batches of each optimizer step, without end.

    Worker processes or threads prefetch; without either, each batch is fetched in this process when it is asked for.
    Workers that die or hang are restarted at the batch that is due.

    Args:
        sampler: the micro-batches.
        fetch: brings a micro-batch into memory.
        num_workers: number of processes that fetch.
        threads: number of threads of this process that fetch instead, where nothing is computed; see `prefetch`.
        pin_memory: whether batches come in page-locked memory.
        timeout_s: seconds to wait for a batch before the workers count as hung, or 0 for no limit.
        on_restart: called with the reason whenever workers are restarted.

    Raises:
        WorkersLost: workers die or hang at the same batch again and again.
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
    for count_in_step in sampler.counts():
        yield [next(batches) for _ in range(count_in_step)]
