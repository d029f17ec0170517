"""One rollout from prompts to advantages: sample, decode, score, compare. What is learnt from it is decided elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from finetrainers.methods.base import MethodParts
from finetrainers.rewards.pixels import to_uint8
from finetrainers.rewards.registry import on_device
from finetrainers.rewards.reward_set import RewardSet, Scores

from ..advantage import Advantages, best_of_n, compute_advantages
from ..keep.dancegrpo_files import DanceGRPOFiles
from ..keep.keep_pairs import PairKeeper
from ..keep.keep_rollouts import RolloutKeeper
from ..no_replay.gradient_plan import learns_in_rollout, plan_gradients, waiting_memory
from ..no_replay.no_replay import RolloutGradients, Taken
from ..prompts.prompts import Job
from ..prompts.source import PromptSource
from .sampler import Replay, Sampler
from .scoring import Scoring


@dataclass(frozen=True)
class Collected:
    """A `Rollout` of clips that are compared with each other.

    Attributes:
        latents: clean latents `[C, T, H, W]` by index, of the clips to train on; of the first one where there are none.
        replays: trained transitions of the same clips; empty without noise.
        advantages: `[n, K]` fp32, what a clip's advantage is the sum of; see `Advantages.terms`.
        taken: the gradient, where it has been taken while sampling.
    """

    jobs: Sequence[Job]
    latents: Mapping[int, Tensor]
    replays: Mapping[int, Replay]
    advantages: Tensor
    kept: Sequence[int]
    kept_by_rank: Sequence[int]
    stats: Mapping[str, float]
    taken: Taken | None = None

    @property
    def spare(self) -> Sequence[int]:
        return list(self.latents)


class Collector:
    """Makes rollouts. All ranks call it together; what they make does not depend on how many they are.

    Attributes:
        batch_size: clips sampled at once; training uses as many, so that both compute the same numbers.
        reward_fps: frame rate at which clips are scored; what is generated does not depend on it.
        panel: what scores clips.
        shown: writes some clips for people.
        learns: whether the rollout has the gradient.
        waits: what waits for advantages then.
    """

    def __init__(self, parts: MethodParts[PromptSource]) -> None:
        config, section = parts.config, parts.config.grpo
        self.section = section
        self.batch_size = config.dataloader.batch_size
        self.reward_fps = section.reward_fps or parts.geometry.fps
        self.parallel = parts.parallel
        self.source = parts.source
        self.sampler = Sampler(parts)
        self.panel = parts.parallel.in_turns(
            "loading the rewards",
            lambda: RewardSet(
                on_device(section.reward, section.reward_device),
                on_error=section.reward_on_error,
                failures=config.run.output_dir / "failed_rewards",
            ),
        )
        overlaps = section.overlap_rewards and parts.parallel.device.type == "cuda"
        self._stream = torch.cuda.Stream(parts.parallel.device) if overlaps else None
        self._vae_stats = parts.vae_stats
        self._gradients = plan_gradients(config) if learns_in_rollout(config) else None
        self.waits = waiting_memory(config) if self._gradients is not None else None
        folder = config.run.output_dir / "pairs"
        self._pairs = PairKeeper(folder, parts.parallel, fps=parts.geometry.fps) if section.keep_pairs else None
        self.shown = RolloutKeeper(config, parts.parallel, fps=parts.geometry.fps)
        self._files = DanceGRPOFiles(config, parts.parallel, fps=self.reward_fps) if section.dancegrpo_files else None

    @property
    def learns(self) -> bool:
        return self._gradients is not None

    def jobs(self, rollout: int) -> list[Job]:
        """This rank's clips: the clips of all prompts in order, cut into as many equal parts as there are ranks."""
        return self._jobs_by_rank(rollout)[self.parallel.data_rank]

    def _jobs_by_rank(self, rollout: int) -> list[list[Job]]:
        prompts, size = self.source.prompts_of(rollout), self.section.num_generations
        jobs = [Job(rollout, slot, prompt, g) for slot, prompt in enumerate(prompts) for g in range(size)]
        share, rest = divmod(len(jobs), self.parallel.data_size)
        if rest or share % self.batch_size:
            raise ValueError(
                f"{len(prompts)} prompts x {size} generations = {len(jobs)} clips do not divide into "
                f"{self.parallel.data_size} ranks x batches of {self.batch_size}; change --prompts_per_step, "
                "--num_generations or --batch_size"
            )
        return [jobs[start : start + share] for start in range(0, len(jobs), share)]

    def collect(self, transformer: nn.Module, rollout: int) -> Collected:
        """Sample this rank's clips of a rollout, have all clips scored, and compare them."""
        jobs, device = self.jobs(rollout), self.parallel.device
        spent = dict.fromkeys(("rollout", "decode", "reward"), 0.0)
        latents: list[Tensor] = []
        replays: list[Replay] = []
        videos: dict[int, Tensor] = {}  # by index on the host, of clips that may be written by this process
        scoring = Scoring(self.panel, spent, overlap=self.section.overlap_rewards, stream=self._stream)
        error: Exception | None = None
        taking = self._take_gradients(jobs)

        def sampled() -> Iterator[tuple[int, Tensor]]:
            for first in range(0, len(jobs), self.batch_size):
                chunk = jobs[first : first + self.batch_size]
                with timed(spent, "rollout", device):
                    conditions = self.source.conditions([job.prompt for job in chunk])
                    if taking is not None:
                        taking.steps = self._steps_of(rollout, first)
                    clean, found = self.sampler.rollout(transformer, chunk, conditions, taking)
                latents.extend(clean if taking is None else ())
                replays.extend(found)
                yield first, self.sampler.clips(clean, conditions)

        # Gradients that are taken while sampling wait for the scores of their batch, on every process of a group.
        for first, whole in self.parallel.take_turns(sampled()) if taking is None else sampled():
            prompts = [job.prompt for job in jobs[first : first + self.batch_size]]
            texts = [prompt.text for prompt in prompts]
            number = self.parallel.data_rank * len(jobs) + first
            try:
                if error is None:  # else only sample on: sharded ranks must call the network equally often
                    with timed(spent, "decode", device):
                        decoded = self.decode(whole)
                    with timed(spent, "reward", device):
                        about = {"fps": self.reward_fps, "images": self.source.pictures(prompts)}
                        scored = scoring.add(decoded, texts, rollout=rollout, first_clip=number, **about)
                    self._scored(taking, scored, spent)
                    if self.parallel.has_turn(first // self.batch_size):
                        videos |= self._show(jobs, first, decoded)
            except Exception as caught:
                error = caught
        with timed(spent, "reward", device):
            said, error = scoring.finish(error)
        # Another rank's reward may have failed, and would be waited for until the process group gives up.
        self.parallel.raise_if_any_failed(error, f"scoring the clips of rollout {rollout}")
        scores = Scores.in_order(self.parallel.gather_objects(said))
        compared = self.compare(scores)
        taken = self._taken(taking, compared, spent)
        stats = {"rollout": float(rollout), **self._stats(scores, compared, spent), **self._skipped(rollout, compared)}
        self._keep(jobs, videos, scores, compared, stats)
        return replace(self._select(jobs, latents, replays, compared, stats), taken=taken)

    def _show(self, jobs: Sequence[Job], first: int, decoded: Tensor) -> dict[int, Tensor]:
        """Write a batch's clips for people, and what of them may be written when all are compared, by index."""
        if self._files is not None:
            self._files.clips(jobs, first, decoded)
        return {
            index: to_uint8(video)
            for index, video in enumerate(decoded, start=first)
            if self._pairs is not None or self.shown.wants(jobs[index])
        }

    def _keep(
        self,
        jobs: Sequence[Job],
        videos: Mapping[int, Tensor],
        scores: Scores,
        found: Advantages,
        stats: Mapping[str, float],
    ) -> None:
        """Write what people and scripts read of a compared rollout; all ranks call it."""
        if self._pairs is not None:
            self._pairs.keep(jobs, videos, found)
        self.shown.keep(jobs, videos, scores, found)
        if self._files is not None:
            self._files.scores(jobs[0].rollout, stats)

    def _take_gradients(self, jobs: Sequence[Job]) -> RolloutGradients | None:
        """What takes gradients while sampling; None: transitions are replayed."""
        if self._gradients is None:
            return None

        def compare(scores: Scores) -> tuple[Advantages, Tensor]:
            found = self.compare(scores)
            return found, self._wanted(found)

        return RolloutGradients(
            self._gradients, self.section, jobs=jobs, parallel=self.parallel, compare=compare,
            weights=self.panel.weights, repeats=self.sampler.tables.num_trained,
        )  # fmt: skip

    def _scored(self, taking: RolloutGradients | None, scores: Scores | None, spent: dict[str, float]) -> None:
        """Train on what waits for the scores of a batch, where anything does."""
        if taking is None:
            return
        assert scores is not None, "gradients that are taken while sampling wait for scores"
        with timed(spent, "train", self.parallel.device):
            taking.scored(scores)

    def _taken(self, taking: RolloutGradients | None, found: Advantages, spent: dict[str, float]) -> Taken | None:
        """The gradient of a rollout that has taken any."""
        if taking is None:
            return None
        with timed(spent, "train", self.parallel.device):
            return taking.finish(found, self._wanted(found))

    def _steps_of(self, rollout: int, first: int) -> set[int]:
        """Steps at which clips of a batch are trained; where processes call the network together, of all their batches."""
        by_rank, tables = self._jobs_by_rank(rollout), self.sampler.tables
        mine = [by_rank[self.parallel.data_rank]]
        together = by_rank if self.parallel.forward_is_collective else mine
        batches = [job for jobs in together for job in jobs[first : first + self.batch_size]]
        return {step for slot in {job.slot for job in batches} for step in tables.trained(rollout, slot)}

    def decode(self, latents: Tensor) -> Tensor:
        """Clips `[B, T, C, H, W]` in [0, 1] on the CPU, of whole latents; see `Sampler.clips`."""
        return self.source.decode(latents, self._vae_stats)

    def dummy_rollout(self) -> Collected:
        """One batch of the first rollout's clips as if they had been sampled: of its shapes, and all zeros."""
        jobs, sampler = self.jobs(0)[: self.batch_size], self.sampler
        steps = torch.tensor(sampler.tables.trained(0, jobs[0].slot), dtype=torch.long)
        path = torch.zeros(len(steps), *sampler.shape, dtype=sampler.storage, device=sampler.keep_on)
        means = path.float() if sampler.keeps_means else None
        replay = Replay(steps, path, path, torch.zeros(len(steps), device=sampler.device), means)
        return Collected(
            jobs=jobs,
            latents=dict.fromkeys(range(len(jobs)), torch.zeros(sampler.shape, device=sampler.device)),
            replays=dict.fromkeys(range(len(jobs)), replay) if len(steps) else {},
            advantages=torch.zeros(len(jobs), 1),
            kept=range(len(jobs)),
            kept_by_rank=[len(jobs)] * self.parallel.data_size,
            stats={},
        )

    def compare(self, scores: Scores) -> Advantages:
        """Advantages `[P, G]` of all ranks' clips."""
        size = self.section.num_generations
        return compute_advantages(
            {name: head.normalized.view(-1, size) for name, head in scores.heads.items()},
            weights=self.panel.weights,
            failed=scores.failed.view(-1, size),
            section=self.section,
        )

    def _wanted(self, found: Advantages) -> Tensor:
        """The clips that are trained on, `[P, G]`: the best and worst of their group, none of a group that teaches nothing."""
        values = found.values
        wanted = torch.ones_like(values, dtype=torch.bool)
        if self.section.best_of_n is not None:
            wanted = torch.zeros_like(wanted)
            wanted.view(-1)[best_of_n(values, self.section.best_of_n, failed=found.failed).flatten()] = True
        wanted[list(found.constant)] = False
        wanted &= ~found.failed  # their advantage is 0, and they would only thin out the mean
        return wanted

    def _skipped(self, rollout: int, found: Advantages) -> dict[str, float]:
        """How many prompts were skipped for the rollout; what this one taught decides which are skipped next."""
        if self.section.selective_rollouts == 1:
            return {}
        return {"prompts_skipped": float(self.source.skipped(rollout, self._teaches(found)))}

    def _teaches(self, found: Advantages) -> list[bool | None]:
        """Of every prompt whether its clips differ in a score that counts; None where none of them has a score."""
        floor = self.section.advantage_std_floor
        counted = torch.stack([found.group_std[name] for name, weight in self.panel.weights.items() if weight])
        lost = found.failed.all(dim=1).tolist()
        differ = (counted > floor).any(dim=0).tolist()
        return [None if lost[i] else differ[i] and i not in found.constant for i in range(len(lost))]

    def _select(
        self,
        jobs: Sequence[Job],
        latents: list[Tensor],
        replays: list[Replay],
        found: Advantages,
        stats: dict[str, float],
    ) -> Collected:
        """This rank's clips, cut down to those that are trained on."""
        flat = self._wanted(found).flatten().tolist()
        share = len(jobs)
        counts = [sum(flat[start : start + share]) for start in range(0, len(flat), share)]
        start = self.parallel.data_rank * share
        kept = [i for i in range(share) if flat[start + i]]
        needed = kept or [0]  # to fill up with, where other ranks have some
        return Collected(
            jobs=jobs,
            latents={
                i: latents[i].clone() for i in needed if latents
            },  # they were parts of a batch, which would stay whole
            replays={i: replays[i] for i in needed if replays},
            advantages=found.terms.flatten(0, 1)[start : start + share].float(),
            kept=kept,
            kept_by_rank=counts,
            stats={**stats, "clips_trained": float(sum(counts))},
        )

    def _stats(self, scores: Scores, found: Advantages, spent: Mapping[str, float]) -> dict[str, float]:
        """Scores raw and normalized, spread within groups, share of groups that teach nothing, seconds by phase."""
        stats = score_stats(scores, self.panel.weights)
        for name, spread in found.group_std.items():
            stats[f"group_std/{name}"] = spread.nanmean().item()
        stats["constant_groups"] = found.constant_share
        stats["failed_clips"] = float(found.failed.sum())
        stats["advantage_abs"] = found.values.abs().mean().item()
        return stats | {f"seconds/{name}": seconds for name, seconds in spent.items()}


def score_stats(scores: Scores, weights: Mapping[str, float]) -> dict[str, float]:
    """Scores of a rollout, raw and normalized, and their weighted sum."""
    stats: dict[str, float] = {}
    for name, head in scores.heads.items():
        raw = head.raw[head.raw.isfinite()]
        stats[f"reward/{name}"] = raw.mean().item()
        stats[f"reward_std/{name}"] = raw.std(correction=0).item()
        stats[f"reward_min/{name}"] = min(raw.tolist(), default=math.nan)
        stats[f"reward_max/{name}"] = max(raw.tolist(), default=math.nan)
    for name, head in scores.heads.items():
        stats[f"reward_normalized/{name}"] = head.normalized[head.normalized.isfinite()].mean().item()
    counted = {name: weight for name, weight in weights.items() if weight}
    if counted.keys() <= scores.heads.keys():  # else one of them does not score every rollout
        stats["weighted_reward"] = sum(counted[name] * stats[f"reward_normalized/{name}"] for name in counted)
    return stats


@contextmanager
def timed(totals: MutableMapping[str, float], name: str, device: torch.device) -> Iterator[None]:
    """Add the seconds of a block to a named total, until the device has done what the block gave it to do."""
    _wait(device)
    start = time.perf_counter()
    yield
    _wait(device)
    totals[name] = totals.get(name, 0.0) + time.perf_counter() - start


def _wait(device: torch.device) -> None:
    """Wait for a device that works on its own; else the seconds of one block would be counted in a later one.

    Rewards that are scored meanwhile, in a stream of their own, are not waited for.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
