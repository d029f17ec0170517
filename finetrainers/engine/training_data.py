"""The batches of a run: planned clips, through loader and encoder, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from finetrainers.config.root import TrainConfig
from finetrainers.data.loader import Fetch, RawBatch, iterate_steps
from finetrainers.data.plan import DatasetPlan
from finetrainers.data.stream import BatchStream, fixed_batches
from finetrainers.models.spec import Batch
from finetrainers.parallel.engine import Parallel


class TrainingData:
    """Encoded batches of this rank, on its device, with text conditioning in the dtype the network computes in."""

    def __init__(
        self,
        plan: DatasetPlan,
        config: TrainConfig,
        *,
        fetch: Fetch,
        encode: Callable[..., Batch],
        parallel: Parallel,
        compute_dtype: torch.dtype,
    ) -> None:
        """Args:
        plan: what is trained and what is held out.
        config: batch size, workers, accumulation, seed.
        fetch: reads micro-batches, in worker processes.
        encode: `(RawBatch, *, dropout) -> Batch`.
        parallel: this rank's place.
        compute_dtype: of the text conditioning.
        """
        self.config = config
        self.fetch = fetch
        self.encode = encode
        self.parallel = parallel
        self.compute_dtype = compute_dtype
        batch_size = config.dataloader.batch_size
        self.stream = BatchStream(plan.clips, batch_size=batch_size, seed=config.training.seed)
        self.held_out = fixed_batches(plan.eval_clips, batch_size=batch_size) if plan.eval_clips else []
        self.accumulation = config.training.gradient_accumulation_steps

    def steps(self, start: int) -> Iterator[Sequence[Batch]]:
        """The micro-batches of optimizer steps from `start` on, without end."""
        loader = self.config.dataloader
        for micro_batches in iterate_steps(
            self.stream,
            self.fetch,
            start=start,
            accumulation=self.accumulation,
            rank=self.parallel.rank,
            world_size=self.parallel.world_size,
            num_workers=loader.dataloader_num_workers,
            pin_memory=loader.pin_memory and self.parallel.device.type != "cpu",
        ):
            yield [self._finish(raw, dropout=True) for raw in micro_batches]

    def eval_batches(self) -> Iterator[tuple[Batch, bool]]:
        """This rank's held-out batches and whether each counts: ranks that would have fewer repeat the first one."""
        world_size, rank = self.parallel.world_size, self.parallel.rank
        for start in range(0, len(self.held_out), world_size):
            counts = start + rank < len(self.held_out)
            batch = self.held_out[start + rank if counts else 0]
            yield self._finish(self.fetch(batch), dropout=False), counts

    def steps_for_epochs(self, epochs: int) -> int:
        """Optimizer steps that see every clip at least `epochs` times."""
        return self.stream.steps_for_epochs(epochs, accumulation=self.accumulation, world_size=self.parallel.world_size)

    def _finish(self, raw: RawBatch, *, dropout: bool) -> Batch:
        batch = self.encode(raw, dropout=dropout)
        return replace(batch, conditions=batch.conditions.to(self.parallel.device, self.compute_dtype))
