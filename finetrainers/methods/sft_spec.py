"""Requirements of supervised finetuning that are checked before it is loaded; see `MethodSpec`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from finetrainers.config.errors import Problem
from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.data.reading.datasets import trigger_words
from finetrainers.data.reading.items import DataError
from finetrainers.data.reading.prior_prompts import PriorPrompts, without_triggers

from .grpo.prompts.prompts import read_prompts
from .spec import MethodMemory, MethodSpec

if TYPE_CHECKING:
    from finetrainers.data.inspect.plan import DatasetPlan
    from finetrainers.data.inspect.probe_all import ProbeOptions

_WAYS = (
    "set --class_prompt TEXT, --prior_prompts FILE, or an --id_token (prior prompts are then the captions without it)"
)


class SupervisedFinetuning(MethodSpec):
    """Supervised finetuning on clips; prior preservation compares the network with the base model."""

    learns_clips = True
    takes_media = True
    reference = "base"  # the abilities to preserve are those before any finetuning

    def survey(self, config: TrainConfig, geometry: Geometry, options: ProbeOptions | None = None) -> DatasetPlan:
        plan = super().survey(config, geometry, options)
        return replace(plan, prior=_prior_prompts(config, plan)) if _preserves(config) else plan

    def problems(self, config: TrainConfig) -> list[Problem]:
        section, problems = config.sft, super().problems(config)
        if section.class_prompt is not None and section.prior_prompts is not None:
            message = "cannot be combined with --prior_prompts; remove one of them"
            problems.append(Problem("--class_prompt", message, "conflict"))
        return problems

    def accumulates(self, config: TrainConfig) -> bool:
        return _preserves(config) or super().accumulates(config)

    def uses_reference(self, config: TrainConfig) -> bool:
        return _preserves(config)

    def memory(
        self, config: TrainConfig, latent: Sequence[int], *, batch_size: int, trained: float, reference: float
    ) -> MethodMemory:
        """Return the memory of the reference model; clips are seen once at a time, as losses go backward in turn."""
        needs_copy = _preserves(config) and config.training.training_type == "full-finetune"
        return MethodMemory(copies=reference if needs_copy else 0.0, trajectories=0.0, batch_size=batch_size)


def _preserves(config: TrainConfig) -> bool:
    return config.sft.prior_preservation_weight > 0


def _prior_prompts(config: TrainConfig, plan: DatasetPlan) -> PriorPrompts:
    """Return the configured prior prompts.

    Raises:
        DataError: a file cannot be read, or no caption differs from its prior prompt.
    """
    section = config.sft
    if section.class_prompt is not None:
        texts: tuple[str, ...] = (section.class_prompt.strip(),)
    elif section.prior_prompts is not None:
        prompts = read_prompts(section.prior_prompts).prompts
        if any(prompt.embedding is not None for prompt in prompts):
            raise DataError(
                f"--prior_prompts {section.prior_prompts}: embeddings are not supported; use a .txt or .jsonl file",
                kind="unsupported",
            )
        texts = tuple(prompt.text for prompt in prompts)
    else:
        texts = ()
    triggers = trigger_words(config.data)
    captions = [caption for clip in plan.clips for caption in clip.all_captions]
    if not texts and captions and all(without_triggers(caption, triggers) == caption for caption in captions):
        raise DataError(f"--prior_preservation_weight: there are no prior prompts; {_WAYS}", kind="required")
    return PriorPrompts(texts, triggers, config.training.seed)
