"""Every published network at its full size with random weights: training steps, and their peak against the plan.

`benchmarks/memory.py` measures more cases. Without a GPU, its code runs here with the same options on the tiny
networks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from published_networks import NETWORKS, published_repository

from finetrainers.config.load import load_config
from finetrainers.memory.fit import fits, with_reserve
from finetrainers.models.registry import get_family

LORA = {"training_type": "lora", "rank": 64, "optimizer": "adamw"}
FULL = {"training_type": "full-finetune", "optimizer": "adamw"}
#: Two bytes a weight, two a gradient and two of state: the only way for 13 billion weights on one GPU.
FULL_ROUNDED = {
    "training_type": "full-finetune", "optimizer": "adamw-torchao-8bit", "master_weights": "stochastic_rounding",
}  # fmt: skip
RUNS = [
    pytest.param(name, options, id=f"{name}-{options['training_type']}")
    for name in NETWORKS
    for options in (LORA, FULL_ROUNDED if name == "HunyuanVideo" else FULL)
]

TinyRepo = Callable[..., Path]


@pytest.fixture(scope="module")
def script(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("memory")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("name", "options"), RUNS)
def test_full_size(name: str, options: dict[str, Any], script: Any, tmp_path: Path) -> None:
    _skip_without_library(options)
    bench = script.StepTimer(script.Case(name, options), tmp_path, tiny=False)
    planned, have = bench.planned(), torch.cuda.get_device_properties(0).total_memory / script.GIB
    if not fits(planned, have):
        pytest.skip(f"needs about {with_reserve(planned):.0f} GiB, {torch.cuda.get_device_name(0)} has {have:.0f} GiB")
    peak = bench.measured()["allocated"]
    report = f"{name} {options['training_type']}: peak {peak:.1f} GiB, planned {planned:.1f} GiB"
    print(report)
    assert planned / 2 < peak < 2 * planned, report


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "options"), RUNS)
def test_same_code_at_tiny_size(name: str, options: dict[str, Any], script: Any, tmp_path: Path) -> None:
    _skip_without_library(options)
    bench = script.StepTimer(script.Case(name, options), tmp_path, tiny=True)
    assert bench.planned() > 0
    with torch.compiler.set_stance("force_eager"):  # torchao compiles each size of matrix, for minutes on a CPU
        measured = bench.measured()
    assert measured["step_s"] > 0
    assert ("allocated" in measured) == torch.cuda.is_available()


@pytest.mark.parametrize("name", NETWORKS)
def test_configs_are_those_of_the_published_networks(name: str, tiny_repo: TinyRepo, tmp_path: Path) -> None:
    network = NETWORKS[name]
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path / "model", network.config)
    config = load_config(model_name=network.family, pretrained_model_name_or_path=str(repo), data_root=str(tmp_path))
    transformer = get_family(network.family).load(config.model).transformer_on_meta()
    assert sum(p.numel() for p in transformer.parameters()) == network.num_parameters
    assert {key: transformer.config[key] for key in network.config} == network.config


def _skip_without_library(options: dict[str, Any]) -> None:
    """Skip, saying so, where the optimizer's package is not installed."""
    if "torchao" in options["optimizer"]:
        pytest.importorskip("torchao")
