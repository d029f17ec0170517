"""GPUs to plan for, by name or by size: their memory and compute capability. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .failures import InputError
from .text import nearest, quoted, shortened

Capability = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """A GPU to plan for.

    Attributes:
        name: in messages.
        gib: memory as CUDA reports it (`torch.cuda.mem_get_info()[1]`), in GiB.
        capability: compute capability, or None if only the size is known.
    """

    name: str
    gib: float
    capability: Capability | None = None

    def __str__(self) -> str:
        exact = f"{self.gib:g} GiB"
        return exact if self.name == exact else f"{self.name} ({exact})"


@dataclass(frozen=True)
class Card:
    """A graphics card.

    Attributes:
        name: without the maker's name.
        sold: nominal size, in GB.
        gib: memory as CUDA reports it, in GiB; the smallest figure in `docs/reference/memory-estimate.md`.
        capability: compute capability.
    """

    name: str
    sold: int
    gib: float
    capability: Capability


#: The first card of a size represents that size.
CARDS: tuple[Card, ...] = (
    Card("RTX 4060", 8, 7.6, (8, 9)),
    Card("RTX 3070", 8, 7.6, (8, 6)),
    Card("RTX 3080", 10, 9.6, (8, 6)),
    Card("RTX 4070", 12, 11.5, (8, 9)),
    Card("RTX 4070 Ti", 12, 11.5, (8, 9)),
    Card("RTX 3060", 12, 11.6, (8, 6)),
    Card("RTX 5070", 12, 11.4, (12, 0)),
    Card("RTX 4080", 16, 15.5, (8, 9)),
    Card("RTX 4060 Ti", 16, 15.5, (8, 9)),
    Card("RTX 5070 Ti", 16, 15.4, (12, 0)),
    Card("RTX 5080", 16, 15.4, (12, 0)),
    Card("T4", 16, 14.5, (7, 5)),
    Card("V100", 16, 15.7, (7, 0)),
    Card("RTX 4090", 24, 23.5, (8, 9)),
    Card("RTX 3090", 24, 23.5, (8, 6)),
    Card("RTX A5000", 24, 23.5, (8, 6)),
    Card("L4", 24, 22.0, (8, 9)),
    Card("A10", 24, 21.9, (8, 6)),
    Card("A10G", 24, 21.9, (8, 6)),
    Card("RTX 5090", 32, 31.3, (12, 0)),
    Card("V100", 32, 31.7, (7, 0)),
    Card("A100", 40, 39.2, (8, 0)),
    Card("RTX A6000", 48, 47.4, (8, 6)),
    Card("RTX 6000 Ada", 48, 47.4, (8, 9)),
    Card("L40S", 48, 44.3, (8, 9)),
    Card("L40", 48, 44.3, (8, 9)),
    Card("A40", 48, 44.3, (8, 6)),
    Card("H100", 80, 79.1, (9, 0)),
    Card("H800", 80, 79.1, (9, 0)),
    Card("A100", 80, 79.1, (8, 0)),
    Card("A800", 80, 79.1, (8, 0)),
    Card("H100 NVL", 94, 93.0, (9, 0)),
    Card("RTX PRO 6000", 96, 94.5, (12, 0)),
    Card("H20", 96, 95.0, (9, 0)),
    Card("H200", 141, 139.7, (9, 0)),
    Card("B200", 180, 178.3, (10, 0)),
)

_SIZE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(gi?b?)?\s*", re.IGNORECASE)
#: More GiB than any machine has.
_MOST = 10_000
#: Words of a card's full name that do not distinguish it.
_NO_PART_OF_A_NAME = re.compile(
    r"nvidia|geforce|tesla|quadro|rtx|sxm\d*|pcie|hbm\w*|blackwell|generation|(?:workstation|server) edition"
)


def read_gib(text: str) -> float:
    """Return the GiB of a text such as `24GB`, `24GiB` or `24`, which are all equal.

    Raises:
        ValueError: the text is not a size.
    """
    size = _size(text)
    if size is None:
        raise ValueError(f"expected a memory size such as 24GB, got {shortened(quoted(text))}")
    return size[0]


def read_gpu(text: str) -> Gpu:
    """Return the GPU of a text: a card (`h100`, `RTX 4090`, `a100-40gb`), or a size.

    `24GB` is a card with a nominal size of 24 GB, which has less; `24GiB` and `24` are exact.

    Raises:
        ValueError: the text is neither a known card nor a size.
    """
    matching = [card for card in CARDS if _key(text) in (_key(card.name), f"{_key(card.name)}{card.sold}gb")]
    if len(matching) > 1:
        sizes = " or ".join(f"{_key(card.name)}-{card.sold}gb" for card in matching)
        raise ValueError(f"{shortened(quoted(text))} is sold in several sizes; use {sizes}")
    if matching:
        return _gpu(matching[0], f"{matching[0].name} {matching[0].sold} GB")
    size = _size(text)
    if size is None:
        near = nearest(_key(text), dict.fromkeys(_key(card.name) for card in CARDS), listed=0)
        message = f"expected a memory size such as 24GB or a card such as h100, got {shortened(quoted(text))}{near}"
        raise InputError(message, "unknown")
    amount, unit = size
    card = next((card for card in CARDS if unit in ("g", "gb") and card.sold == amount), None)
    return Gpu(f"{amount:g} GiB", amount) if card is None else Gpu(f"{amount:g} GB", card.gib)


def _size(text: str) -> tuple[float, str] | None:
    """Return the number and the unit of a size, or None if the text is not one."""
    match = _SIZE.fullmatch(text)
    if match is None or not 0 < float(match[1]) <= _MOST:
        return None
    return float(match[1]), (match[2] or "").lower()


def _gpu(card: Card, name: str) -> Gpu:
    return Gpu(name, card.gib, card.capability)


def _key(text: str) -> str:
    """Return a name without spaces, punctuation, case, and words that all cards have."""
    return re.sub(r"[^0-9a-z.]", "", _NO_PART_OF_A_NAME.sub("", text.lower()))
