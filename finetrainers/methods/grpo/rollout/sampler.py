"""Sampling with the network in training: clips, and the data that replaying their trained transitions takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from finetrainers.diffusion.policy import Transitions, log_densities, log_density, sample, transition_mean
from finetrainers.diffusion.process import expand
from finetrainers.methods.base import MethodParts, standard_normal
from finetrainers.models.spec import DTYPES, PromptEmbeds, VideoMeta
from finetrainers.utils.alive import send_heartbeat
from finetrainers.utils.device import to_device

from ..prompts.prompts import RolloutSample
from .tables import StepTables, rollout_times


@dataclass(frozen=True)
class Replay:
    """The K trained transitions of a clip; latents in the storage dtype, the rest in fp32.

    Attributes:
        steps: indices of the sampler's steps, `[K]`.
        before, after: latents on both sides of the transition, `[K, C, T, H, W]`.
        log_old: log-density of the transition under the policy that made it, `[K]`.
        mean_old: mean of the transition under that policy, like `before`, or None if it is not needed.
    """

    steps: Tensor
    before: Tensor
    after: Tensor
    log_old: Tensor
    mean_old: Tensor | None = None


class SharedStart(NamedTuple):
    """Sampling that all clips of a prompt share: until the mean of their first stochastic transition.

    Attributes:
        step: the sampler's step of that transition.
        before: latents before it, `[C, T, H, W]`.
        mean: its mean, like `before`.
    """

    step: int
    before: Tensor
    mean: Tensor


class SharedStarts(NamedTuple):
    """Shared starts of the clips of a batch.

    Attributes:
        starts: the start of each clip.
        begin: first step of the starts in this batch of all processes that call the network together.
    """

    starts: Sequence[SharedStart]
    begin: int


class Sampler:
    """The denoising of clips of the configured size, identical in rollout and replay.

    Attributes:
        tables: the transitions of a rollout's clips.
        process: the noise process.
        times: process times of the steps, `[S]`.
        shape: shape `(C, T, H, W)` of the latents that are denoised: without the latent frames that a conditioning
            image provides.
        device: device on which clips are sampled.
        storage, keep_on, keeps_means: dtype and device in which transitions are stored, and whether with their means.
    """

    def __init__(self, parts: MethodParts[Any], *, start_frames: int = 0) -> None:
        """Args:
        parts: of the run.
        start_frames: latent frames that a conditioning image provides.
        """
        section, geometry, size = parts.config.grpo, parts.geometry, parts.config.grpo.rollout_size
        assert size is not None, "checked before anything is loaded"
        network: Any = parts.network
        self.spec, self.process = parts.spec, parts.process
        self.times = rollout_times(section, parts.spec, parts.scheduler, num_tokens=geometry.num_tokens(*size))
        self.tables = StepTables(parts.config, parts.process, self.times, parts.spec.facts)
        frames, height, width = geometry.denoised_shape(*size)
        self.shape = (parts.spec.latent_channels(network), frames - start_frames, height, width)
        self.device = parts.parallel.device
        self.storage = DTYPES[section.trajectory_dtype]
        self.keep_on = torch.device("cpu") if section.offload_trajectory else self.device
        self._num_frames = geometry.latent_shape(*size)[0]
        self._fps = geometry.fps
        self._guidance = parts.spec.facts.guidance if section.rollout_guidance is None else section.rollout_guidance
        self._cfg = section.rollout_cfg
        self.keeps_means = section.ratio_norm
        self._same_noise = section.init_same_noise
        self._seed = parts.config.training.seed

    def predict(self, transformer: nn.Module, x: Tensor, t: Tensor, conditions: PromptEmbeds) -> Tensor:
        """Return the network's prediction in fp32, guided: empty + cfg (prompt - empty), both in one call.

        Conditioning frames have noise level 0. They are not predicted, so they get no noise and do not count in a
        transition's density.

        Args:
            transformer: the (wrapped) network.
            x, t: noisy latents and process times, `[B, ...]`.
            conditions: conditioning of the prompts; with guidance, equally many rows of the empty prompt follow.
        """
        send_heartbeat()
        rows = len(x)
        if len(conditions) > rows:
            x, t = torch.cat([x, x]), torch.cat([t, t])
        fps = torch.full((len(x),), self._fps, device=x.device)
        meta, start = VideoMeta(fps, conditions.extra, self._guidance), conditions.start
        if start is None:
            prediction = self.spec.predict(transformer, x, t, conditions, meta).float()
        else:
            times = torch.cat(
                [torch.zeros_like(t)[:, None].expand(-1, start.shape[2]), t[:, None].expand(-1, x.shape[2])], 1
            )
            with_start = self.spec.predict(transformer, torch.cat([start, x], dim=2), times, conditions, meta)
            prediction = with_start[:, :, start.shape[2] :].float()
        if len(x) == rows:
            return prediction
        with_prompt, without = prediction.chunk(2)
        return without + self._cfg * (with_prompt - without)

    def clips(self, latents: Tensor, conditions: PromptEmbeds) -> Tensor:
        """Return latents with their conditioning frames, without frames that only complete temporal patches."""
        if conditions.start is not None:
            latents = torch.cat([conditions.start[: len(latents)].to(latents.dtype), latents], dim=2)
        return latents[:, :, -self._num_frames :]

    def denoised(self, clips: Tensor) -> Tensor:
        """Return the part of `clips` that is denoised, in its position; zeros where there are further frames."""
        frames = min(self.shape[1], self._num_frames)
        latents = clips.new_zeros(len(clips), *self.shape)
        latents[:, :, -frames:] = clips[:, :, -frames:]
        return latents

    def time(self, step: Tensor) -> Tensor:
        """Return the process time of each clip's step, `[B]`."""
        return to_device(self.times[step.cpu()], self.device)

    def noise(self, jobs: Sequence[RolloutSample], stream: str, *, per_group: bool = False) -> Tensor:
        """Return noise of each clip for one purpose, `[B, C, T, H, W]`; see `RolloutSample.generator`."""
        generators = [job.generator(self._seed, stream, per_group=per_group) for job in jobs]
        return standard_normal(generators, self.shape, self.device)

    @torch.no_grad()
    def shared_starts(
        self, transformer: nn.Module, jobs: Sequence[RolloutSample], conditions: PromptEmbeds, *, last: int
    ) -> list[SharedStart]:
        """Return the start of each clip, which all clips of its prompt share if they start from the same noise.

        Args:
            transformer: the (wrapped) network, in the mode in which it will be trained.
            jobs: one clip of each prompt.
            conditions: see `predict`.
            last: last of the first stochastic steps, of all processes that call the network together.
        """
        tables = [self.tables.group_transitions(job.rollout, job.slot) for job in jobs]
        firsts = [self.tables.first_stochastic(job.rollout, job.slot) for job in jobs]
        starts: dict[int, SharedStart] = {}
        x = self.noise(jobs, "start", per_group=True).to(self.storage).float()
        for step in range(last + 1):
            time, now = self.time(torch.full((len(x),), step)), self._coefficients(tables, step)
            prediction = self.predict(self.spec.network_at(float(self.times[step]), transformer), x, time, conditions)
            mean = transition_mean(self.process, prediction, x, time, now)
            starts |= {row: SharedStart(step, x[row], mean[row]) for row, first in enumerate(firsts) if first == step}
            x = sample(mean, torch.zeros_like(x), now.std, storage=self.storage)
        return [starts[row] for row in range(len(jobs))]

    def start_batches(
        self, transformer: nn.Module, jobs: Sequence[RolloutSample], together: Sequence[Sequence[RolloutSample]],
        conditions: Callable[[Sequence[RolloutSample]], PromptEmbeds], *, batch_size: int, rows: int, calls: int,
    ) -> dict[int, SharedStarts]:  # fmt: skip
        """Return the shared starts of each batch of this process's clips, by the batch's first clip.

        Args:
            transformer: the (wrapped) network.
            jobs: the clips.
            together: the clips of each process that calls the network together with this one, its own included.
            conditions: returns the conditioning of clips; see `predict`.
            batch_size: clips of a batch.
            rows, calls: clips of each call of the network, and number of calls, equal on every process.
        """
        rollout = jobs[0].rollout
        firsts = [[self.tables.first_stochastic(rollout, job.slot) for job in clips] for clips in together]
        prompts = list({job.slot: job for job in jobs}.values())
        prompts += prompts[:1] * (calls * rows - len(prompts))
        starts: dict[int, SharedStart] = {}
        for first in range(0, len(prompts), rows):
            chunk = prompts[first : first + rows]
            sampled = self.shared_starts(transformer, chunk, conditions(chunk), last=max(map(max, firsts)))
            starts |= {job.slot: start for job, start in zip(chunk, sampled, strict=True)}
        return {
            first: SharedStarts(
                [starts[job.slot] for job in jobs[first : first + batch_size]],
                begin=min(min(steps[first : first + batch_size]) for steps in firsts),
            )
            for first in range(0, len(jobs), batch_size)
        }

    def rollout(
        self,
        transformer: nn.Module,
        jobs: Sequence[RolloutSample],
        conditions: PromptEmbeds,
        shared: SharedStarts | None = None,
    ) -> tuple[Tensor, list[Replay]]:
        """Sample clips of a rollout: clean latents `[B, C, T, H, W]`, and the replay data of each clip.

        Args:
            transformer: the (wrapped) network, in the mode in which it will be trained.
            jobs: the clips.
            conditions: see `predict`.
            shared: the shared starts of the clips, or None if each is sampled from noise.
        """
        if shared is None:
            x = self.noise(jobs, "start", per_group=self._same_noise)
        else:
            x = torch.stack([start.before for start in shared.starts])
        return self.denoise(transformer, x, conditions, jobs, shared)

    @torch.no_grad()
    def denoise(
        self, transformer: nn.Module, x: Tensor, conditions: PromptEmbeds, jobs: Sequence[RolloutSample] = (),
        shared: SharedStarts | None = None,
    ) -> tuple[Tensor, list[Replay]]:  # fmt: skip
        """Denoise from pure noise `x`, or from shared starts; see `rollout`.

        Without jobs, all transitions are deterministic and none is stored.
        """
        tables = [self.tables.group_transitions(job.rollout, job.slot) for job in jobs]
        tables = tables or [self.tables.deterministic] * len(x)
        trained = torch.tensor([self.tables.trained(job.rollout, job.slot) for job in jobs])
        starts, begin = ((), 0) if shared is None else shared
        firsts = torch.tensor([start.step for start in starts] or [-1] * len(x))
        means = torch.stack([start.mean for start in starts]) if starts else x
        stored: list[tuple[list[int], list[Tensor]]] = []
        x = x.to(self.storage).float()  # stored latents must equal those that the network has seen
        for step in range(begin, len(self.times)):
            now = self._coefficients(tables, step)
            time = self.time(torch.full((len(x),), step))
            network = self.spec.network_at(float(self.times[step]), transformer)
            noise = torch.zeros_like(x)
            if any(float(table.std[step]) > 0 for table in tables):
                noise = self.noise(jobs, f"step {step}")
            if starts and step == begin:  # no clip has diverged from its prompt's others yet
                mean = means
            else:
                prediction = self.predict(network, x, time, conditions)
                mean = self._choose(firsts == step, means, transition_mean(self.process, prediction, x, time, now))
            after = self._choose(firsts > step, x, sample(mean, noise, now.std, storage=self.storage))
            rows = (trained == step).nonzero()[:, 0]
            if len(rows):
                # Over the whole batch, as in replay: sums over fewer rows may run in another order.
                std = now.std.clamp_min(torch.finfo(torch.float32).tiny)
                log_old = log_density(after, mean, std)
                if bool((firsts == step).any()):
                    log_old = self._choose(firsts == step, log_densities(after, mean, std), log_old)
                stored.append(
                    (rows.tolist(), self._replay_tensors(to_device(rows, self.device), x, after, log_old, mean))
                )
            x = after
        return x, _group_by_clip(stored, trained)

    def _coefficients(self, tables: Sequence[Transitions], step: int) -> Transitions:
        """Return the coefficients of a step, one per clip, `[B]` fp32 on the device."""
        by_clip = (torch.stack([c[step] for c in coefficients]) for coefficients in zip(*tables, strict=True))
        return Transitions(*(to_device(c.float(), self.device) for c in by_clip))

    def _choose(self, rows: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
        """Return `chosen` in the given rows, a mask `[B]` on the host, and `others` in the rest."""
        if not bool(rows.any()):
            return others
        return torch.where(expand(to_device(rows, self.device), others), chosen, others)

    def _replay_tensors(
        self, rows: Tensor, before: Tensor, after: Tensor, log_old: Tensor, mean: Tensor
    ) -> list[Tensor]:
        """Return the tensors of a step that replaying some rows takes, in the order of `Replay`."""
        latents = [tensor[rows].to(self.keep_on, self.storage) for tensor in (before, after)]
        means = [mean[rows].to(self.keep_on)] if self.keeps_means else []
        return [*latents, log_old[rows], *means]


def _group_by_clip(stored: Sequence[tuple[list[int], list[Tensor]]], trained: Tensor) -> list[Replay]:
    """Return replays by clip of tensors stored by step; each has separate memory, so that some can be dropped."""
    by_row: dict[int, list[list[Tensor]]] = defaultdict(list)
    for rows, tensors in stored:
        for i, row in enumerate(rows):
            by_row[row].append([tensor[i] for tensor in tensors])
    return [
        Replay(trained[row].clone(), *(torch.stack(steps) for steps in zip(*by_row[row], strict=True)))
        for row in sorted(by_row)
    ]
