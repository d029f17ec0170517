"""Supervised finetuning: regress the network's output on the target of the noise process.

All randomness of a sample (posterior, noise, noise level, conditioning coin) comes from generators seeded by (seed,
purpose, epoch, item). A step is thus equal whatever the world size or accumulation, every rank sees different noise,
and resuming needs nothing but the step number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetrainers.config.frame_conditioning import draw_frames, select_conditioning_modes
from finetrainers.data.loading.training_data import TrainingData
from finetrainers.diffusion.timesteps import NoiseLevels
from finetrainers.models.spec import Batch, PromptEmbeds, VideoMeta
from finetrainers.utils.device import to_device
from finetrainers.utils.failures import InputError
from finetrainers.utils.seeding import derive_seed, generator

from .base import Evaluation, MethodParts, Metrics, Step, Summary, standard_normal
from .held_out import held_out_means
from .reference import Reference, reference_model


@dataclass(frozen=True)
class PriorBatch:
    """A micro-batch of the prior preservation loss: samples to be predicted with their prior prompts.

    It is a separate micro-batch so that the two losses are backpropagated in turn, which takes the memory of one.

    Attributes:
        clips: the samples.
        own_loss: loss and metrics of the micro-batch, instead of those of the method.
    """

    clips: Batch
    own_loss: Callable[[nn.Module, PriorBatch], tuple[Tensor, Metrics]]

    @property
    def latent_size(self) -> tuple[int, ...]:
        """Frames, height and width of every clip's latents."""
        return self.clips.latent_size

    def __len__(self) -> int:
        return len(self.clips)

    def split(self, pieces: int) -> list[PriorBatch]:
        """Return exactly `pieces` parts; see `Batch.split`."""
        return [replace(self, clips=piece) for piece in self.clips.split(pieces)]


@dataclass(frozen=True)
class NoisyClips:
    """Samples at their noise levels, with one time for each sample `[B]`, or for each of its latent frames `[B, T]`.

    Attributes:
        x0, eps, x_t: clean latents, noise, and noisy latents, `[B, C, T, H, W]` fp32.
        t: drawn process time.
        frame_t: process time of each frame, where frames differ.
        trained: 1 for frames that the loss counts, 0 for conditioning frames, or None if all count.
        meta: see `VideoMeta`.
        conditions: text conditioning.
        target: target of the network's prediction, like `x_t`.
        weight: loss weight of each time, like `t`, or None if all are 1.
        mask: weight of each latent in its sample's loss, `[B, 1, T, H, W]`, or None if all are 1.
    """

    x0: Tensor
    eps: Tensor
    x_t: Tensor
    t: Tensor
    frame_t: Tensor
    trained: Tensor | None
    meta: VideoMeta
    conditions: PromptEmbeds
    target: Tensor
    weight: Tensor | None = None
    mask: Tensor | None = None


