"""One rollout from prompts to advantages: sample, decode, score, compare. Training on it is the method's part."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finetrainers.config.grpo import prompts_per_process
from finetrainers.config.hacking import WITNESSED, witnesses
from finetrainers.methods.base import MethodParts
from finetrainers.rewards.pixels import to_uint8
from finetrainers.rewards.registry import on_device
from finetrainers.rewards.reward_set import RewardSet, Scores
from finetrainers.rewards.witnesses import Witnesses
from finetrainers.utils.failures import InputError

from ..advantage import Advantages, best_of_n, compute_advantages
from ..keep.dancegrpo_files import DanceGRPOFiles
from ..keep.keep_pairs import PairKeeper
from ..keep.keep_rollouts import RolloutKeeper
from ..prompts.prompts import RolloutSample
from ..prompts.source import PromptSource
from .batches import SharedInputs
from .clip_counts import shared_rows, shares_starts
from .sampler import Replay, Sampler, SharedStarts
from .scoring import Scoring

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutBatch:
    """A `Rollout` of clips that are compared with each other.

    Attributes:
        latents: clean latents `[C, T, H, W]` by index, of the clips to train on; of the first clip if there are none.
        replays: trained transitions of those clips; empty without noise.
        advantages: `[n, K]` fp32, the terms of each clip's advantage; see `Advantages.terms`.
        shared: inputs that clips share in their first trained step, or None if starts are not shared.
    """

    jobs: Sequence[RolloutSample]
    latents: Mapping[int, Tensor]
    replays: Mapping[int, Replay]
    advantages: Tensor
    trained_clips: Sequence[int]
    trained_by_rank: Sequence[int]
    stats: Mapping[str, float]
    shared: SharedInputs | None = None

    @property
    def spare(self) -> Sequence[int]:
        return list(self.latents)


class RolloutCollector:
    """Collector of rollouts. All ranks call it together; rollouts do not depend on the number of ranks.

    Attributes:
        batch_size: clips sampled at once; training uses as many, so that both compute equal numbers.
        reward_fps: frame rate at which clips are scored; it does not change the clips.
        panel: the rewards that score clips.
        witnesses: rewards that watch for reward hacking.
        shown: writes some clips for users to watch.
        shares_starts: whether the clips of a prompt are sampled as one until they differ; see `SharedStart`.
        shared_rows: clips of a call of the network that samples shared starts.
    """

    def __init__(self, parts: MethodParts[PromptSource]) -> None:
        config, section = parts.config, parts.config.grpo
        self.section = section
        self.batch_size = config.dataloader.batch_size
        self.reward_fps = section.reward_fps or parts.geometry.fps
        self.parallel = parts.parallel
        self.source = parts.source
        self.sampler = Sampler(parts, start_frames=parts.source.start_frames)
        self.panel = parts.parallel.one_at_a_time(
            "loading the rewards",
            lambda: RewardSet(
                on_device(section.reward, section.reward_device),
                on_error=section.reward_on_error,
                failures=config.run.output_dir / "failed_rewards",
            ),
        )
        self.witnesses = Witnesses(
            witnesses(config), parts.parallel, group=section.num_generations, fps=self.reward_fps,
            scored=-(-WITNESSED // section.prompts_per_step),
        )  # fmt: skip
        overlaps = section.overlap_rewards and parts.parallel.device.type == "cuda"
        self._stream = torch.cuda.Stream(parts.parallel.device) if overlaps else None
        self._vae_stats = parts.vae_stats
        self.shares_starts = shares_starts(config)
        self.shared_rows = shared_rows(config, parts.parallel.data_size)
        folder = config.run.output_dir / "pairs"
        self._pairs = PairKeeper(folder, parts.parallel, fps=parts.geometry.fps) if section.keep_pairs else None
        self.shown = RolloutKeeper(config, parts.parallel, fps=parts.geometry.fps)
        self._files = DanceGRPOFiles(config, parts.parallel, fps=self.reward_fps) if section.dancegrpo_files else None

    def jobs(self, rollout: int) -> list[RolloutSample]:
        """Return this rank's clips: the clips of all prompts in order, cut into one equal part for each rank."""
        return self._jobs_by_rank(rollout)[self.parallel.data_rank]

    def _jobs_by_rank(self, rollout: int) -> list[list[RolloutSample]]:
        prompts, size = self.source.rollout_prompts(rollout), self.section.num_generations
        jobs = [RolloutSample(rollout, slot, prompt, g) for slot, prompt in enumerate(prompts) for g in range(size)]
        share, rest = divmod(len(jobs), self.parallel.data_size)
        if rest or share % self.batch_size:
            raise InputError(
                f"{len(prompts)} prompts x {size} generations = {len(jobs)} clips must be a multiple of "
                f"{self.parallel.data_size} ranks x batches of {self.batch_size}; change --prompts_per_step, "
                "--num_generations or --batch_size",
                "conflict",
            )
        return [jobs[start : start + share] for start in range(0, len(jobs), share)]

    def collect(self, transformer: nn.Module, rollout: int) -> RolloutBatch:
        """Sample this rank's clips of a rollout, have all clips scored, and compare them."""
        jobs, device = self.jobs(rollout), self.parallel.device
        spent = dict.fromkeys(("rollout", "decode", "reward"), 0.0)
        latents: list[Tensor] = []
        replays: list[Replay] = []
        videos: dict[int, Tensor] = {}  # by index on the host, of clips that this process may write
        scoring = self._start_scoring(spent)
        error: Exception | None = None
        shared = self._shared_starts(transformer, rollout, spent) if self.shares_starts else {}

        def sampled() -> Iterator[tuple[int, Tensor]]:
            for first in range(0, len(jobs), self.batch_size):
                chunk = jobs[first : first + self.batch_size]
                with timed(spent, "rollout", device):
                    conditions = self.source.conditions([job.prompt for job in chunk])
                    clean, trajectories = self.sampler.rollout(transformer, chunk, conditions, shared.get(first))
                latents.extend(clean)
                replays.extend(trajectories)
                yield first, self.sampler.clips(clean, conditions)

        for first, clips in self.parallel.take_turns(sampled()):
            number = self.parallel.data_rank * len(jobs) + first
            try:
                if error is None:  # else only sample on: sharded ranks must call the network equally often
                    with timed(spent, "decode", device):
                        decoded = self.decode(clips)
                    self._score(scoring, decoded, jobs[first : first + self.batch_size], number, spent)
                    if self.parallel.owns_item(first // self.batch_size):
                        videos |= self._show(jobs, first, decoded)
            except Exception as caught:
                error = caught
        with timed(spent, "reward", device):
            batch_scores, error = scoring.finish(error)
        # Another rank's reward may have failed, and would be waited for until the process group gives up.
        self.parallel.raise_if_any_failed(error, f"scoring the clips of rollout {rollout}")
        scores = Scores.in_order(self.parallel.gather_objects(batch_scores))
        compared = self.compare(scores)
        self.warn_unscored(rollout, scores)
        stats = {"rollout": float(rollout), **self._stats(scores, compared, spent), **self.witnesses.stats()}
        stats |= self._count_skipped(rollout, compared)
        self._keep(jobs, videos, scores, compared, stats)
        return self._select(jobs, latents, replays, compared, stats)

    def _start_scoring(self, spent: dict[str, float]) -> Scoring:
        section = self.section
        group, overlap = section.num_generations, section.overlap_rewards
        return Scoring(self.panel, spent, overlap=overlap, stream=self._stream, group=group)

    def _score(
        self, scoring: Scoring, videos: Tensor, jobs: Sequence[RolloutSample], number: int, spent: dict[str, float]
    ) -> None:
        """Score a batch of clips by the rewards and the witnesses; see `Scoring.add`.

        `number` is that of the first clip within the rollout.
        """
        prompts, device = [job.prompt for job in jobs], self.parallel.device
        with timed(spent, "reward", device):
            scoring.add(
                videos, [prompt.text for prompt in prompts], fps=self.reward_fps, rollout=jobs[0].rollout,
                first_clip=number, images=self.source.reward_images(prompts),
                columns=[prompt.columns for prompt in prompts],
            )  # fmt: skip
        with timed(spent, "witness", device):
            self.witnesses.add(videos, number)

    def _show(self, jobs: Sequence[RolloutSample], first: int, decoded: Tensor) -> dict[int, Tensor]:
        """Write a batch's clips, and return those that may be written when all are compared, by index."""
        if self._files is not None:
            self._files.clips(jobs, first, decoded)
        return {
            index: to_uint8(video)
            for index, video in enumerate(decoded, start=first)
            if self._pairs is not None or self.shown.wants(jobs[index])
        }

    def _keep(
        self,
        jobs: Sequence[RolloutSample],
        videos: Mapping[int, Tensor],
        scores: Scores,
        advantages: Advantages,
        stats: Mapping[str, float],
    ) -> None:
        """Write the files that users and scripts read of a compared rollout; all ranks call it."""
        if self._pairs is not None:
            self._pairs.keep(jobs, videos, advantages)
        self.shown.keep(jobs, videos, scores, advantages)
        if self._files is not None:
            self._files.scores(jobs[0].rollout, stats)

    def _shared_starts(self, transformer: nn.Module, rollout: int, spent: dict[str, float]) -> dict[int, SharedStarts]:
        """Return the shared starts of each batch of this rank's clips, by the batch's first clip."""
        with timed(spent, "rollout", self.parallel.device):
            return self.sampler.start_batches(
                transformer, self.jobs(rollout), self._jobs_together(rollout),
                lambda jobs: self.source.conditions([job.prompt for job in jobs]),
                batch_size=self.batch_size, rows=self.shared_rows,
                calls=-(-prompts_per_process(self.section, self.parallel.data_size) // self.shared_rows),
            )  # fmt: skip

    def _jobs_together(self, rollout: int) -> list[list[RolloutSample]]:
        """Return the clips of each process that calls the network together with this one, its own included."""
        by_rank = self._jobs_by_rank(rollout)
        return by_rank if self.parallel.forward_is_collective else [by_rank[self.parallel.data_rank]]

    def decode(self, latents: Tensor) -> Tensor:
        """Return clips `[B, T, C, H, W]` in [0, 1] on the CPU, of complete latents; see `Sampler.clips`."""
        return self.source.decode(latents, self._vae_stats)

    def warn_unscored(self, rollout: int, scores: Scores) -> None:
        """Warn, on rank 0, if a reward has scored no clip of a rollout."""
        names = [name for name, head in scores.heads.items() if not head.raw.isfinite().any()]
        if names and self.parallel.is_main:
            effect = ", so nothing is learned from it" if scores.failed.all() else ""
            logger.warning("rollout %d: no clip has a score of %s%s", rollout, ", ".join(names), effect)

    def dummy_rollout(self) -> RolloutBatch:
        """Return the first rollout as if it had been sampled: its shapes, filled with zeros."""
        jobs, sampler, trained = self.jobs(0), self.sampler, self.section.best_of_n or self.section.num_generations
        slots = [[job.slot for job in each if job.generation < trained] for each in self._jobs_by_rank(0)]
        steps = torch.tensor(sampler.tables.trained(0, jobs[0].slot), dtype=torch.long)
        path = torch.zeros(len(steps), *sampler.shape, dtype=sampler.storage, device=sampler.keep_on)
        means = path.float() if sampler.keeps_means else None
        replay = Replay(steps, path, path, torch.zeros(len(steps), device=sampler.device), means)
        return RolloutBatch(
            jobs=jobs,
            latents=dict.fromkeys(range(len(jobs)), torch.zeros(sampler.shape, device=sampler.device)),
            replays=dict.fromkeys(range(len(jobs)), replay) if len(steps) else {},
            advantages=torch.zeros(len(jobs), 1),
            trained_clips=[i for i, job in enumerate(jobs) if job.generation < trained],
            trained_by_rank=list(map(len, slots)),
            stats={},
            shared=self._shared_inputs(0, slots) if self.shares_starts else None,
        )

    def compare(self, scores: Scores) -> Advantages:
        """Return the advantages `[P, G]` of all ranks' clips."""
        size = self.section.num_generations
        return compute_advantages(
            {name: head.normalized.view(-1, size) for name, head in scores.heads.items()},
            weights=self.panel.weights,
            failed=scores.failed.view(-1, size),
            section=self.section,
        )

    def _mask_trained(self, advantages: Advantages) -> Tensor:
        """Return a mask of the clips that are trained on, `[P, G]`.

        These are the best and worst of their group, and none of a group that teaches nothing.
        """
        values = advantages.values
        trained = torch.ones_like(values, dtype=torch.bool)
        if self.section.best_of_n is not None:
            trained = torch.zeros_like(trained)
            trained.view(-1)[best_of_n(values, self.section.best_of_n, failed=advantages.failed).flatten()] = True
        trained[list(advantages.constant)] = False
        trained &= ~advantages.failed  # their advantage is 0, and they would only dilute the mean
        return trained

    def _count_skipped(self, rollout: int, advantages: Advantages) -> dict[str, float]:
        """Return the number of prompts skipped for the rollout; its scores decide which are skipped next."""
        if self.section.selective_rollouts == 1:
            return {}
        return {"prompts_skipped": float(self.source.skipped(rollout, self._teaches(advantages)))}

    def _teaches(self, advantages: Advantages) -> list[bool | None]:
        """Return for every prompt whether its clips differ in a score that counts, or None without any score."""
        floor = self.section.advantage_std_floor
        counted = torch.stack([advantages.group_std[name] for name, weight in self.panel.weights.items() if weight])
        lost = advantages.failed.all(dim=1).tolist()
        differ = (counted > floor).any(dim=0).tolist()
        return [None if lost[i] else differ[i] and i not in advantages.constant for i in range(len(lost))]

    def _select(
        self,
        jobs: Sequence[RolloutSample],
        latents: list[Tensor],
        replays: list[Replay],
        advantages: Advantages,
        stats: dict[str, float],
    ) -> RolloutBatch:
        """Return this rank's clips, cut down to those that are trained on."""
        flat = self._mask_trained(advantages).flatten().tolist()
        share = len(jobs)
        size, starts = self.section.num_generations, range(0, len(flat), share)
        slots = [[i // size for i in range(start, start + share) if flat[i]] for start in starts]  # of trained clips
        start = self.parallel.data_rank * share
        trained = [i for i in range(share) if flat[start + i]]
        needed = trained or [0]  # fills up micro-batches where other ranks train some clips
        return RolloutBatch(
            jobs=jobs,
            latents={i: latents[i].clone() for i in needed},  # views would keep the batch in memory
            replays={i: replays[i] for i in needed if replays},
            advantages=advantages.terms.flatten(0, 1)[start : start + share].float(),
            trained_clips=trained,
            trained_by_rank=list(map(len, slots)),
            stats={**stats, "clips_trained": float(sum(map(len, slots)))},
            shared=self._shared_inputs(jobs[0].rollout, slots) if self.shares_starts else None,
        )

    def _shared_inputs(self, rollout: int, slots_by_rank: Sequence[Sequence[int]]) -> SharedInputs:
        """Return which clips share the input of their first trained step: that at which they get noise first."""
        tables, slots = self.sampler.tables, {slot for slots in slots_by_rank for slot in slots}
        shared = {slot for slot in slots if tables.trained(rollout, slot)[0] == tables.first_stochastic(rollout, slot)}
        inputs = [[slot if slot in shared else None for slot in slots] for slots in slots_by_rank]
        return SharedInputs(inputs, self.shared_rows)

    def _stats(self, scores: Scores, advantages: Advantages, spent: Mapping[str, float]) -> dict[str, float]:
        """Return scores raw and normalized, spread within groups, share of groups that teach nothing, and seconds."""
        stats = score_stats(scores, self.panel.weights, group=self.section.num_generations)
        for name, spread in advantages.group_std.items():
            stats[f"group_std/{name}"] = spread.nanmean().item()
        stats["constant_groups"] = advantages.constant_share
        stats["failed_clips"] = float(advantages.failed.sum())
        stats["advantage_abs"] = advantages.values.abs().mean().item()
        return stats | {f"seconds/{name}": seconds for name, seconds in spent.items()}


def score_stats(scores: Scores, weights: Mapping[str, float], *, group: int) -> dict[str, float]:
    """Return the scores of a rollout, raw and normalized, and their weighted sum with its standard error over prompts.

    `group` is the number of clips of a prompt.
    """
    stats: dict[str, float] = {}
    for name, head in scores.heads.items():
        raw = head.raw[head.raw.isfinite()]
        stats[f"reward/{name}"] = raw.mean().item()
        stats[f"reward_std/{name}"] = raw.std(correction=0).item() if len(raw) else math.nan  # without torch's warning
        stats[f"reward_min/{name}"] = min(raw.tolist(), default=math.nan)
        stats[f"reward_max/{name}"] = max(raw.tolist(), default=math.nan)
        if len(raw) < len(head.raw):
            stats[f"no_score/{name}"] = float(len(head.raw) - len(raw))
    for name, head in scores.heads.items():
        stats[f"reward_normalized/{name}"] = head.normalized[head.normalized.isfinite()].mean().item()
    counted = {name: weight for name, weight in weights.items() if weight}
    if counted.keys() <= scores.heads.keys():  # else one of them does not score every rollout
        stats["weighted_reward"] = sum(counted[name] * stats[f"reward_normalized/{name}"] for name in counted)
        by_clip = sum(weight * scores.heads[name].normalized.nan_to_num(0.0) for name, weight in counted.items())
        by_prompt = torch.as_tensor(by_clip).view(-1, group).mean(1)
        if len(by_prompt) > 1:
            stats["weighted_reward_error"] = (by_prompt.std() / len(by_prompt) ** 0.5).item()
    return stats


@contextmanager
def timed(totals: MutableMapping[str, float], name: str, device: torch.device) -> Iterator[None]:
    """Add the seconds of a block to a named total, including the work that it queues on the device."""
    _wait(device)
    start = time.perf_counter()
    yield
    _wait(device)
    totals[name] = totals.get(name, 0.0) + time.perf_counter() - start


def _wait(device: torch.device) -> None:
    """Wait for a device that works asynchronously; else the seconds of one block would be counted in a later one.

    Rewards that are scored meanwhile, in a separate stream, are not waited for.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
