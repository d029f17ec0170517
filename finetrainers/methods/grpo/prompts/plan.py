"""The prompts of reward finetuning, planned before any weights are loaded. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetrainers.config.errors import Problem
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.hacking import hacking_rule
from finetrainers.config.root import TrainConfig, critical_options
from finetrainers.data.buckets.clip import ConditioningImage, TextImageSource
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.text import plural

from .prompts import Prompt, read_prompts

_SHOWN = 3  # prompts named in an error
_HOW = "key `image` in a .jsonl or .csv file"


@dataclass(frozen=True)
class PromptPlan:
    """The prompts of a run; see `TrainingSet`.

    Attributes:
        prompts: prompts to train on.
        eval_prompts: prompts to evaluate on.
        size: size of every clip, frames x height x width.
        num_tokens: video tokens of a clip, which shift the noise levels of some schedules.
        fps: frame rate at which rewards see the clips.
        guided: whether clips are sampled with guidance, which needs the empty prompt.
        empty: the encoded empty prompt, if it came with encoded prompts.
    """

    prompts: tuple[Prompt, ...]
    eval_prompts: tuple[Prompt, ...]
    size: tuple[int, int, int]
    num_tokens: int
    fps: float
    fingerprint: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    guided: bool = True
    empty: Prompt | None = None

    noun = "prompt"
    fingerprint_of = "prompts"
    critical_options = critical_options("grpo")
    cut_in_batches = False
    title = "prompts"
    encodes_clips = False
    texts = "prompts"
    rates = ()  # clips are sampled at the model's own frame rate

    @property
    def count(self) -> int:
        """Number of prompts that are trained on."""
        return len(self.prompts)

    @property
    def example(self) -> str:
        """The first prompt."""
        return self.prompts[0].text

    @property
    def buckets(self) -> tuple[tuple[int, int, int], ...]:
        """The size of every clip."""
        return (self.size,)

    def heaviest(self, config: TrainConfig) -> tuple[tuple[int, int, int], int]:
        """Return the size and the number of clips of the largest micro-batch."""
        return self.size, config.dataloader.batch_size

    @property
    def images(self) -> tuple[Path, ...]:
        """Images that clips are sampled from."""
        return tuple(prompt.image for prompt in (*self.prompts, *self.eval_prompts) if prompt.image is not None)

    def picture(self, prompt: Prompt) -> ConditioningImage | None:
        """Return the image of a prompt in the size of the clips, or None if it has none."""
        if prompt.image is None:
            return None
        return ConditioningImage(prompt.image, self.size[1:], prompt.last_image)

    def shown_texts(self) -> list[tuple[str, TextImageSource]]:
        """Return the prompts with the image that each is encoded with, where text encoders see images."""
        prompts = [prompt for prompt in (*self.prompts, *self.eval_prompts) if prompt.embedding is None]
        return [(prompt.text, image) for prompt in prompts if (image := self.picture(prompt)) is not None]

    def all_captions(self) -> list[str]:
        """Return the prompts that are not read as tensors."""
        return [prompt.text for prompt in (*self.prompts, *self.eval_prompts) if prompt.embedding is None]

    @property
    def needs_empty_text(self) -> bool:
        """Whether the text encoders must have seen the empty prompt."""
        return bool(self.all_captions()) or (self.guided and self.empty is None)

    def encoded_clips(self) -> tuple[()]:
        """Return nothing: clips are sampled."""
        return ()

    def step_of(self, config: TrainConfig) -> str:
        """Return a description of the clips of an optimizer step and the rollouts that they come from."""
        section = config.grpo
        prompts, size, selected = section.prompts_per_step, section.num_generations, section.best_of_n
        clips = prompts * (selected or size) / section.updates_per_rollout
        best = f", {selected} trained" if selected else ""
        return (
            f"{clips:g} clips over all processes (rollouts of {plural(prompts, 'prompt')} x {plural(size, 'clip')}"
            f"{best}, {plural(section.updates_per_rollout, 'step')} each), {config.dataloader.batch_size} at once per "
            f"{config.parallel.unit}"
        )

    def table(self) -> list[tuple[str, ...]]:
        """Return rows for printing: the numbers of prompts, and the size of the clips."""
        size = "x".join(map(str, self.size))
        return [
            ("trained on", "evaluated", "size of clips", "fps"),
            (str(self.count), str(len(self.eval_prompts)), size, f"{self.fps:g}"),
        ]

    def write(self, path: Path) -> None:
        """Write the prompts, one JSON object a line."""
        kinds = [(prompt, "train") for prompt in self.prompts] + [(prompt, "eval") for prompt in self.eval_prompts]
        rows = [{"prompt": p.text, **image_record(p), "use": use, "from": p.where} for p, use in kinds]
        write_text_atomic(path, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")


def image_record(prompt: Prompt) -> dict[str, str]:
    """Return the images of a prompt for a record of it; empty if it has none."""
    return {key: str(path) for key, path in prompt.images.items()}


def image_problems(plan: PromptPlan, facts: Facts) -> Iterator[Problem]:
    """Yield why a checkpoint cannot take the prompts' images, or needs images that they lack."""
    for option, prompts in (("--prompts", plan.prompts), ("--eval_prompts", plan.eval_prompts)):
        yield from _last_image_problems(option, prompts, facts)
        without = [prompt.where for prompt in prompts if prompt.image is None]
        more = f" and {len(without) - _SHOWN} more" if len(without) > _SHOWN else ""
        examples = f"{', '.join(without[:_SHOWN])}{more}"
        if without and facts.needs_image:
            message = f"this checkpoint animates an image; add one to each prompt ({_HOW}): {examples} without"
            yield Problem(option, message, "required")
        elif without and plan.images and facts.first_frame == "tokens":
            message = f"either all prompts must have an image or none ({_HOW}): {examples} without"
            yield Problem(option, message, "conflict")
        elif len(without) < len(prompts) and facts.first_frame == "none":
            message = (
                "this checkpoint does not take a first frame; remove the images, or train an image-to-video checkpoint"
            )
            yield Problem(option, message, "unsupported")
    if plan.images and facts.first_frame == "tokens" and facts.geometry.latent_shape(*plan.size)[0] == 1:
        size = "x".join(map(str, plan.size))
        message = f"{size}: the image is the complete clip, so nothing is left to sample; use more frames"
        yield Problem("--rollout_size", message, "conflict")


