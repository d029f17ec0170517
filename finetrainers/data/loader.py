"""Brings clips into memory, ahead of time and in worker processes, in the order that the stream says."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from finetrainers.config.sections import DataSection
from finetrainers.utils.faults import fault_point
from finetrainers.utils.seeding import generator

from .decode import load_clip
from .plan import Clip
from .stream import BatchStream, MicroBatch


@dataclass(frozen=True)
class RawBatch:
    """A micro-batch in memory, before encoding.

    Attributes:
        clips: what it is made of.
        sample_keys: per sample `(epoch, item)`.
        weight: see `MicroBatch`.
        video: pixels `[B, 3, T, H, W]` in [-1, 1]; None when latents come from the cache.
        cached: tensors from the cache, batch first; None when pixels are given.
    """

    clips: tuple[Clip, ...]
    sample_keys: tuple[tuple[int, int], ...]
    weight: float
    video: Tensor | None = None
    cached: Mapping[str, Tensor] | None = None

    def pin_memory(self) -> RawBatch:
        """The same batch in page-locked memory; called by the data loader."""
        return replace(
            self,
            video=None if self.video is None else self.video.pin_memory(),
            cached=None if self.cached is None else {k: v.pin_memory() for k, v in self.cached.items()},
        )


#: Turns the names of clips into a batch in memory; runs in worker processes, so it must be picklable.
Fetch = Callable[[MicroBatch], RawBatch]


@dataclass(frozen=True)
class DecodeFetch:
    """Decodes clips. Random starts and crops depend on (seed, epoch, item) alone, not on workers or ranks."""

    data: DataSection
    seed: int

    def __call__(self, batch: MicroBatch) -> RawBatch:
        videos = [
            load_clip(
                clip,
                reshape_mode=self.data.video_reshape_mode,
                frame_selection=self.data.frame_selection,
                generator=generator("cpu", self.seed, "clip", *key),
            )
            for clip, key in zip(batch.clips, batch.sample_keys, strict=True)
        ]
        return RawBatch(batch.clips, batch.sample_keys, batch.weight, video=torch.stack(videos))


class FetchDataset(Dataset[RawBatch]):
    """A data set whose "index" is a whole micro-batch: the sampler decides everything, workers only fetch."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def __getitem__(self, index: MicroBatch) -> RawBatch:
        fault_point("data")
        return self.fetch(index)


class _StepSampler(Sampler[MicroBatch]):
    """This rank's micro-batches from a step onward, without end."""

    def __init__(self, stream: BatchStream, *, start: int, accumulation: int, rank: int, world_size: int) -> None:
        self.stream = stream
        self.start = start
        self.accumulation = accumulation
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[MicroBatch]:
        step = self.start
        while True:
            yield from self.stream.step(
                step, accumulation=self.accumulation, rank=self.rank, world_size=self.world_size
            )
            step += 1


def iterate_steps(
    stream: BatchStream,
    fetch: Fetch,
    *,
    start: int = 0,
    accumulation: int = 1,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[list[RawBatch]]:
    """Yield the micro-batches of optimizer steps `start`, `start + 1`, ... of one rank, without end.

    Workers fetch ahead; with `num_workers` 0 everything happens in this process, when asked. A clip that cannot be
    decoded is an error that names the file: leaving it out would change the batches of every other rank.
    """
    sampler = _StepSampler(stream, start=start, accumulation=accumulation, rank=rank, world_size=world_size)
    loader = DataLoader(
        FetchDataset(fetch),
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    batches = iter(loader)
    while True:
        yield [next(batches) for _ in range(accumulation)]


def _leave_signals_to_the_trainer(_worker: int) -> None:
    """Ignore what asks a whole process group to stop: the trainer still needs this worker for its last step.

    A worker ends when the trainer says so, or is gone.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
