"""Steps of a rollout that get noise, by the checkpoint's own noise levels; refusals name the option at fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused_options

from finetrainers.config.load import load_config
from finetrainers.diffusion.process import FlowMatching
from finetrainers.methods.grpo.rollout.tables import StepTables
from finetrainers.models.registry import families
from finetrainers.plan.ready import check_network, preflight_by_model

#: A14B's levels of 10 steps at shift 3: four are for high noise, six for low noise.
TEN_STEPS = [3 * s / (1 + 2 * s) for s in (1 - k / 10 for k in range(10))]
BOUNDARY = 0.87


@pytest.fixture
def rewarded(tiny_repo: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Options of a GRPO run of a family's tiny model."""
    (tmp_path / "prompts.txt").write_text("a red ball\n")

    def build(family: str, version: str | None = None, size: str = "9x64x64", **changes: Any) -> dict[str, Any]:
        return {
            "pretrained_model_name_or_path": str(tiny_repo(family, version)), "method": "grpo", "train_steps": 4,
            "prompts": str(tmp_path / "prompts.txt"), "reward": ["smoothness"], "rollout_size": size,
            "prompts_per_step": 1, "num_generations": 2, "output_dir": str(tmp_path / "run"), **changes,
        }  # fmt: skip

    return build


def checked(**options: Any) -> None:
    """Check a run as its start does, by the checkpoint's scheduler."""
    check_network(preflight_by_model(load_config(**options)))


def tables(**options: Any) -> StepTables:
    """Return the steps of a run on one of two experts."""
    config = load_config(
        model_name="wan", pretrained_model_name_or_path="r", method="grpo", prompts="p.txt", reward=["smoothness"],
        train_steps=1, **options,
    )  # fmt: skip
    facts = families()["wan"].read({"model_index": {"boundary_ratio": BOUNDARY}}).of_expert(config.model.expert)
    return StepTables(config, FlowMatching(), torch.tensor(TEN_STEPS), facts)


def test_noise_is_limited_at_steps_that_get_some(rewarded: Callable[..., dict]) -> None:
    """Genmo's schedule has a long last step, which would get noise of std above 2 in full windows."""
    mochi = rewarded("mochi", size="7x64x64", grpo_preset="few-steps")
    checked(**mochi)
    with refused_options(("--sampler", "too_large")):
        checked(**mochi, window_size=0, window_range=[0.0, 1.0])
    with refused_options(("--eta", "too_large")):
        checked(**mochi, eta=9.0)


@pytest.mark.parametrize("expert", ["high", "low"])
@pytest.mark.parametrize("preset", [None, "few-steps", "flow-grpo-fast", "flash"])
def test_every_window_has_steps_of_either_expert(
    expert: str, preset: str | None, rewarded: Callable[..., dict]
) -> None:
    changes = {} if preset is None else {"grpo_preset": preset}
    checked(**rewarded("wan", "a14b", expert=expert, **changes))


def test_the_range_of_an_expert_without_its_steps_counts_from_its_first_one() -> None:
    assert set(tables(expert="high").windows.pool()) == {0, 1, 2, 3}
    assert set(tables(expert="low").windows.pool()) == {4, 5, 6, 7, 8}
    assert set(tables(expert="low", window_range=[0.5, 1.0]).windows.pool()) == {5, 6, 7, 8}  # it has these steps
    assert set(tables(expert="low", window_size=3, window_range=[0.1, 0.4]).windows.pool()) == {5, 6, 7}
    assert set(tables(expert="low", window_size=0).windows.pool()) == {4, 5, 6, 7, 8}


@pytest.mark.parametrize(
    ("options", "where", "kind"),
    [
        ({"expert": "high", "window_size": 5}, "--window_size", "too_large"),
        ({"expert": "low", "window_size": 7, "window_range": [0.0, 1.0]}, "--window_size", "too_large"),
        ({"expert": "low", "eta": 60.0, "sampler": "dance"}, "--eta", "too_large"),
    ],
)
def test_refusals_name_the_option_at_fault(options: dict[str, Any], where: str, kind: Any) -> None:
    with refused_options((where, kind)):
        tables(**options)