def _last_image_problems(option: str, prompts: Sequence[Prompt], facts: Facts) -> Iterator[Problem]:
    """Yield a problem if prompts lack the last image that the checkpoint needs, or have one that it does not take."""
    places = [prompt.where for prompt in prompts if (prompt.last_image is None) == facts.last_frame]
    if not places:
        return
    examples = f"{', '.join(places[:_SHOWN])}{f' and {len(places) - _SHOWN} more' if len(places) > _SHOWN else ''}"
    if facts.last_frame:
        message = f"this checkpoint also needs a last image for each prompt (key `last_image`): {examples} without"
        yield Problem(option, message, "required")
    else:
        message = f"in rollouts this checkpoint takes no last image; remove `last_image` from {examples}"
        yield Problem(option, message, "unsupported")


def plan_prompts(config: TrainConfig, geometry: Geometry) -> PromptPlan | None:
    """Return the plan of the configured prompts, or None if no prompts are named or no size is.

    Raises:
        DataError: a file cannot be read or holds no prompts.
    """
    section = config.grpo
    if section.prompts is None or section.rollout_size is None:
        return None
    train = read_prompts(section.prompts)
    held_out = config.validation.eval_prompts
    eval_file = read_prompts(held_out) if held_out is not None else None
    return PromptPlan(
        prompts=train.prompts,
        eval_prompts=eval_file.prompts if eval_file else (),
        size=section.rollout_size,
        num_tokens=geometry.num_tokens(*section.rollout_size),
        fps=section.reward_fps or geometry.fps,
        fingerprint=train.fingerprint,
        warnings=train.warnings + (eval_file.warnings if eval_file else ()),
        notes=train.notes + (eval_file.notes if eval_file else ()) + tuple(_note_witnesses(config)),
        guided=section.rollout_cfg != 1.0,
        empty=train.empty,
    )


def _note_witnesses(config: TrainConfig) -> Iterator[str]:
    """Yield what watches for reward hacking in a run without held-out rewards, and how to add them."""
    rule = hacking_rule(config)
    if rule is not None and rule.witnesses:
        yield (
            f"reward hacking is detected by {', '.join(rule.witnesses)} of the rollouts' own clips; --eval_prompts FILE "
            "with --eval_reward NAME detects it by a held-out reward"
        )
