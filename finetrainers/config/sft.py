"""Options of supervised finetuning (`--method sft`) in addition to those of every method."""

from __future__ import annotations

from pathlib import Path

from .base import Section
from .option import option


# fmt: off
class SFTSection(Section):
    """Prior preservation: keep predictions for other captions close to those of the base model."""

    methods = ("sft",)

    prior_preservation_weight: float = option(0.0, "Weight of the prior preservation loss, which keeps other "
        "captions right while a concept is learned; 0 disables it. A step makes two more forward passes and one more "
        "backward pass.", resume="free", ge=0, le=1e6)
    class_prompt: str | None = option(None, "Prior prompt of every sample, such as `a dog` for clips of one dog; an "
        "empty one preserves the unconditional prediction. The default is each clip's caption without its `id_token`.",
        resume="free", needs="prior_preservation_weight")
    prior_prompts: Path | None = option(None, "File of prior prompts (.txt, one per line, or .jsonl with the key "
        "`prompt`), instead of `class_prompt`. One is drawn for each sample.", resume="free",
        needs="prior_preservation_weight", place="input")
# fmt: on
