"""Evaluation on held-out prompts, sampled without noise on the way from starts that never change, and scored."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from finetrainers.config.hacking import trained_labels
from finetrainers.methods.base import Evaluation, MethodParts, standard_normal
from finetrainers.rewards.registry import on_device
from finetrainers.rewards.reward_set import HeadScores, RewardSet, Scores
from finetrainers.utils.seeding import generator

from ..prompts.source import PromptSource
from .collect import RolloutCollector


class PromptEvaluation:
    """Scores of the evaluation prompts, comparable over steps, runs and world sizes.

    Attributes:
        prompts: prompts to be sampled, one clip each.
        panel: the evaluation rewards, or else the rewards trained on.
    """

    def __init__(self, parts: MethodParts[PromptSource], collector: RolloutCollector) -> None:
        """Load the evaluation rewards; `collector` samples and decodes clips."""
        section = parts.config.grpo
        self.collector = collector
        self.prompts = parts.source.plan.eval_prompts
        self.panel = collector.panel
        rewards = parts.config.validation.eval_reward
        if self.prompts and rewards:
            self.panel = parts.parallel.one_at_a_time(
                "loading the evaluation rewards",
                lambda: RewardSet(on_device(rewards, section.reward_device), on_error=section.reward_on_error),
            )
        entries = rewards if self.prompts and rewards else section.reward
        self._trained = trained_labels(section.reward, entries)
        self._seed = parts.config.training.seed

    def run(self, transformer: nn.Module) -> Evaluation:
        """Sample and score this rank's share of the prompts, and gather the scores of all ranks."""
        collector, parallel = self.collector, self.collector.parallel
        share = -(-len(self.prompts) // parallel.data_size)
        first = parallel.data_rank * share
        indices = list(range(len(self.prompts)))[first : first + share]
        clips: list[tuple[int, str, Tensor]] = []
        batch_scores: list[tuple[int, Scores]] = []
        error: Exception | None = None
        # Where a forward pass is collective, every rank makes equally many; a rank without prompts repeats one.
        chunks = (indices[start : start + collector.batch_size] for start in range(0, share, collector.batch_size))
        batches = ((chunk, self._sample(transformer, chunk or [0])) for chunk in chunks)
        for chosen, latents in parallel.take_turns(batches):
            texts = [self.prompts[i].text for i in chosen]
            try:
                if chosen and error is None:  # else only sample on, as long as the other ranks do
                    videos, fps = collector.decode(latents), collector.reward_fps
                    clips += zip(chosen, texts, videos, strict=True)
                    images = collector.source.reward_images([self.prompts[i] for i in chosen])
                    columns = [self.prompts[i].columns for i in chosen]
                    scores = self.panel.score(
                        videos, texts, fps=fps, first_clip=chosen[0], images=images, columns=columns
                    )
                    batch_scores.append((chosen[0], scores))
            except Exception as caught:
                error = caught
        parallel.raise_if_any_failed(error, "scoring the clips of the evaluation")
        heads = Scores.in_order(parallel.gather_objects(batch_scores)).heads
        return Evaluation(self._record(heads), clips)

    def _record(self, heads: Mapping[str, HeadScores]) -> dict[str, float]:
        """Return mean raw scores with their standard errors, and the trained reward if the evaluation has all of it."""
        record = {f"eval_reward/{name}": head.raw[head.raw.isfinite()].mean().item() for name, head in heads.items()}
        for name, head in heads.items():
            raw = head.raw[head.raw.isfinite()]
            if len(raw) > 1:
                record[f"eval_reward_error/{name}"] = (raw.std() / len(raw) ** 0.5).item()
        if self._trained:
            normalized = {name: heads[name].normalized for name in self._trained}
            means = {name: scores[scores.isfinite()].mean().item() for name, scores in normalized.items()}
            record["eval_weighted_reward"] = sum(weight * means[name] for name, weight in self._trained.items())
        return record

    def _sample(self, transformer: nn.Module, chosen: list[int]) -> Tensor:
        sampler = self.collector.sampler
        generators = [generator("cpu", self._seed, "evaluation", i) for i in chosen]
        noise = standard_normal(generators, sampler.shape, sampler.device)
        conditions = self.collector.source.conditions([self.prompts[i] for i in chosen])
        return sampler.clips(sampler.denoise(transformer, noise, conditions)[0], conditions)
