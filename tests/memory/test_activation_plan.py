"""Which blocks store what, by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from finetrainers.config.facts import Activations
from finetrainers.config.sections import ActivationMemory
from finetrainers.memory.activation_plan import (
    ActivationPolicy,
    Machine,
    StepWork,
    activation_units,
    choose,
    select_evenly,
)

COUNTED = Activations(kept=(20.0, 30.0), outside=5.0, checkpointed=1.0, forward=8.0, backward=25.0, attention=2.0)


def test_spread() -> None:
    assert select_evenly("abcdefghij", 0.3) == list("bei")
    assert select_evenly("abcd", None) == select_evenly("abcd", 1.0) == list("abcd")
    assert select_evenly("abcd", 0.0) == []
    for share in (0.1, 0.25, 0.5, 0.9):
        chosen = select_evenly(range(60), share)
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


GIB = 2**30
#: Of ten blocks each stores 4 GiB, checkpointed none of them; kept attention takes 1 GiB, on the host 0.
WORK = StepWork(forward=10e12, backward=20e12, attention=6e12)


def sizes(stored: ActivationMemory, number: int) -> tuple[float, float]:
    recomputed = {"none": 4.0, "checkpoint": 0.0, "keep_attention": 1.0, "offload": 0.25}[stored]
    host = 0.75 * number if stored == "offload" else 0.0
    return GIB * (10 + 4.0 * (10 - number) + recomputed * number), GIB * host


def chosen(
    *, device: float, host: float = 100, link: float = 20e9, flops: float = 10e12, **more: object
) -> ActivationPolicy:
    return choose(10, sizes, WORK, Machine(GIB * device, GIB * host, flops, link), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "stored", "number"),
    [
        ({"device": 50}, "none", 0),
        # Attention is most of the work: all ten blocks without it are 4 TFLOP, five with it are 5.
        ({"device": 20, "link": 0.1e9}, "keep_attention", 10),
        ({"device": 30, "link": 0.1e9}, "keep_attention", 7),
        ({"device": 15, "link": 0.1e9}, "checkpoint", 9),
        ({"device": 15}, "offload", 10),
        ({"device": 30}, "offload", 6),
        ({"device": 15, "host": 7}, "checkpoint", 9),
        # On a fast device, copies are hidden no more, and computing costs less than waiting.
        ({"device": 15, "flops": 10e15}, "checkpoint", 9),
        ({"device": 30, "settings": ("none", "checkpoint")}, "checkpoint", 5),
        ({"device": 30, "all_blocks": True, "settings": ("checkpoint", "keep_attention")}, "keep_attention", 10),
        ({"device": 9}, "checkpoint", 10),
    ],
)
def test_choice(given: dict[str, Any], stored: str, number: int) -> None:
    """The fastest that fits, for the fewest blocks; by trying all settings for all numbers of blocks."""
    found = chosen(**given)
    assert (found.stored, found.number) == (stored, number)
    assert found.fits == (given["device"] > 9)
    assert found.share == (None if number in (0, 10) else number / 10)
    assert len(select_evenly(range(10), found.share)) == number or stored == "none"


@pytest.mark.parametrize(("launch", "stored"), [(0.0, "keep_attention"), (0.1, "keep_attention"), (0.5, "checkpoint")])
def test_short_steps_take_as_long_as_their_launches(launch: float, stored: str) -> None:
    """3.4 s of computing with attention kept, 4.0 without: launches of 0.1 s a block are hidden, of 0.5 s are not."""
    machine = Machine(GIB * 22, 0.0, 10e12, 0.1e9, launch)
    assert choose(10, sizes, replace(WORK, blocks=10), machine).stored == stored
    assert choose(10, sizes, replace(WORK, blocks=10), replace(machine, device=GIB * 60)).stored == "none"


def test_a_choice_in_words() -> None:
    machine = Machine(20 * GIB, 100 * GIB, 10e12, 20e9)
    found = chosen(device=30)
    assert re.match("offload .* 6 .* 10 blocks", found.what)
    assert re.search(", 27.5 GiB .* 20 GiB, 4.5 GiB .*, 8% .*none", found.why(machine))
    assert chosen(device=50).what == "none"
    assert chosen(device=50).why(machine).startswith("all ")
    nothing = chosen(device=9)
    assert re.match("checkpoint .* all .* 10 blocks", nothing.what)
    assert re.search(", 10 GiB .* 9 GiB: 1 GiB ", nothing.why(Machine(9 * GIB, 0, 1, 1)))


def test_of_equally_fast_settings_the_simpler_one_is_chosen() -> None:
    assert choose(10, sizes, StepWork(1e12, 2e12, 0.0), Machine(20 * GIB, 0, 1e12, 1)).stored == "checkpoint"
    same = choose(4, lambda *_: (1.0, 0.0), WORK, Machine(2.0, 1.0, 1e12, 1e9), settings=("keep_attention", "offload"))
    assert (same.stored, same.number) == ("keep_attention", 1)
