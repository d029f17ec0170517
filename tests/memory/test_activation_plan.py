"""Which blocks store what, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from finetrainers.config.facts import Activations
from finetrainers.memory.activation_plan import activation_units, spread

COUNTED = Activations(kept=(20.0, 30.0), outside=5.0, checkpointed=1.0, forward=8.0, backward=25.0, attention=2.0)


def test_spread() -> None:
    assert spread("abcdefghij", 0.3) == list("bei")
    assert spread("abcd", None) == spread("abcd", 1.0) == list("abcd")
    assert spread("abcd", 0.0) == []
    for share in (0.1, 0.25, 0.5, 0.9):
        chosen = spread(range(60), share)
        assert len(chosen) == 60 * share
        gaps = {b - a for a, b in pairwise(chosen)}
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("stored", "share", "expected"),
    [
        ("none", None, (2 * 20 + 2 * 30, 5, 5)),
        ("checkpoint", None, (4, 8, 25)),
        ("checkpoint", 1.0, (4, 8, 25)),
        ("checkpoint", 0.0, (100, 5, 5)),
        # The last block needs its attention while it runs, and is counted with it.
        ("keep_attention", None, (12, 6, 23)),
        # The first and the third block: when these run again, what the last one stored is free.
        ("checkpoint", 0.5, (1 + 20 + 1 + 30, 5, 5)),
        ("checkpoint", 0.25, (20 + 1 + 30 + 30, 5, 5)),
        ("keep_attention", 0.75, (3 + 3 + 30 + 3, 6, 23)),
    ],
)
def test_units(stored: str, share: float | None, expected: tuple[float, float, float]) -> None:
    units = activation_units(COUNTED, (2, 2), stored, share)
    assert (units.stored, units.in_forward, units.in_backward) == expected
