"""Cleaning of captions. Imports no torch."""

from __future__ import annotations

import re

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


def clean_caption(caption: str, *, id_token: str | None = None, remove_prefixes: bool = False) -> str:
    """Return the caption for the text encoder: blanks trimmed, opening phrase removed, `id_token` put before it."""
    caption = caption.strip()
    if remove_prefixes:
        caption = _LLM_PREFIX.sub("", caption, count=1) or caption
    if id_token and id_token.strip():
        caption = f"{id_token.strip()} {caption}".strip()
    return caption


def split_captions(text: str, *, each_line: bool) -> tuple[str, ...]:
    """Return the caption that a text file holds, its lines joined by blanks; or one in each line that is not blank."""
    if not each_line:
        return (" ".join(text.split()),)
    lines = [line.strip() for line in text.split("\n")]
    return tuple(line for line in lines if line) or ("",)
