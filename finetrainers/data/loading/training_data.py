"""The training data of a run: from the dataset plan to the batches of every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.config.checks.frames import frame_problems, length_problems
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.models.spec import Batch, ModelSpec, Parts, tiled_for_memory
from finetrainers.parallel.ranks import Ranks
from finetrainers.utils.alive import work
from finetrainers.utils.phases import ENCODING_CLIPS, phase

from ..buckets.buckets import Bucket, bucket_text
from ..buckets.clip import Clip, all_cuts
from ..cache.encoder_index import remember_model
from ..cache.keys import CacheKeys, EncoderEntry
from ..cache.model_fingerprint import model_fingerprint
from ..inspect.plan import DatasetPlan
from .bad_samples import BadSample, BadSampleTracker, Substitutes
from .batch_sampler import MicroBatch, fixed_batches, sampler_for
from .encode import Encoder
from .loader import DecodeFetch, RawBatch, StepSampler, iterate_steps
from .position import DataPosition
from .precompute import CacheFetch, Encoded, precompute_masks, precompute_video
from .text_conditioning import TextConditioning, cache_directory


class TrainingData:
    """Batches of a run. With precomputation its clips are encoded when it is made.

    Attributes:
        vae: the VAE where clips are encoded as they come; None: every clip is in the cache.
        precomputed: what came of encoding clips beforehand, on all ranks together.
    """

    def __init__(
        self,
        plan: DatasetPlan,
        config: TrainConfig,
        *,
        spec: ModelSpec,
        parallel: Ranks,
        texts: TextConditioning,
        clip_encoders: Parts,
        data_position: DataPosition,
    ) -> None:
        """Args:
        plan: what is trained on.
        config: the run.
        spec: of the model.
        parallel: the processes of the run.
        texts: the captions.
        clip_encoders: encode the clips; freed where they are encoded beforehand.
        data_position: where in the data the run starts.
        """
        self.plan = plan
        self.config = config
        self.spec = spec
        self.parallel = parallel
        self.sampler = sampler_for(
            plan.clips, data_position, keep=dict(config.data.bucket_keep_prob),
            by_item=config.data.sliding_window_batching == "clip",
        )  # fmt: skip
        self._bad_samples = BadSampleTracker(
            parallel=parallel, share=config.data.max_bad_share, num_files=len({clip.path for clip in plan.clips})
        )
        self._events: list[dict[str, Any]] = []
        self._waited_s = 0.0  # for the clips of the last step
        self._epoch = -1  # the one that was counted last
        self._eval: list[tuple[Batch, bool]] | None = None
        self.precomputed: dict[str, Encoded] = {}
        _check_options(config, spec, plan)
        seed, encode_clip = config.training.seed, None
        strict: CacheFetch | DecodeFetch
        if texts.encode is None:
            self.vae: nn.Module | None = None
            strict = CacheFetch(self._encode_clips(texts.keys, clip_encoders), prior=plan.prior)
        else:
            self.vae, encode_clip = clip_encoders["vae"], partial(self._encode_clip, clip_encoders)
            strict = DecodeFetch(seed)
        self._encoder = Encoder(
            texts.encode, encode_clip, data=config.data, seed=seed, device=parallel.device, prior=plan.prior,
            shows_frames=texts.keys.texts_see_images,
            is_masked=any(clip.mask is not None for clip in (*plan.clips, *plan.eval_clips)),
        )  # fmt: skip
        # Only training clips have substitutes. Those of a held-out one would change what the evaluation loss is of.
        self._substitutes = Substitutes(all_cuts(plan.clips)) if config.data.max_bad_share else None
        self._fetch_strictly = plan.fetch_with(strict)
        self._fetch = plan.fetch_with(replace(strict, substitutes=self._substitutes))

    @phase(ENCODING_CLIPS)
    def _encode_clip(
        self, clip_encoders: Parts, video: Tensor, generators: Sequence[torch.Generator]
    ) -> Mapping[str, Tensor]:
        clip, *media = video.split(3, dim=1)
        named = dict(zip(sorted(self.spec.facts.media), media, strict=True))
        noise = generators if self.config.data.first_frame_noise else None
        return self.spec.encode_clip(clip_encoders, clip, noise, named)

    def _encode_clips(self, keys: CacheKeys, clip_encoders: Parts) -> CacheKeys:
        """Encode every clip that the cache does not have, on all ranks; the names of entries."""
        # Tiling changes latents a little at the seams.
        identity = model_fingerprint(clip_encoders.modules, tiling=bool(self.config.model.enable_tiling))
        vae = EncoderEntry(identity, self.spec.clip_version, self.spec.facts.first_frame_noise)
        keys = replace(keys, vae=vae, tiled=self.spec.tiles_by_size, tiled_late=partial(tiled_for_memory, self.spec))
        clips, loading = self.plan.encoded_clips(), self.config.dataloader
        optional = {clip.index for clip in self.plan.clips} if self.config.data.max_bad_share else ()
        encoded = precompute_video(
            clips, partial(self._encode_clip, clip_encoders), keys, self.parallel, loading=loading, optional=optional
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
        """This rank's micro-batches of optimizer steps `start`, `start + 1`, ... without end.

        What keeps one rank from loading is raised on all, and all know of clips that could not be used.

        Raises:
            BadSamplesError: too many of them.
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
            on_restart=lambda why: self._events.append({"kind": "loader_restarted", "why": why}),
        )
        for step in count(start):
            self._count_left_out(step)
            error: Exception | None = None
            bad: list[BadSample] = []
            batches: list[Batch] = []
            loaded: list[RawBatch] = []
            try:
                started = time.perf_counter()
                work(None if has_workers else "data")  # these have a time limit of their own
                loaded = next(raw_steps)
                self._waited_s = time.perf_counter() - started
                for raw in loaded:
                    work(("encode", raw.clips[0].bucket))
                    batches.append(self._encoder(raw))
                    bad += raw.bad
                work(None)
            except Exception as caught:  # whatever it is, the other ranks must not wait for this one
                error = caught
            if self._bad_samples.agree(bad, error) and self.parallel.sharing > 1:
                batches = self._as_neighbors(step, loaded, batches)
            yield batches

    def _as_neighbors(self, step: int, loaded: Sequence[RawBatch], batches: list[Batch]) -> list[Batch]:
        """The batches of a step, of the same clips on all ranks that share their samples.

        What one of them could not read, the others may have read: then none of them uses it.

        Raises:
            RuntimeError: more files cannot be read when the step is loaded again, on any rank.
        """
        found = {one.clip.path: one.reason for raw in loaded for one in raw.bad}
        used = [clip.index for raw in loaded for clip in raw.clips]
        rank, error = self.parallel.data_rank, None
        said = self.parallel.gather_objects([(rank, used, found)])
        ours = [one for one in said if one[0] == rank]
        if any(one[1] != used for one in ours):
            assert self._substitutes is not None, "what is unusable is an error otherwise"
            self._substitutes.unusable = {path: reason for one in ours for path, reason in one[2].items()}
            try:
                wanted = self.sampler.step(step, data_rank=rank, data_size=self.parallel.data_size)
                loaded = [self._fetch(one) for one in wanted]
                if {one.clip.path for raw in loaded for one in raw.bad} - self._substitutes.unusable.keys():
                    raise RuntimeError(
                        "files can be read at times, and at times not, so that ranks get different clips"
                    )
                batches = [self._encoder(raw) for raw in loaded]
            except Exception as caught:
                error = caught
            self._substitutes.unusable = {}
        self.parallel.raise_if_any_failed(error, "loading a batch again")
        return batches

    def _count_left_out(self, step: int) -> None:
        """At the first step of an epoch, say how many clips fall through all its buckets."""
        epoch = self.sampler.epoch_of(step)
        if epoch == self._epoch:
            return
        self._epoch = epoch
        left_out = self.sampler.left_out(epoch)
        if left_out:
            self._events.append({"kind": "left_out", "epoch": epoch, "clips": left_out})

    def news(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics of the last step, of the same names on every rank, and the events since the last call.

        `seconds/data` is how long the step has waited for its clips to be loaded.
        """
        events = [*self._bad_samples.events, *self._events]
        self._bad_samples.events.clear()
        self._events.clear()
        known = len(self._bad_samples.known)
        metrics = {"seconds/data": self._waited_s}
        return (metrics | {"bad_samples": float(known)} if known else metrics), events

    def dry_batches(self) -> Iterator[tuple[str, Batch]]:
        """A batch of each bucket, largest first, of the clips with the longest captions; the same on every rank."""
        for bucket, clips in longest_captions(self.plan.clips).items():
            wanted = MicroBatch(0, tuple(clips[: self.sampler.segment.size_of(bucket)]))
            [batch] = self._together([wanted], self._fetch, what="loading a dry batch")
            yield bucket_text(bucket), batch

    def trial_batches(self, bucket: Bucket, clips: int, *, micro_batches: int) -> Iterator[list[Batch]]:
        """The micro-batches of one step after another, without end: the clip of a bucket that has the longest caption, so many times.

        They are encoded again for each step, as in training. The clip is decoded once, before the first step.
        """
        [longest, *_] = longest_captions(self.plan.clips)[bucket]
        raw = self._fetch(MicroBatch(0, (longest,))).repeated(clips, weight=1 / micro_batches)
        while True:
            yield [self._encoder(raw, dropout=False) for _ in range(micro_batches)]

    def steps_for_epochs(self, epochs: int) -> int:
        """Optimizer steps that see every clip at least `epochs` times."""
        return self.sampler.steps_for_epochs(epochs)

    def eval_batches(self) -> list[tuple[Batch, bool]]:
        """This rank's held-out batches, without caption dropout, and whether each counts.

        All ranks have equally many, since sharded networks hang otherwise: the last batch is repeated where the
        number does not divide, and repeats do not count. Encoded once; the same objects every time.
        """
        if self._eval is None:
            batches = [(batch, True) for batch in fixed_batches(self.plan.eval_clips, self.sampler.segment)]
            missing = -len(batches) % self.parallel.data_size
            batches += [(batches[-1][0], False)] * missing
            share = batches[self.parallel.data_rank :: self.parallel.data_size]
            encoded = self._together([b for b, _ in share], self._fetch_strictly, what="loading held-out items")
            self._eval = [(batch, counts) for batch, (_, counts) in zip(encoded, share, strict=True)]
        return self._eval

    def _together(
        self, wanted: Sequence[MicroBatch], fetch: Callable[[MicroBatch], RawBatch], *, what: str
    ) -> list[Batch]:
        """Batches with their captions; what keeps one rank from loading is raised on all, which would wait for it."""
        with self.parallel.raise_on_all_ranks(what):
            batches = [self._encoder(fetch(one), dropout=False) for one in wanted]
        return batches


def longest_captions(clips: Sequence[Clip]) -> dict[Bucket, list[Clip]]:
    """The clips of each bucket that they may come in, those with the longest captions first; the largest bucket first."""
    cuts = sorted(all_cuts(clips), key=lambda clip: (-len(clip.caption), clip.index))
    buckets = sorted({clip.bucket for clip in cuts}, key=math.prod, reverse=True)
    return {bucket: [clip for clip in cuts if clip.bucket == bucket] for bucket in buckets}


def _check_options(config: TrainConfig, spec: ModelSpec, plan: DatasetPlan) -> None:
    """Compare options with the loaded model. They were before, but not where the checkpoint's config was not on disk.

    Raises:
        ConfigError: they do not go together.
    """
    windows = {clip.bucket for clip in plan.clips if clip.start is not None}
    found = [
        *frame_problems(config.data, spec.facts, model=spec.name),
        *length_problems(config.data, spec.facts, plan.buckets, windows),
    ]
    problems = [Problem(f"--{option}", reason) for option, reason in found]
    if sorted(takes := spec.facts.media) != sorted(dict(config.data.extra_columns)):
        message = f"this checkpoint takes {' and '.join(takes) or 'nothing'} with each clip; name the columns"
        problems.append(Problem("--extra_columns", message))
    if problems:
        raise ConfigError(problems)
