"""The network without weights is built once for runs that train the same, and again for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from finetrainers.config.load import load_config
from finetrainers.plan.preflight import preflight
from finetrainers.plan.sizes_plan import plan_sizes
from finetrainers.plan.trainable import network_without_weights


@pytest.fixture
def network(tiny_repo: Callable[..., Path], tmp_path: Path) -> Callable[..., nn.Module]:
    def build(*, family: str = "ltx_video", stand_in: bool = False, **options: Any) -> nn.Module:
        config = load_config(
            model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)), data_root=str(tmp_path / "absent"),
            video_resolution_buckets=["9x32x32"], output_dir=str(tmp_path / "run"), train_steps=1, **options,
        )  # fmt: skip
        checked = preflight(config, preparing=True, weights=False, planner=plan_sizes)
        return network_without_weights(checked, stand_in=stand_in)

    return build


def num_trained(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def test_runs_share_it_that_differ_in_memory_options(network: Callable[..., nn.Module]) -> None:
    assert network(rank=4) is network(rank=4, gradient_checkpointing=True, batch_size=2)


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 8},
        {"training_type": "full-finetune"},
        {"rank": 4, "stand_in": True},
        {"rank": 4, "family": "cogvideox"},
    ],
)
def test_runs_that_train_something_else_get_another(network: Callable[..., nn.Module], other: dict[str, Any]) -> None:
    first = network(rank=4)
    second = network(**other)
    assert second is not first
    same_class = type(second) is type(first)
    assert same_class is ("family" not in other)
    if same_class:
        assert (num_trained(second) == num_trained(first)) is ("stand_in" in other)
    assert network(rank=4) is not second
