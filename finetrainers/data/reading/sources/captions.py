"""Cleaning of captions. Imports no torch."""

from __future__ import annotations

import re
from functools import cache

from finetrainers.config.sections import DataSection

_VERBS = (
    "shows|showcases|depicts|displays|features|captures|highlights|introduces|presents|portrays|illustrates|"
    "(?:opens|begins|starts) (?:with|on)"
)
_SUBJECT = "(?:this|the) (?:short )?(?:video|clip|image|picture|photo|animation|scene|footage|sequence)(?: clip)?"
# "This video shows a cat", "The scene opens with a cat", "In this video, a cat": openings that language models like
# and that users do not type in prompts. The verb needs a following blank, so that "shows" alone is kept.
_LLM_PREFIX = re.compile(rf"^\s*(?:{_SUBJECT} (?:{_VERBS})\s+|in {_SUBJECT}\s*,\s*(?:we see\s+)?)", re.IGNORECASE)

#: Text encoders read at most 256 tokens of a prompt, whatever the family; English has about four characters a token.
LONG_CAPTION = 1000


#: Place of the trigger word in a caption, by ai-toolkit's name.
PLACEHOLDER = "[trigger]"


def clean_caption(caption: str, data: DataSection) -> str:
    """Return the caption for the text encoder: blanks trimmed, opening phrase removed, with the trigger word.

    The word stands where the caption has it or `[trigger]`, and otherwise before the caption.
    """
    caption, token = caption.strip(), (data.id_token or "").strip()
    if data.remove_common_llm_caption_prefixes:
        caption = _LLM_PREFIX.sub("", caption, count=1) or caption
    if not token:
        return caption
    if PLACEHOLDER in caption and not data.repeat_id_token:
        return caption.replace(PLACEHOLDER, token)
    return caption if has_word(caption, token) and not data.repeat_id_token else f"{token} {caption}".strip()


@cache
def word_pattern(word: str) -> re.Pattern[str]:
    """Return the expression that matches a whole word, or several, in a text."""
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")


def has_word(text: str, word: str) -> bool:
    """Return whether a text contains a whole word."""
    return word_pattern(word).search(text) is not None


def split_captions(text: str, *, each_line: bool) -> tuple[str, ...]:
    """Return the caption that a text file holds, its lines joined by blanks; or one in each line that is not blank."""
    if not each_line:
        return (" ".join(text.split()),)
    lines = [line.strip() for line in text.split("\n")]
    return tuple(line for line in lines if line) or ("",)
