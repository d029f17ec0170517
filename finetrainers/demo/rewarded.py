"""Reward finetuning on any CPU: the demo model learns a color preference from scores, without any training clips.

`color_preference.py` explains which color is preferred, and why it must be learned caption by caption. The toolkit
samples clips for captions, scores them and trains a LoRA, as with any model and reward. diffusers then samples held-out
captions from the same noise without and with it, and the content of the samples is read back from their pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetrainers.config.root import TrainConfig
from finetrainers.plan.start_report import print_line
from finetrainers.utils.files import write_text_atomic

from .base import SHIFT
from .color_preference import choice_captions, preferred, rest_shown
from .data import FRAMES, HEIGHT, WIDTH
from .measure import MODEL, Measured, around_training
from .quickstart import other_captions
from .results import clear, compared, demo_config, plot_rewards, require_matplotlib

DEFAULT_STEPS = 32
#: The rollouts' own: without guidance, as trained.
GUIDANCE = 1.0
_PROMPTS, _EVALUATED, _ASKED, _SHOWN = 256, 16, 16, 4


@dataclass(frozen=True)
class Score:
    """Shares of samples.

    Attributes:
        preferred: share of captions that leave a choice whose samples show the preferred color.
        rest: share of the other attributes in these captions that the samples show.
        others: share of all attributes in captions without a choice that the samples show.
    """

    preferred: float
    rest: float
    others: float

    @classmethod
    def from_samples(cls, choices: Measured, others: Measured) -> Score:
        """Return the score of samples of captions with a choice, and without."""
        pairs = list(zip(choices.readings, choices.captions, strict=True))
        return cls(
            float(np.mean([reading.color == preferred(text) for reading, text in pairs])),
            float(np.mean([rest_shown(reading, text) for reading, text in pairs])),
            others.share,
        )


def rewarded(directory: Path, *, steps: int | None = None) -> tuple[Score, Score]:
    """Write prompts, train on the reward, sample, and print the paths of the results; return scores before and after.

    Args:
        directory: output directory; an earlier demonstration in it is replaced.
        steps: optimizer steps; default: about a minute and a half on two cores.
    """
    require_matplotlib()
    clear(directory, "reward", ("prompts", "run"))
    config = reward_config(directory, steps=DEFAULT_STEPS if steps is None else steps)

    before, after = around_training(
        config,
        choice_captions(_ASKED, name="asked", held_out=True),
        other_captions(_ASKED),
        guidance=GUIDANCE,
        announcements=(
            f"1/3 sampling {MODEL}, which has not learned the preference",
            "2/3 training a LoRA on the reward",
            "3/3 sampling with the LoRA, from the same noise",
        ),
    )
    scores = Score.from_samples(*before), Score.from_samples(*after)
    compared(before[0], after[0], _SHOWN).save(directory / "result.png")
    plot_rewards(directory / "run" / "metrics.jsonl", directory / "reward.png")
    _print_results(directory, *scores)
    return scores


def reward_config(directory: Path, *, steps: int, evaluated: int = _EVALUATED, **changes: Any) -> TrainConfig:
    """Write the prompts of the run into the directory, and return its configuration.

    Args:
        directory: gets `prompts/` and the run.
        steps: optimizer steps.
        evaluated: captions that the evaluations sample.
        changes: options that differ; None leaves one out.
    """
    train, held_out = directory / "prompts" / "train.txt", directory / "prompts" / "held_out.txt"
    for path, captions in (
        (train, choice_captions(_PROMPTS, name="train", held_out=False)),
        (held_out, choice_captions(evaluated, name="held out", held_out=True)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, "\n".join(captions) + "\n")
    options: dict[str, Any] = {
        "pretrained_model_name_or_path": MODEL,
        "method": "grpo",
        "prompts": str(train),
        "reward": ["preferred_color"],
        "eval_prompts": str(held_out),
        "eval_reward": ["preferred_color", "preferred_color_shown", "demo.shape", "demo.motion"],
        "eval_steps": max(steps // 4, 1),
        "rollout_size": f"{FRAMES}x{HEIGHT}x{WIDTH}",
        "shift": SHIFT,
        # Four steps are enough for a world this simple, and its colors are decided in the third.
        "sampling_steps": 4,
        "window_size": 1,
        "window_range": [0.5, 0.75],
        "prompts_per_step": 4,
        "num_generations": 8,
        "kl_coef": 0.003,
        "rank": 16,
        "lora_alpha": 16,
        "batch_size": 16,
        "train_steps": steps,
        "lr": 3e-3,
        "checkpointing_steps": max(steps // 2, 1),
        "logging_steps": 1,
    }
    options = {name: value for name, value in {**options, **changes}.items() if value is not None}
    return demo_config(directory, **options)


def _print_results(directory: Path, before: Score, after: Score) -> None:
    print_line(
        "\nsamples, read back from their pixels                       before  after\n"
        "  the preferred color, where the caption leaves the choice    "
        f"{before.preferred:6.0%} {after.preferred:6.0%}\n"
        f"  ... what the caption says besides                        {before.rest:6.0%} {after.rest:6.0%}\n"
        f"  captions without a choice: share of what they say        {before.others:6.0%} {after.others:6.0%}\n"
        "\nresults\n"
        f"  without and with the LoRA  {directory / 'result.png'}\n"
        f"  reward over steps          {directory / 'reward.png'}\n"
        f"  the LoRA                   {directory / 'run' / 'pytorch_lora_weights.safetensors'}\n"
        f"  samples on the way         {directory / 'run' / 'samples'}\n"
        "next: your own prompts, model and reward, see docs/how-to/grpo.md"
    )
