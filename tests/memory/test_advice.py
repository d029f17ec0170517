"""The search for the cheapest set of switches, against all sets tried one by one; and the table of switches."""

from __future__ import annotations

import itertools
import random

import pytest

from finetrainers.config.flags import parse_flags
from finetrainers.config.load import load_config
from finetrainers.config.parallel import SpMode
from finetrainers.config.root import TrainConfig, fields
from finetrainers.memory.advice import (
    MEMORY_OPTIONS,
    Advice,
    Chosen,
    MemoryOption,
    Outcome,
    cheapest,
    meets_needs,
    sharing_options,
    with_options_set,
)
from finetrainers.plan.memory_lines import advice_lines

CONFIG = load_config(model_name="ltx_video", pretrained_model_name_or_path="somewhere")


def test_every_switch_is_a_valid_flag() -> None:
    for switch in MEMORY_OPTIONS:
        config, _ = parse_flags(["--pretrained_model_name_or_path", "somewhere", *switch.flags.split()])
        changed = with_options_set(CONFIG, [switch])
        for name, value in switch.options.items():
            assert config.get(name) == changed.get(name) == value
            assert changed.get(name) != CONFIG.get(name) or name == "precompute_batch_size"
        assert any(meets_needs(with_options_set(CONFIG, [other]), switch) for other in MEMORY_OPTIONS)
        assert switch.cost[0].islower()
        assert not switch.cost.endswith(".")
    prices = [switch.price for switch in MEMORY_OPTIONS]
    assert min(prices) > 0


def test_text_encoders_are_rounded_as_little_as_fits() -> None:
    sizes = {"none": 30.0, "int8": 16.0, "nf4": 10.0}
    switches = [switch for switch in MEMORY_OPTIONS if "quantize_text_encoders" in switch.options]

    def outcomes(config: TrainConfig) -> Outcome:
        return Outcome({"encoding_text": sizes[config.model.quantize_text_encoders]})

    for budget, chosen in ((30, "none"), (20, "int8"), (12, "nf4")):
        advice = cheapest(CONFIG, outcomes, budget=budget, switches=switches)
        assert advice is not None
        assert advice.config.model.quantize_text_encoders == chosen
    assert cheapest(CONFIG, outcomes, budget=9, switches=switches) is None


def test_an_option_may_be_for_the_host_alone() -> None:
    smaller = MemoryOption({"quantize_frozen": "nf4"}, "rounds", 1)

    def outcomes(config: TrainConfig) -> Outcome:
        is_small = config.memory.quantize_frozen == "nf4"
        return Outcome({"training_step": 5.0, "loading": 2.0 if is_small else 3.0}, host=10.0 if is_small else 40.0)

    advice = cheapest(CONFIG, outcomes, budget=10, host=20, switches=[smaller])
    assert advice is not None
    [chosen] = advice.switches
    assert (chosen.saves, chosen.saves_host) == (0.0, 30.0)
    assert ["30 B" in line and "host memory" in line for line in advice_lines(advice, "")[1:3]] == [False, True]


@pytest.mark.parametrize(
    ("processes", "heads", "mode", "sizes"),
    [
        (8, 24, "ulysses", ["2", "4", "8"]), (8, 30, "ulysses", ["2", "4 --sp_mode ring", "8 --sp_mode ring"]),
        (6, 24, "ulysses", ["2", "3", "6"]), (8, 30, "ring", ["2", "4", "8"]), (1, 24, "ulysses", []),
        (8, None, "ulysses", []),
    ],
)  # fmt: skip
def test_processes_may_share_clips_where_sizes_divide(
    processes: int, heads: int | None, mode: SpMode, sizes: list[str]
) -> None:
    """By a ring where they do not divide the heads; the user may have asked for one."""
    switches = sharing_options(processes, heads, mode)
    assert [switch.flags for switch in switches] == [f"--sp_size {size}" for size in sizes]
    assert all(
        f"multiply --gradient_accumulation_steps by {size[0]}" in one.cost
        for size, one in zip(sizes, switches, strict=True)
    )


Saving = tuple[float, float, float]


def outcomes_of(savings: dict[str, Saving], refused: set[frozenset[str]] = frozenset()):
    """Two phases of 100, which each changed option lowers by its share, and the time, which is 60 at most."""

    def outcomes(config: TrainConfig) -> Outcome | None:
        on = {name for name in savings if config.changed(name)}
        if any(pair <= on for pair in refused):
            return None
        lower = [sum(savings[name][place] for name in on) for place in range(3)]
        return Outcome({"training": 100 - lower[0], "validation": 100 - lower[1]}, max(0, 60 - lower[2]))

    return outcomes


NAMES = ("enable_slicing", "enable_tiling", "gradient_checkpointing", "use_ema", "precompute_conditions", "use_dora")


