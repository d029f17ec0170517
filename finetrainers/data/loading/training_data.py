"""The training data of a run: from the dataset plan to the batches of every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from torch import nn

from finetrainers.config.checks.frames import frame_problems, length_problems
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.models.spec import Batch, ModelComponents, ModelSpec, tiled_for_memory
from finetrainers.parallel.ranks import DistributedContext
from finetrainers.utils.alive import begin_work

from ..buckets.buckets import Bucket, bucket_text
from ..buckets.clip import Clip, all_cuts
from ..cache.encoder_index import remember_model
from ..cache.keys import CacheKeys, EncoderEntry
from ..cache.model_fingerprint import model_fingerprint
from ..inspect.plan import DatasetPlan
from .bad_samples import BadSample, BadSampleTracker, ReplacementClips
from .batch_sampler import BatchSampler, MicroBatch, fixed_batches, sampler_for
from .encode import Encoder, clip_encoder
from .loader import DecodeFetch, RawBatch, StepSampler, iterate_steps
from .position import DataPosition
from .precompute import CacheFetch, Encoded, precompute_masks, precompute_video
from .text_conditioning import TextConditioning, cache_directory


class TrainingData:
    """Batches of a run. With precomputation, the constructor encodes its clips.

    Attributes:
        vae: the VAE where clips are encoded on the fly, or None if every clip is in the cache.
        precomputed: counts of encoding clips beforehand, on all ranks together.
    """

    def __init__(
        self,
        plan: DatasetPlan,
        config: TrainConfig,
        *,
        spec: ModelSpec,
        parallel: DistributedContext,
        texts: TextConditioning,
        clip_encoders: ModelComponents,
        data_position: DataPosition,
    ) -> None:
        """Args:
        plan: the plan of the dataset.
        config: the run.
        spec: of the model.
        parallel: the processes of the run.
        texts: the captions.
        clip_encoders: the encoders of clips; freed where clips are encoded beforehand.
        data_position: the position in the data at which the run starts.
        """
        self.plan = plan
        self.config = config
        self.spec = spec
        self.parallel = parallel
        self.sampler = _make_sampler(plan, config, data_position)
        self._bad_samples = BadSampleTracker(
            parallel=parallel, share=config.data.max_bad_share, num_files=len({clip.path for clip in plan.clips})
        )
        self._events: list[dict[str, Any]] = []
        self._waited_s = 0.0  # for the clips of the last step
        self._epoch = -1  # the last epoch whose left-out clips were counted
        self._eval: list[tuple[Batch, bool]] | None = None
        self.precomputed: dict[str, Encoded] = {}
        _check_options(config, spec, plan)
        seed, encode_clip = config.training.seed, None
        strict: CacheFetch | DecodeFetch
        if texts.encode is None:
            self.vae: nn.Module | None = None
            strict = CacheFetch(self._encode_clips(texts.keys, clip_encoders), prior=plan.prior)
        else:
            self.vae, encode_clip = clip_encoders["vae"], clip_encoder(spec, clip_encoders, config.data)
            strict = DecodeFetch(seed)
        self._encoder = Encoder(
            texts.encode, encode_clip, data=config.data, seed=seed, device=parallel.device, prior=plan.prior,
            shows_frames=texts.keys.texts_see_images,
            is_masked=any(clip.mask is not None for clip in (*plan.clips, *plan.eval_clips)),
        )  # fmt: skip
        # Only training clips have substitutes. A substitute of a held-out clip would change the evaluation set.
        self._substitutes = ReplacementClips(all_cuts(plan.clips)) if config.data.max_bad_share else None
        self._fetch_strictly = plan.fetch_with(strict)
        self._fetch = plan.fetch_with(replace(strict, substitutes=self._substitutes))

    def _encode_clips(self, keys: CacheKeys, clip_encoders: ModelComponents) -> CacheKeys:
        """Encode every clip that the cache does not have, on all ranks, and return the keys of entries."""
        # Tiling changes latents a little at the seams.
        identity = model_fingerprint(clip_encoders.modules, tiling=bool(self.config.model.enable_tiling))
        vae = EncoderEntry(identity, self.spec.clip_version, self.spec.facts.first_frame_noise)
        keys = replace(keys, vae=vae, tiled=self.spec.tiles_by_size, tiled_late=partial(tiled_for_memory, self.spec))
        clips, loading = self.plan.encoded_clips(), self.config.dataloader
        optional = {clip.index for clip in self.plan.clips} if self.config.data.max_bad_share else ()
        encoded = precompute_video(
            clips,
            clip_encoder(self.spec, clip_encoders, self.config.data),
            keys,
            self.parallel,
            loading=loading,
            optional=optional,
        )
        self.precomputed["clips"] = encoded
        threads = max(1, loading.dataloader_num_workers)
        masks = precompute_masks(clips, keys, self.parallel, threads=threads, optional=optional)
        if masks != Encoded():
            self.precomputed["masks"] = masks
        if self.parallel.rank == 0:
            remember_model(cache_directory(self.config), self.config.model, "vae", vae)
        self._bad_samples.agree((*encoded.bad, *masks.bad), None)
        return keys

    def steps(self, start: int) -> Iterator[Sequence[Batch]]:
        """Yield this rank's micro-batches of optimizer steps `start`, `start + 1`, ... without end.

        An error that keeps one rank from loading is raised on all ranks, and clips that could not be used are shared.

        Raises:
            BadSamplesError: too many clips could not be used.
        """
        loading, is_cached = self.config.dataloader, self.vae is None
        workers = loading.dataloader_num_workers
        has_workers = not is_cached and workers > 0
        raw_steps = iterate_steps(
            StepSampler(self.sampler, start, self.parallel.data_rank, self.parallel.data_size),
            self._fetch,
            num_workers=0 if is_cached else workers,
            threads=max(1, workers) if is_cached else 0,
            pin_memory=loading.pin_memory and self.parallel.device.type == "cuda",
            timeout_s=loading.dataloader_timeout,
            on_restart=lambda reason: self._events.append({"kind": "loader_restarted", "why": reason}),
        )
        for step in count(start):
            self._count_left_out(step)
            error: Exception | None = None
            bad_samples: list[BadSample] = []
            batches: list[Batch] = []
            raw_batches: list[RawBatch] = []
            try:
                started = time.perf_counter()
                begin_work(None if has_workers else "data")  # workers have a separate time limit
                raw_batches = next(raw_steps)
                self._waited_s = time.perf_counter() - started
                for raw in raw_batches:
                    begin_work(("encode", raw.clips[0].bucket))
                    batches.append(self._encoder(raw))
                    bad_samples += raw.bad
                begin_work(None)
            except Exception as caught:  # any error: the other ranks must not wait for this one
                error = caught
            if self._bad_samples.agree(bad_samples, error) and self.parallel.sharing > 1:
                batches = self._as_neighbors(step, raw_batches, batches)
            yield batches

    def _as_neighbors(self, step: int, loaded: Sequence[RawBatch], batches: list[Batch]) -> list[Batch]:
        """Return the batches of a step, of the same clips on all ranks that share their samples.

        A file that one of these ranks could not read is used by none of them, even if the others could read it.

        Raises:
            RuntimeError: more files cannot be read when the step is loaded again, on any rank.
        """
        reasons = {sample.clip.path: sample.reason for raw in loaded for sample in raw.bad}
        used = [clip.index for raw in loaded for clip in raw.clips]
        rank, error = self.parallel.data_rank, None
        reports = self.parallel.gather_objects([(rank, used, reasons)])
        neighbors = [(indices, unread) for data_rank, indices, unread in reports if data_rank == rank]
        if any(indices != used for indices, _ in neighbors):
            assert self._substitutes is not None, "unusable clips are an error otherwise"
            self._substitutes.unusable = {path: reason for _, unread in neighbors for path, reason in unread.items()}
            try:
                micro_batches = self.sampler.step(step, data_rank=rank, data_size=self.parallel.data_size)
                loaded = [self._fetch(micro_batch) for micro_batch in micro_batches]
                if {sample.clip.path for raw in loaded for sample in raw.bad} - self._substitutes.unusable.keys():
                    raise RuntimeError("files are readable only at times, so ranks get different clips")
                batches = [self._encoder(raw) for raw in loaded]
            except Exception as caught:
                error = caught
            self._substitutes.unusable = {}
        self.parallel.raise_if_any_failed(error, "loading a batch again")
        return batches

    def _count_left_out(self, step: int) -> None:
        """Record, at the first step of an epoch, the number of clips that fall through all its buckets."""
        epoch = self.sampler.epoch_at(step)
        if epoch != self._epoch and (left_out := self.sampler.left_out(epoch)):
            self._events.append({"kind": "left_out", "epoch": epoch, "clips": left_out})
        self._epoch = epoch

    def drain_events(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics of the last step, with the same names on every rank, and the events since the last call.

        `seconds/data` is the time that the step waited for its clips to be loaded.
        """
        events = [*self._bad_samples.events, *self._events]
        self._bad_samples.events.clear()
        self._events.clear()
        num_bad = len(self._bad_samples.by_path)
        metrics = {"seconds/data": self._waited_s}
        return (metrics | {"bad_samples": float(num_bad)} if num_bad else metrics), events

    def dry_batches(self) -> Iterator[tuple[str, Batch]]:
        """Yield a batch of each bucket, largest first, with the longest captions; the same on every rank."""
        for bucket, clips in longest_captions(self.plan.clips).items():
            micro_batch = MicroBatch(0, tuple(clips[: self.sampler.segment.clips_per_batch(bucket)]))
            [batch] = self._load_on_all_ranks([micro_batch], self._fetch, action="loading a dry batch")
            yield bucket_text(bucket), batch

    def benchmark_batches(self, bucket: Bucket, clips: int, *, micro_batches: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of one step after another, without end, for measurements.

        Each consists of `clips` copies of the bucket's clip with the longest caption. They are encoded again for each
        step, as in training. The clip is decoded once, before the first step.
        """
        [longest, *_] = longest_captions(self.plan.clips)[bucket]
        raw = self._fetch(MicroBatch(0, (longest,))).repeated(clips, weight=1 / micro_batches)
        while True:
            yield [self._encoder(raw, dropout=False) for _ in range(micro_batches)]

    def steps_for_epochs(self, epochs: int) -> int:
        """Return the number of optimizer steps that see every clip at least `epochs` times."""
        return self.sampler.steps_for_epochs(epochs)

    def eval_batches(self) -> list[tuple[Batch, bool]]:
        """Return this rank's held-out batches, without caption dropout, and whether each counts.

        All ranks have equally many, since sharded networks hang otherwise: the last batch is repeated where the
        number does not divide, and repeats do not count. Encoded once; the same objects every time.
        """
        if self._eval is None:
            batches = [(batch, True) for batch in fixed_batches(self.plan.eval_clips, self.sampler.segment)]
            missing = -len(batches) % self.parallel.data_size
            batches += [(batches[-1][0], False)] * missing
            share = batches[self.parallel.data_rank :: self.parallel.data_size]
            encoded = self._load_on_all_ranks(
                [batch for batch, _ in share], self._fetch_strictly, action="loading held-out items"
            )
            self._eval = [(batch, counts) for batch, (_, counts) in zip(encoded, share, strict=True)]
        return self._eval

    def _load_on_all_ranks(
        self, micro_batches: Sequence[MicroBatch], fetch: Callable[[MicroBatch], RawBatch], *, action: str
    ) -> list[Batch]:
        """Load batches with their captions; an error of one rank is raised on all, which would wait for it."""
        with self.parallel.raise_on_all_ranks(action):
            batches = [self._encoder(fetch(micro_batch), dropout=False) for micro_batch in micro_batches]
        return batches


def decoded_steps(
    plan: DatasetPlan, config: TrainConfig, data_position: DataPosition, parallel: DistributedContext, start: int
) -> tuple[Iterator[list[RawBatch]], BatchSampler]:
    """Return the micro-batches of `TrainingData.steps` before they are encoded, without end, and their sampler."""
    sampler, loading = _make_sampler(plan, config, data_position), config.dataloader
    substitutes = ReplacementClips(all_cuts(plan.clips)) if config.data.max_bad_share else None
    steps = StepSampler(sampler, start, parallel.data_rank, parallel.data_size)
    fetch = plan.fetch_with(DecodeFetch(config.training.seed, substitutes))
    workers, timeout = loading.dataloader_num_workers, loading.dataloader_timeout
    return iterate_steps(steps, fetch, num_workers=workers, timeout_s=timeout), sampler


def _make_sampler(plan: DatasetPlan, config: TrainConfig, data_position: DataPosition) -> BatchSampler:
    data = config.data
    by_item = data.sliding_window_batching == "clip"
    return sampler_for(plan.clips, data_position, keep=dict(data.bucket_keep_prob), by_item=by_item)


def longest_captions(clips: Sequence[Clip]) -> dict[Bucket, list[Clip]]:
    """Return the clips by each bucket that they may come in: longest captions first, and largest bucket first."""
    cuts = sorted(all_cuts(clips), key=lambda clip: (-len(clip.caption), clip.index))
    buckets = sorted({clip.bucket for clip in cuts}, key=math.prod, reverse=True)
    return {bucket: [clip for clip in cuts if clip.bucket == bucket] for bucket in buckets}


def _check_options(config: TrainConfig, spec: ModelSpec, plan: DatasetPlan) -> None:
    """Check options against the loaded model, as was done before only if the checkpoint's config was on disk.

    Raises:
        ConfigError: options do not fit the model.
    """
    windows = {clip.bucket for clip in plan.clips if clip.start is not None}
    problems = [
        *frame_problems(config.data, spec.facts, model=spec.name),
        *length_problems(config.data, spec.facts, plan.buckets, windows),
    ]
    if sorted(media_names := spec.facts.media) != sorted(dict(config.data.extra_columns)):
        message = f"this checkpoint takes {' and '.join(media_names) or 'nothing'} with each clip; set the columns"
        problems.append(Problem("--extra_columns", message, "mismatch"))
    if problems:
        raise ConfigError(problems)
