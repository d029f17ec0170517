"""The search for the cheapest set of switches, against all sets tried one by one; and the table of switches."""

from __future__ import annotations

import itertools
import random

import pytest

from finetrainers.config.flags import parse_flags
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.memory import advice
from finetrainers.memory.advice import SWITCHES, Switch, cheapest, has_what_it_needs, with_switches

CONFIG = load_config(model_name="ltx_video", pretrained_model_name_or_path="somewhere")


def test_every_switch_is_a_valid_flag() -> None:
    for switch in SWITCHES:
        config, _ = parse_flags(["--pretrained_model_name_or_path", "somewhere", *switch.flags.split()])
        changed = with_switches(CONFIG, [switch])
        for name, value in switch.options.items():
            assert config.get(name) == changed.get(name) == value
            assert changed.get(name) != CONFIG.get(name) or name == "precompute_batch_size"
        for name in switch.needs:
            assert any(name in other.options for other in SWITCHES)
        assert switch.cost[0].islower()
        assert not switch.cost.endswith(".")
    prices = [switch.price for switch in SWITCHES]
    assert min(prices) > 0


def peaks_of(savings: dict[str, tuple[float, float]], refused: set[frozenset[str]] = frozenset()):
    """Two phases of 100, of which each option that is changed takes its share off."""

    def peaks(config: TrainConfig) -> dict[str, float] | None:
        on = {name for name in savings if config.changed(name)}
        if any(pair <= on for pair in refused):
            return None
        return {
            "training": 100 - sum(savings[name][0] for name in on),
            "validation": 100 - sum(savings[name][1] for name in on),
        }

    return peaks


NAMES = ("enable_slicing", "enable_tiling", "gradient_checkpointing", "use_ema", "precompute_conditions", "use_dora")


@pytest.mark.parametrize("limit", [120, 3], ids=["exhaustive", "greedy"])
def test_cheapest_set(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set with the lowest price of all that fit; where the search is greedy, one that fits and needs all it has."""
    monkeypatch.setattr(advice, "_MOST_TRIALS", limit)
    draw = random.Random(0)
    for _ in range(30):
        switches = [Switch({name: True}, "", draw.randint(1, 40)) for name in NAMES]
        savings = {name: (draw.randint(0, 30), draw.randint(0, 30)) for name in NAMES}
        refused = {frozenset(draw.sample(NAMES, 2))}
        peaks = peaks_of(savings, refused)
        budget = draw.randint(40, 100)
        fitting = []
        for size in range(len(NAMES) + 1):
            for chosen in itertools.combinations(switches, size):
                found = peaks(with_switches(CONFIG, chosen))
                if found is not None and max(found.values()) <= budget:
                    fitting.append(sum(switch.price for switch in chosen))
        given = cheapest(CONFIG, peaks, budget=budget, switches=switches)
        if limit == 120:
            assert (given is None) == (not fitting)
        if given is None:
            continue
        price = sum(switch.price for switch, _ in given.switches)
        assert price >= min(fitting)
        if limit == 120:
            assert price == min(fitting)
        assert max(given.peaks.values()) <= budget
        assert given.peaks == peaks(given.config)
        for _, saved in given.switches:
            assert max(given.peaks.values()) + saved > budget  # each is needed


def test_every_setting_that_recomputes_counts_as_checkpointing() -> None:
    casts = next(switch for switch in SWITCHES if "layerwise_upcasting_modules" in switch.options)
    base = {"model_name": "ltx_video", "pretrained_model_name_or_path": "somewhere"}
    for stored in ("checkpoint", "keep_attention", "offload"):
        assert has_what_it_needs(load_config(**base, activation_memory=stored), casts)
        assert not has_what_it_needs(load_config(**base, activation_memory=stored, selective_checkpointing=0.5), casts)
    assert has_what_it_needs(load_config(**base, gradient_checkpointing=True), casts)
    assert not has_what_it_needs(CONFIG, casts)


def test_what_stays_and_what_needs_another() -> None:
    """An option that the user has set stays; a switch is on only with what it needs; an option has one value."""
    peaks = peaks_of({"gradient_checkpointing": (50, 50), "use_ema": (20, 20)})
    needing = Switch({"use_ema": True}, "", 1, needs={"gradient_checkpointing": True})
    other = Switch({"gradient_checkpointing": True}, "", 30)
    found = cheapest(CONFIG, peaks, budget=80, switches=[needing, other])
    assert found is not None
    assert [switch for switch, _ in found.switches] == [other]
    both = cheapest(CONFIG, peaks, budget=40, switches=[needing, other])
    assert both is not None
    assert [(switch, saved) for switch, saved in both.switches] == [(needing, 20), (other, 70)]
    assert cheapest(CONFIG, peaks, budget=20, switches=[needing, other]) is None

    given = load_config(model_name="ltx_video", pretrained_model_name_or_path="somewhere", rank=8)
    levels = [Switch({"rank": rank}, "", rank) for rank in (4, 2)]
    by_rank = lambda config: {"training": float(config.training.rank)}  # noqa: E731
    assert cheapest(given, by_rank, budget=4, switches=levels) is None
    chosen = cheapest(CONFIG, by_rank, budget=4, switches=levels)
    assert chosen is not None
    assert chosen.config.training.rank == 2  # the one of the lower price, and not both
