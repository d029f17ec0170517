"""Prior prompts: a sample's noisy latents are also predicted with them to preserve the prior. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from finetrainers.utils.seeding import derive_seed

from .sources.captions import word_pattern


@dataclass(frozen=True)
class PriorPrompts:
    """The prior prompts of samples.

    Attributes:
        texts: the prompts that one is drawn from for each (epoch, item), or empty to use a sample's caption without
            the trigger words.
        triggers: trigger words.
        seed: of the run.
    """

    texts: tuple[str, ...]
    triggers: tuple[str, ...]
    seed: int

    def of(self, caption: str, sample_key: tuple[int, ...]) -> str:
        """Return the prior prompt of a sample."""
        if not self.texts:
            return without_triggers(caption, self.triggers)
        return self.texts[derive_seed(self.seed, "prior_prompt", *sample_key) % len(self.texts)]

    def texts_for(self, captions: Iterable[str]) -> list[str]:
        """Return all prior prompts that samples with these captions may have."""
        return list(self.texts or dict.fromkeys(without_triggers(caption, self.triggers) for caption in captions))


def without_triggers(caption: str, triggers: Iterable[str]) -> str:
    """Return a caption without trigger words, and without the punctuation and blanks left at its beginning."""
    for trigger in triggers:
        caption = word_pattern(trigger).sub(" ", caption)
    return " ".join(caption.split()).lstrip(",.;: ")
