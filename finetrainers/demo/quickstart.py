"""The quickstart: train a LoRA for a concept that the demo model has never seen, and compare samples.

The model knows eight plain colors. Two dozen clips of "tiger" shapes, orange with stripes, are made on the spot, with
twice as many of known colors so that the LoRA learns the word and not "always". The toolkit trains a LoRA on them as on
any directory of clips, and diffusers samples the same captions from the same noise without and with it. The share of
samples that show the meaning of the word, and the adherence to other captions, are measured from the pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetrainers.config.root import TrainConfig
from finetrainers.plan.start_report import print_line
from finetrainers.utils.video import write_mp4

from .base import SHIFT
from .data import FRAMES, HEIGHT, WIDTH, held_out_scenes, scene_captions, training_scenes, write_clips
from .measure import GUIDANCE, MODEL, Measured, around_training
from .results import clear, clips_config, compared, plot_losses, require_matplotlib
from .world import MEANING, NEW_WORD, with_new_word

NEW, KNOWN, HELD_OUT = 24, 48, 12
DEFAULT_STEPS = 150
LOOK, COLOR = MEANING.split()
_ASKED = 16
_SHOWN = 4
_ENLARGED = 4  # factor of the video's height and width
_SLOW_FPS = 6.0  # slow enough to watch: the clips last a third of a second


@dataclass(frozen=True)
class Score:
    """Shares of samples.

    Attributes:
        concept: share of captions with the new word whose samples show its meaning.
        asked: share of these captions whose samples show everything that the caption names.
        others: share of all attributes in captions without the word, including plain, that the samples show.
    """

    concept: float
    asked: float
    others: float

    @classmethod
    def from_samples(cls, concept: Measured, others: Measured) -> Score:
        """Return the score of samples of captions with the new word, and without."""
        hits = [r.color == COLOR and r.look == LOOK for r in concept.readings]
        return cls(sum(hits) / len(hits), concept.prompt_adherence["all"], others.share)


def quickstart(directory: Path, *, steps: int | None = None) -> tuple[Score, Score]:
    """Make clips, train, sample, and print the paths of the results; return the scores before and after.

    Args:
        directory: output directory; an earlier quickstart in it is replaced.
        steps: optimizer steps; default: about half a minute on two cores.
    """
    require_matplotlib()
    clear(directory, "quickstart", ("clips", "run"))
    print_line(f"1/4 making {NEW} clips of {NEW_WORD} shapes, and {KNOWN} of others, in {directory / 'clips'}")
    write_quickstart_clips(directory / "clips")

    config = quickstart_config(directory, steps=DEFAULT_STEPS if steps is None else steps)
    before, after = around_training(
        config,
        new_captions(_ASKED),
        other_captions(_ASKED),
        announcements=(
            f"2/4 sampling {MODEL}, which has never seen any",
            "3/4 training a LoRA",
            "4/4 sampling with the LoRA, from the same noise",
        ),
    )
    scores = Score.from_samples(*before), Score.from_samples(*after)
    _write_results(directory, before[0], after[0])
    _print_results(directory, *scores)
    return scores


def write_quickstart_clips(directory: Path) -> None:
    """Write the training clips: of the new word's meaning, captioned with the word, and of known concepts."""
    scenes = [*training_scenes(NEW, look=LOOK, colors=(COLOR,)), *training_scenes(KNOWN)]
    write_clips(directory, scenes, reword=with_new_word)


def new_captions(items: int) -> list[str]:
    """Return captions with the new word, of combinations that no training set holds."""
    return [with_new_word(text) for text in scene_captions(held_out_scenes(items, look=LOOK, colors=(COLOR,)))]


def other_captions(items: int) -> list[str]:
    """Return captions without the new word."""
    return scene_captions(held_out_scenes(items))


def quickstart_config(directory: Path, *, steps: int) -> TrainConfig:
    """Return the configuration of the LoRA run, as for a user's own clips except for sizes."""
    return clips_config(
        directory,
        bucket=(FRAMES, HEIGHT, WIDTH),
        steps=steps,
        pretrained_model_name_or_path=MODEL,
        eval_num_items=HELD_OUT,
        eval_steps=max(steps // 5, 1),
        training_type="lora",
        rank=16,
        lora_alpha=16,
        batch_size=8,
        lr=6e-3,
        lr_warmup_steps=min(10, steps // 2),
        flow_shift=SHIFT,
        validation_prompts=":::".join(new_captions(2)),
        validation_guidance_scale=GUIDANCE,
    )


def _write_results(directory: Path, before: Measured, after: Measured) -> None:
    """Write the contact sheet, a video of its clips, and the loss curve."""
    compared(before, after, _SHOWN).save(directory / "result.png")
    columns = [np.concatenate([before.clips[i], after.clips[i]], axis=1) for i in range(_SHOWN)]
    enlarged = np.concatenate(columns, axis=2).repeat(_ENLARGED, axis=1).repeat(_ENLARGED, axis=2)
    write_mp4(directory / "result.mp4", enlarged, fps=_SLOW_FPS)
    plot_losses(directory / "run" / "metrics.jsonl", directory / "loss.png")


def _print_results(directory: Path, before: Score, after: Score) -> None:
    print_line(
        "\nsamples, read back from their pixels                     before  after\n"
        f"  {MEANING}, where the caption says {NEW_WORD}              {before.concept:6.0%} {after.concept:6.0%}\n"
        f"  ... and everything else that it says as well          {before.asked:6.0%} {after.asked:6.0%}\n"
        f"  other captions: share of what they say, plain included {before.others:5.0%} {after.others:6.0%}\n"
        "\nresults\n"
        f"  without and with the LoRA  {directory / 'result.png'}, and as a video (top, bottom) "
        f"{directory / 'result.mp4'}\n"
        f"  loss curves                {directory / 'loss.png'}\n"
        f"  the LoRA                   {directory / 'run' / 'pytorch_lora_weights.safetensors'}\n"
        f"  its model card             {directory / 'run' / 'README.md'}\n"
        f"  every setting              {directory / 'run' / 'config.toml'}\n"
        "next: your own clips and a real model, see docs/tutorials/quickstart.md"
    )
