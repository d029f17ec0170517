"""The prompts of reward finetuning, planned before any weights are loaded. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetrainers.config.errors import Problem
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.hacking import hacking_rule
from finetrainers.config.root import TrainConfig, critical_options
from finetrainers.data.buckets.clip import ConditioningImage, TextImageSource
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.text import nearest, plural

from .prompts import Prompt, PromptFile, read_prompts

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
        column_names: columns of the files, including those that no reward takes.
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
    column_names: tuple[str, ...] = ()

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
    if plan.images and facts.images != "left out" and facts.geometry.latent_shape(*plan.size)[0] == 1:
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
    held_out = config.validation.eval_prompts
    train = read_prompts(section.prompts)
    eval_file = read_prompts(held_out) if held_out is not None else None
    names = [name for file in (train, eval_file) if file is not None for name in file.prompts[0].columns]
    train, unused = _with_used_columns(train, section.prompts, config)
    if eval_file is not None and held_out is not None:
        eval_file, eval_unused = _with_used_columns(eval_file, held_out, config)
        unused += eval_unused
    return PromptPlan(
        prompts=train.prompts,
        eval_prompts=eval_file.prompts if eval_file else (),
        size=section.rollout_size,
        num_tokens=geometry.num_tokens(*section.rollout_size),
        fps=section.reward_fps or geometry.fps,
        fingerprint=train.fingerprint,
        warnings=train.warnings + (eval_file.warnings if eval_file else ()),
        notes=train.notes + (eval_file.notes if eval_file else ()) + unused + tuple(_note_witnesses(config)),
        guided=section.rollout_cfg != 1.0,
        empty=train.empty,
        column_names=tuple(dict.fromkeys(names)),
    )


def _with_used_columns(file: PromptFile, path: Path, config: TrainConfig) -> tuple[PromptFile, tuple[str, ...]]:
    """Return the prompts with the columns that rewards take, and a note about the others.

    The columns are part of the fingerprint: other ones change the scores.
    """
    if not file.prompts[0].columns:
        return file, ()
    from finetrainers.rewards.registry import columns_taken

    accepted = [columns_taken(entry) for entry in (*config.grpo.reward, *config.validation.eval_reward)]
    names = [name for name in file.prompts[0].columns if any(columns.takes(name) for columns in accepted)]
    unused = sorted(file.prompts[0].columns.keys() - set(names))
    prompts = tuple(replace(p, columns={name: p.columns[name] for name in names}) for p in file.prompts)
    fingerprint = file.fingerprint
    if names:
        content = json.dumps([fingerprint, *(prompt.columns for prompt in prompts)], sort_keys=True)
        fingerprint = hashlib.sha256(content.encode()).hexdigest()
    note = (f"{path.name}: no reward takes the columns {', '.join(unused)}",) if unused else ()
    return replace(file, prompts=prompts, fingerprint=fingerprint), note


def column_problems(plan: PromptPlan, config: TrainConfig) -> Iterator[Problem]:
    """Yield the columns that a reward requires and prompts lack, or that it has in the place of the prompts."""
    from finetrainers.rewards.registry import columns_taken

    rewards, held_out = config.grpo.reward, config.validation.eval_reward
    for option, entries in (("--reward", rewards), ("--eval_reward", held_out)):
        for entry in entries:
            if (name := columns_taken(entry).prompts) in plan.column_names:
                message = (
                    f"{entry.name} gets the prompts as its argument {name!r}, which is also a column of the prompts; "
                    f"name that argument `prompts`, or take the column by name: (videos, prompts, *, {name})"
                )
                yield Problem(option, message, "conflict")
    for option, entries, prompts in (
        ("--reward", rewards, plan.prompts if held_out else (*plan.prompts, *plan.eval_prompts)),
        ("--eval_reward", held_out, plan.eval_prompts),
    ):
        for entry, name in [(reward, name) for reward in entries for name in columns_taken(reward).required]:
            places = [prompt.where for prompt in prompts if prompt.columns.get(name) is None]
            if places:
                names = set(plan.column_names) - {name}
                more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
                message = (
                    f"{entry.name} requires {name!r} of each prompt, a column or key of the file"
                    f"{nearest(name, names)}; without it: {', '.join(places[:_SHOWN])}{more}"
                )
                yield Problem(option, message, "required")


def _note_witnesses(config: TrainConfig) -> Iterator[str]:
    """Yield what watches for reward hacking in a run without held-out rewards, and how to add them."""
    rule = hacking_rule(config)
    if rule is not None and rule.witnesses and not rule.held_out:
        yield (
            f"reward hacking is detected by {', '.join(rule.witnesses)} of the rollouts' own clips; add a held-out "
            "reward with --eval_prompts FILE and --eval_reward NAME"
        )