class SFT:
    """Supervised finetuning of any registered model.

    A subclass with another `element_loss` is a method with another loss, for training and evaluation; one with another
    `loss` combines `noise_batch`, `predict` and `mean_loss` in its own way. `train(config, method=...)` takes it:

        class Huber(SFT):
            def element_loss(self, prediction, target):
                return torch.nn.functional.huber_loss(prediction, target, reduction="none", delta=0.1)
    """

    headline: tuple[str, ...] = ("loss", "eval_loss", "prior_loss", "eval_reward/")
    summaries: Mapping[str, Summary] = {"bad_samples": "last"}

    def __init__(self, parts: MethodParts[TrainingData]) -> None:
        config, geometry = parts.config, parts.geometry
        self.spec = parts.spec
        self.process = parts.process
        self.vae_stats = parts.vae_stats
        self.noise_levels = NoiseLevels(
            config.diffusion,
            is_flow=parts.process.is_flow,
            scheduler_config=dict(parts.scheduler.config),
            within=parts.spec.facts.noise_range,
        )
        self.draws_latents = config.diffusion.sample_posterior
        #: Transformer tokens per latent cell, for resolution-dependent shifts.
        self.tokens_per_latent = 1 / (geometry.patch_t * geometry.patch**2)
        data = config.data
        self.conditioning_modes = select_conditioning_modes(
            data.frame_conditioning, data.first_frame_conditioning_p, parts.spec.facts
        )
        has_windows = data.sliding_window_size is not None or data.dataset is not None  # chunks have no windows
        self.window_context = data.window_context if has_windows else 0
        self.frames_per_latent = geometry.temporal
        #: Whether all steps pass timesteps per latent frame. Conditioning frames in some steps would change their shape
        #: otherwise, and compiled blocks need a graph for each shape.
        gives_tokens = parts.spec.facts.first_frame == "tokens" and (self.conditioning_modes or self.window_context)
        self.expands_times = config.memory.compile != "none" and bool(gives_tokens)
        self.seed = config.training.seed
        self.batches = parts.source
        self.prior_weight = config.sft.prior_preservation_weight
        self.reference = reference_model(parts) if self.prior_weight else None

    @classmethod
    def class_problem(cls) -> str | None:
        """Return why a subclass cannot train, by its loss of two small tensors, or None if they do not show it."""
        prediction = torch.zeros(1, 2, 3, 4, 4, dtype=torch.float32, device="cpu")
        try:
            shape = cls.element_loss(cls.__new__(cls), prediction, torch.ones_like(prediction)).shape
        except Exception:  # it needs what `__init__` makes
            return None
        if shape == prediction.shape:
            return None
        message = "must return the loss of each element, without a reduction"
        return f"{cls.__name__}.element_loss {message}: of {list(prediction.shape)}, it returns {list(shape)}"

    def steps(self, start: int, transformer: nn.Module) -> Iterator[Step[Batch]]:
        for batches in self.batches.steps(start):
            metrics, events = self.batches.drain_events()
            yield Step([*batches, *self._priors(batches)], metrics=metrics, events=events)

    def dry_steps(self, transformer: nn.Module) -> Iterator[tuple[str, Step[Batch]]]:
        for name, batch in self.batches.dry_batches():
            yield name, Step([batch])
            for prior in self._priors([batch]):
                yield f"{name}, prior preservation", Step([prior])

    def benchmark_steps(self, bucket: tuple[int, int, int], clips: int, *, micro_batches: int) -> Iterator[Step[Batch]]:
        """Yield steps without end, each of `micro_batches` batches of `clips` clips from one bucket.

        See `TrainingData.benchmark_batches`.
        """
        for batches in self.batches.benchmark_batches(bucket, clips, micro_batches=micro_batches):
            yield Step([*batches, *self._priors(batches)])

    def _priors(self, batches: Sequence[Batch]) -> list[PriorBatch]:
        return [PriorBatch(batch, self._prior_loss) for batch in batches] if self.reference is not None else []

    def can_stop_after(self, step: int) -> bool:
        return True

    def loss(self, transformer: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        per_sample, weight = self.errors(transformer, batch, purpose="train", quantile=None)
        loss = _weighted_mean(per_sample, weight)
        loss = loss if batch.weight == 1.0 else loss * batch.weight
        metrics = {"loss": loss.detach()}
        if batch.mask is not None:  # a sample has an error of exactly 0 if its mask leaves nothing
            metrics["masked_out"] = (per_sample.detach() == 0).float().mean() * batch.weight
        return loss, metrics

    def _prior_loss(self, transformer: nn.Module, prior: PriorBatch) -> tuple[Tensor, Metrics]:
        """Return the mean squared difference of the network's predictions to the reference model's, with prior prompts.

        The noisy latents are those of the clips' own loss. Masks do not weigh it: abilities that a clip does not teach
        are also preserved. The metric is the difference without its weight.
        """
        batch = prior.clips
        assert self.reference is not None, "prior preservation requires a reference model"
        assert batch.prior is not None, "prior preservation requires prior prompts"
        noisy = replace(self.noise_batch(batch), conditions=batch.prior, mask=None, weight=None)
        # First, since the network's stored activations would add to the memory of this pass.
        with torch.no_grad(), self.reference(transformer) as network:
            teacher = self.predict(network, noisy)
        error = F.mse_loss(self.predict(transformer, noisy), teacher, reduction="none")
        difference = self.sample_means(error, noisy)[0].mean() * batch.weight
        return self.prior_weight * difference, {"prior_loss": difference.detach()}

    def eval_loss(self, transformer: nn.Module, batch: Batch, quantile: float) -> Tensor:
        """Return the unweighted loss `[B]` of each sample at one fixed noise-level quantile, with fixed noise."""
        return self.errors(transformer, batch, purpose="eval", quantile=quantile)[0]

    def errors(
        self, transformer: nn.Module, batch: Batch, *, purpose: str, quantile: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss per sample `[B]`, without conditioning latents, and its loss weight `[B]`.

        The weight is None if it is 1 for all samples, or if latent frames have separate noise levels: each frame's
        error is then weighted already. With masks the mean is weighted, sum(w error) / sum(w); it is 0 where nothing is
        left.

        Args:
            transformer: the network, or another network of the same model.
            batch: samples; those of equal keys get equal noise, noise level and conditioning.
            purpose: name of the random draws, which depend on it, on the seed of the run and on a sample's key.
            quantile: quantile of the noise level, without loss weights, or None to draw it.
        """
        noisy = self.noise_batch(batch, purpose=purpose, quantile=quantile)
        return self.sample_means(self.element_loss(self.predict(transformer, noisy), noisy.target), noisy)

    def predict(self, network: nn.Module, noisy: NoisyClips) -> Tensor:
        """Return the prediction of a network of the model for samples at their noise levels, like `x_t`, in fp32."""
        return self.spec.predict(network, noisy.x_t, noisy.frame_t, noisy.conditions, noisy.meta).float()

    def element_loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each element of a prediction, unreduced: here the squared error."""
        return F.mse_loss(prediction, target, reduction="none")

    def gains(
        self, transformer: nn.Module, reference: Reference, batch: Batch, *, purpose: str, quantile: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the reduction of `errors` by the network against the reference model `[B]`, and the loss weights.

        With predictions p and r and target t, (r - t)^2 - (p - t)^2 = (r - p)(r + p - 2t) before the mean: a difference
        of two means near 1 keeps few of its digits in fp32.
        """
        noisy = self.noise_batch(batch, purpose=purpose, quantile=quantile)
        prediction = self.predict(transformer, noisy)
        with torch.no_grad(), reference(transformer) as network:
            baseline = self.predict(network, noisy)
        return self.sample_means((baseline - prediction) * (baseline + prediction - 2 * noisy.target), noisy)

    def noise_batch(self, batch: Batch, *, purpose: str = "train", quantile: float | None = None) -> NoisyClips:
        """Return the samples at their noise levels, with targets and loss weights.

        Args:
            batch: samples; those of equal keys get equal noise, noise level and conditioning.
            purpose: name of the random draws, which depend on it, on the seed of the run and on a sample's key.
            quantile: quantile of the noise level, without loss weights, or None to draw it.
        """
        device = batch.moments.device
        generators = [generator("cpu", self.seed, purpose, *key) for key in batch.sample_keys]
        noise = None
        if self.draws_latents:
            noise = standard_normal(generators, self.spec.latent_shape(batch.moments), device)
        x0, context = self.spec.section(self.spec.latents(batch.moments, noise, self.vae_stats), generators)
        eps = standard_normal(generators, x0.shape[1:], device)
        t = self._times(generators, x0, quantile)

        # A section may have fewer frames than its clip; frames that `padded` adds are not conditioning frames.
        frames = min(x0.shape[2], batch.latent_size[0])
        meta, trained = self.spec.condition(batch, x0, self._given_frames(batch, frames, purpose), self.vae_stats)
        if context:
            meta = replace(meta, extra={**meta.extra, **context})
        frame_t = t if trained is None else t.view(len(x0), -1) * trained
        mask = None if batch.mask is None else self.spec.padded(batch.mask)
        assert mask is None or mask.shape[2:] == x0.shape[2:], "masks must be cut together with sections of clips"
        x_t = self.process.add_noise(x0, eps, frame_t)
        weight = None if quantile is not None else self.noise_levels.weight(t)
        return NoisyClips(
            x0, eps, x_t, t, self._expand_times(frame_t, x0), trained, meta, batch.conditions,
            self.process.target(x0, eps, t), weight, mask,
        )  # fmt: skip

    def sample_means(self, error: Tensor, noisy: NoisyClips) -> tuple[Tensor, Tensor | None]:
        """Return the mean of each sample's error `[B]`, without conditioning latents, and the weight left to apply.

        Args:
            error: losses by element, `[B, C, T, H, W]`.
            noisy: the samples; see `errors` for masks and weights.

        Raises:
            InputError: the losses are not by element.
        """
        if error.shape != noisy.x_t.shape:
            message = f"a loss of each element must be {list(noisy.x_t.shape)}, without a reduction"
            raise InputError(f"{message}, got {list(error.shape)}", "mismatch")
        weight, trained, mask = noisy.weight, noisy.trained, noisy.mask
        if trained is None and mask is None and noisy.t.ndim == 1:
            return error.flatten(1).mean(1), weight
        # A conditioning frame is an input, not a prediction: it is left out of the loss and the mean.
        per_frame = (error if mask is None else error * mask).mean(dim=(1, 3, 4))
        trained = torch.ones_like(per_frame) if trained is None else trained
        if weight is not None and weight.ndim == 2:
            per_frame, weight = per_frame * weight, None
        if mask is None:
            return (per_frame * trained).sum(1) / trained.sum(1), weight
        total = (mask.mean(dim=(1, 3, 4)) * trained).sum(1)
        return (per_frame * trained).sum(1) / torch.where(total > 0, total, 1.0), weight

    def mean_loss(self, error: Tensor, noisy: NoisyClips) -> Tensor:
        """Return the weighted mean of an error by element over all samples; see `sample_means`."""
        return _weighted_mean(*self.sample_means(error, noisy))

    def _times(self, generators: Sequence[torch.Generator], x0: Tensor, quantile: float | None) -> Tensor:
        """Return the process time of each sample `[B]`, or of each latent frame `[B, T]`; `quantile` applies to all."""
        frames = [] if self.spec.noise_per == "clip" else [x0.shape[2]]
        if quantile is None:
            num_tokens = round(x0[0, 0].numel() * self.tokens_per_latent)
            draws = [self.noise_levels.sample(generators, num_tokens) for _ in range(math.prod(frames))]
            quantiles = to_device(torch.stack(draws, dim=1) if frames else draws[0], x0.device)
        else:
            quantiles = self.noise_levels.map_to_range(torch.full((len(x0), *frames), quantile, device=x0.device))
        return self.process.time_from_quantile(quantiles)

    def _expand_times(self, t: Tensor, x0: Tensor) -> Tensor:
        """Return the process times for the network, expanded per latent frame if compiled blocks need one shape."""
        frames = x0.shape[2]
        return t[:, None].expand(-1, frames) if self.expands_times and t.ndim == 1 and frames > 1 else t

    def _given_frames(self, batch: Batch, frames: int, purpose: str) -> list[Collection[int]]:
        """Return the conditioning frames of each sample among `frames` latent frames.

        They are drawn on the host, so that nothing waits for the device. Windows from within a clip get their context,
        and all other samples get the frames drawn for them.
        """

        def drawn(key: tuple[int, int], is_inner_window: bool) -> Collection[int]:
            if self.window_context and is_inner_window:
                return range(self.window_context)
            if not self.conditioning_modes:
                return ()
            rng = random.Random(derive_seed(self.seed, purpose, "first_frame", *key))
            return draw_frames(self.conditioning_modes, frames, self.frames_per_latent, rng)

        inner_windows = batch.inner_windows or [False] * len(batch)
        return [drawn(key, inner) for key, inner in zip(batch.sample_keys, inner_windows, strict=True)]

    @property
    def evaluates(self) -> bool:
        return bool(self.batches.plan.eval_clips)

    def evaluate(self, transformer: nn.Module) -> Evaluation:
        return Evaluation(
            held_out_means(
                self.batches.eval_batches(),
                lambda batch, level: {"eval_loss": self.eval_loss(transformer, batch, level)},
                num_levels=self.batches.config.validation.eval_num_timesteps,
                parallel=self.batches.parallel,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise InputError(f"supervised finetuning has no state to restore, got {sorted(state)}", "mismatch")


def _weighted_mean(per_sample: Tensor, weight: Tensor | None) -> Tensor:
    # Multiplications by 1 are left out: they cost noticeable time with a small network.
    return (per_sample if weight is None else weight * per_sample).mean()