def test_cheapest_set() -> None:
    """The set with the lowest price of all that fit, its planned time included."""
    draw = random.Random(0)
    tried = []
    for _ in range(60):
        switches = [MemoryOption({name: True}, "", draw.randint(1, 40)) for name in NAMES]
        savings = {name: (draw.randint(0, 30), draw.randint(0, 30), draw.choice((0, 0, 10, 40))) for name in NAMES}
        outcomes = outcomes_of(savings, {frozenset(draw.sample(NAMES, 2))})
        budget = draw.randint(40, 100)
        fitting = []
        for size in range(len(NAMES) + 1):
            for chosen in itertools.combinations(switches, size):
                found = outcomes(with_options_set(CONFIG, chosen))
                if found is not None and found.peak <= budget:
                    fitting.append(sum(switch.price for switch in chosen) + found.slower)
        given = cheapest(CONFIG, outcomes, budget=budget, switches=switches)
        assert (given is None) == (not fitting)
        if given is None:
            continue
        assert sum(one.switch.price for one in given.switches) + given.outcome.slower == min(fitting)
        assert given.outcome == outcomes(given.config)
        assert given.slower == given.outcome.slower - 60
        for one in given.switches:  # each is needed, or makes a step faster
            assert given.outcome.peak + one.saves > budget or one.slower < 0
        tried.append(len(given.switches))
    assert max(tried) > 3


def test_a_search_estimates_few_sets() -> None:
    """Of all sets of 14 switches, 16384, of which half lower the peak, and half make a step faster."""
    names = [name for name, option in fields().items() if option.field.annotation is bool][:14]
    assert len(names) == 14
    switches = [MemoryOption({name: not CONFIG.get(name)}, "", 1 + number % 5) for number, name in enumerate(names)]
    savings = {name: (5.0, 0.0, 0.0) if number % 2 else (0.0, 1.0, 2.0) for number, name in enumerate(names)}
    seen, outcomes = [], outcomes_of(savings)

    def counted(config: TrainConfig) -> Outcome | None:
        seen.append(config)
        return outcomes(config)

    found = cheapest(CONFIG, counted, budget=99, switches=switches)
    assert found is not None
    assert len(found.switches) == 3
    assert len(seen) < 2500
    assert cheapest(CONFIG, counted, budget=10, switches=switches) is None


def test_every_setting_that_recomputes_counts_as_checkpointing() -> None:
    casts = next(switch for switch in MEMORY_OPTIONS if "layerwise_upcasting_modules" in switch.options)
    base = {"model_name": "ltx_video", "pretrained_model_name_or_path": "somewhere"}
    for stored in ("checkpoint", "keep_attention", "offload"):
        assert meets_needs(load_config(**base, activation_memory=stored), casts)
        assert not meets_needs(load_config(**base, activation_memory=stored, selective_checkpointing=0.5), casts)
    assert meets_needs(load_config(**base, gradient_checkpointing=True), casts)
    assert meets_needs(load_config(**base, activation_memory="auto"), casts)  # which then recomputes all
    assert not meets_needs(CONFIG, casts)


def test_what_stays_and_what_needs_another() -> None:
    """An option that the user has set stays; a switch is on only with what it needs; an option has one value."""
    outcomes = outcomes_of({"gradient_checkpointing": (50, 50, 0), "use_ema": (20, 20, 0)})
    needing = MemoryOption({"use_ema": True}, "", 1, needs={"gradient_checkpointing": True})
    other = MemoryOption({"gradient_checkpointing": True}, "", 30)
    found = cheapest(CONFIG, outcomes, budget=80, switches=[needing, other])
    assert found is not None
    assert [one.switch for one in found.switches] == [other]
    both = cheapest(CONFIG, outcomes, budget=40, switches=[needing, other])
    assert both is not None
    assert [(one.switch, one.saves) for one in both.switches] == [(needing, 20), (other, 70)]
    assert cheapest(CONFIG, outcomes, budget=20, switches=[needing, other]) is None

    given = load_config(model_name="ltx_video", pretrained_model_name_or_path="somewhere", rank=8)
    levels = [MemoryOption({"rank": rank}, "", rank) for rank in (4, 2)]
    by_rank = lambda config: Outcome({"training": float(config.training.rank)})  # noqa: E731
    assert cheapest(given, by_rank, budget=4, switches=levels) is None
    chosen = cheapest(CONFIG, by_rank, budget=4, switches=levels)
    assert chosen is not None
    assert chosen.config.training.rank == 2  # the one of the lower price, and not both


def test_slowdown_in_words() -> None:
    """Planned and known time together; what was not measured is said."""
    times = [MemoryOption({"use_ema": True}, "", 1.0, slowdown) for slowdown in (0, 33, None)]

    def said(slower: float, *switches: MemoryOption) -> str:
        return Advice(CONFIG, tuple(Chosen(one, 1.0, 0.0) for one in switches), Outcome({}), slower).slowdown

    assert said(0.0, times[0]) == "none"
    assert said(12.4, times[0]) == "+12 %"
    assert said(2.0, times[1]) == "+35 %"
    assert said(12.4, times[2]).startswith("+12 %, ")
    assert said(0.0, times[2]) == "not measured"
    assert said(-5.0) == "-5 %"
