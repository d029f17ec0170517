"""GPUs to plan for: every spelling of a card, sizes as cards are sold, exact sizes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refused

from finetrainers.utils.failures import Kind
from finetrainers.utils.gpus import CARDS, read_gib, read_gpu

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "memory-estimate.md"


@pytest.mark.parametrize(
    ("text", "gib", "capability"),
    [
        ("h100", 79.1, (9, 0)),
        ("NVIDIA H100 80GB HBM3", 79.1, (9, 0)),
        ("NVIDIA A100-SXM4-40GB", 39.2, (8, 0)),
        ("a100-80gb", 79.1, (8, 0)),
        ("4090", 23.5, (8, 9)),
        ("NVIDIA GeForce RTX 4090", 23.5, (8, 9)),
        ("rtx5090", 31.3, (12, 0)),
        ("Tesla T4", 14.5, (7, 5)),
        ("v100-32gb", 31.7, (7, 0)),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, (8, 9)),
        ("l40s", 44.3, (8, 9)),
        ("24GB", 23.5, None),
        ("80 gb", 79.1, None),
        ("24GiB", 24.0, None),
        ("24", 24.0, None),
        ("39.4GiB", 39.4, None),
        ("100GB", 100.0, None),
    ],
)
def test_cards_and_sizes(text: str, gib: float, capability: tuple[int, int] | None) -> None:
    gpu = read_gpu(text)
    assert (gpu.gib, gpu.capability) == (gib, capability)
    assert f"{gib:g} GiB" in str(gpu)


@pytest.mark.parametrize(
    ("text", "kind", "hint"),
    [
        ("h1000", "unknown", "'h100'"), ("a100", "invalid", "a100-40gb or a100-80gb"), ("much", "unknown", "24GB"),
        ("0GB", "unknown", "24GB"), ("-4", "unknown", "24GB"), ("", "unknown", "24GB"), ("nan", "unknown", "24GB"),
        ("9" * 5000 + "GB", "unknown", "24GB"), ("1e3GB", "unknown", "24GB"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, kind: Kind, hint: str) -> None:
    with refused(kind, hint) as caught:
        read_gpu(text)
    assert len(str(caught.value)) < 300


def test_host_memory_is_not_a_card() -> None:
    assert [read_gib(text) for text in ("64GB", "64GiB", "64")] == [64.0] * 3
    with refused("invalid", "'h100'"):
        read_gib("h100")


def test_no_card_has_more_than_it_is_sold_with_and_the_page_lists_all() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for card in CARDS:
        assert 0.88 * card.sold < card.gib < card.sold, card
        # Spellings of two cards are never the same.
        assert read_gpu(f"NVIDIA {card.name} {card.sold}GB").gib == card.gib
        major, minor = card.capability
        assert f"| {card.name} | {card.sold} | {card.gib:g} | {major}.{minor} |" in rows, card
