"""What is refused once the device and the engine are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused_options
from torch import nn

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.config.parallel import ParallelSection
from finetrainers.config.root import TrainConfig
from finetrainers.parallel.ddp import DDP
from finetrainers.parallel.fsdp import FSDP
from finetrainers.parallel.strategy import Strategy, trains_on_cpu
from finetrainers.parallel.zero import ZeRO
from finetrainers.plan import init_distributed


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., TrainConfig]:
    def build(**options: Any) -> TrainConfig:
        return load_config(
            model_name="ltx_video", pretrained_model_name_or_path="x", data_root=str(tmp_path),
            video_resolution_buckets=["9x64x64"], **options,
        )  # fmt: skip

    return build


@pytest.mark.parametrize(("kind", "expected"), [(FSDP, True), (ZeRO, True), (DDP, False)])
def test_offloading_in_validation_needs_whole_weights(
    kind: type[Strategy], expected: bool, config: Callable[..., TrainConfig]
) -> None:
    """Weights that come back from the host are others than those that the strategy splits, or has copies of."""
    capabilities = {name: getattr(kind, name) for name in vars(Strategy) if not name.startswith("_")}
    strategy = SimpleNamespace(**{**capabilities, "world_size": 2, "device": torch.device("cpu")})
    options = {"enable_model_cpu_offload": True, "optimizer": "adamw"}

    def refused(**changes: Any) -> bool:
        problems = init_distributed._problems(config(**options, **changes), strategy)  # type: ignore[arg-type]
        return any(problem.where == "--enable_model_cpu_offload" for problem in problems)

    assert refused(validation_prompts="a cat@@@9x64x64") is expected
    assert not refused()


def test_a_gpu_that_cannot_be_used_ends_the_run_before_it_begins(
    config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_distributed, "device_problem", lambda: "driver 470")
    with refused_options(("GPU", "unavailable")) as caught:
        init_distributed.make_strategy(config())
    assert "driver 470" in str(caught.value)


def test_accelerates_switch_counts_where_there_is_a_gpu(
    config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert not trains_on_cpu()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert trains_on_cpu()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match=r"ACCELERATE_USE_CPU: .*DeepSpeed"):
        ZeRO(config(), ParallelSection(deepspeed=True))


def test_the_optimizer_is_made_over_weights_on_the_device(
    config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network leaves host memory before the next rank loads its own, and optimizers may look where weights are."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    said: list[str] = []

    class Network(nn.Linear):
        def to(self, *where: Any, **more: Any) -> Any:
            said.append(f"to {where[0]}")
            return super().to(*where, **more)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        said.append("optimizer")
        return torch.optim.SGD(parameters)

    DDP(config(), ParallelSection()).prepare(lambda: Network(1, 1), make)
    assert said[:2] == ["to cpu", "optimizer"]
