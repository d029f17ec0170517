"""The choice among variants of a method, with memory and time that are made up."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.memory.activation_plan import Machine
from finetrainers.memory.automatic import AutoSettings, Run, choose_automatic
from finetrainers.parallel.sharding import ShardingSpec

#: Bytes at the peak.
PEAKS = {"replay": 20.0, "reweight": 30.0, "retain": 60.0}
BEST_OF = {"num_generations": 12, "best_of_n": 4}


def chosen(
    room: float | None, *, slower: float = 0.0, split: ShardingSpec | None = None, **options: Any
) -> AutoSettings:
    config = load_config(
        model_name="m", pretrained_model_name_or_path="repo", method="grpo", prompts="p.txt", reward=["brightness"],
        rollout_size="17x64x64", train_steps=4, **{"rollout_gradients": "auto", "init_same_noise": False, **options},
    )  # fmt: skip

    def plan(config: TrainConfig) -> Any:
        peak = PEAKS[config.grpo.rollout_gradients]
        return SimpleNamespace(peak=peak, peaks={"rollout": peak})

    model: Any = SimpleNamespace(slower=lambda *_: slower)
    run = Run(plan, lambda _: model, 4, may_offload_samples=False, split=split or ShardingSpec())
    return choose_automatic(config, run, None if room is None else Machine(room, inf, 1.0, 1.0))


@pytest.mark.parametrize(
    ("room", "options", "expected"),
    [
        (100.0, BEST_OF, "retain"),
        (None, BEST_OF, "retain"),
        (50.0, BEST_OF, "replay"),  # of 12 clips 12 + 2 x 12 passes, against 12 + 3 x 4
        (50.0, {**BEST_OF, "best_of_n": 10}, "reweight"),
        (100.0, {}, "reweight"),  # where all clips are trained, it takes as long as graphs, and less memory
        (25.0, {}, "replay"),
        (10.0, {}, "replay"),  # nothing fits
        (100.0, {**BEST_OF, "updates_per_rollout": 2}, "replay"),
        (100.0, {**BEST_OF, "kl_coef": 0.1}, "replay"),
        (100.0, {**BEST_OF, "mixed_precision": "fp16"}, "replay"),
        (100.0, {**BEST_OF, "split": ShardingSpec(zero_stage=2)}, "replay"),
        (50.0, {**BEST_OF, "best_of_n": 8, "slower": 1 / 3}, "replay"),  # recomputation makes a backward pass dearer
    ],
)
def test_gradients_are_taken_in_the_fastest_way_that_fits(
    room: float | None, options: dict[str, Any], expected: str
) -> None:
    found = chosen(room, **options)
    assert found.config.grpo.rollout_gradients == expected
    assert found.words["rollout_gradients"].startswith(f"{expected}: ")
    assert found.fits is (room is None or room >= PEAKS[expected])


def test_passes_of_a_clip() -> None:
    passes = []
    for room in (100.0, 25.0):
        variant = chosen(room, sampling_steps=10, window_size=2, **BEST_OF).variant
        assert variant is not None
        passes.append((variant.forward, variant.backward))
    assert passes == [(10, pytest.approx(2 / 3)), (pytest.approx(10 + 2 / 3), pytest.approx(2 / 3))]


def test_nothing_is_chosen_where_nothing_is_left_open() -> None:
    found = chosen(10.0, rollout_gradients="retain", **BEST_OF)
    assert found.variant is None
    assert found.config.grpo.rollout_gradients == "retain"
