"""Which strategy a run gets, by its options and by what launchers say; nothing is launched."""

from __future__ import annotations

import os
from typing import Any

import pytest
from refusals import refused_options

from finetrainers.config.load import load_config
from finetrainers.config.parallel import ParallelSection
from finetrainers.config.root import TrainConfig
from finetrainers.parallel.ddp import DDP
from finetrainers.parallel.select import open_strategy
from finetrainers.parallel.sharding import ShardingSpec, expected_split, with_launcher
from finetrainers.utils.failures import Kind


def config_for(**options: Any) -> TrainConfig:
    return load_config(model_name="ltx_video", pretrained_model_name_or_path="x", mixed_precision="no", **options)


#: As `accelerate launch` sets them from accelerate_configs/fsdp2.yaml, more or less.
FILE = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}  # fmt: skip
ZERO_FILE = {
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
}  # fmt: skip
FULL, GROUPS_OF_4 = {"fsdp": "full"}, {"fsdp": "hybrid", "fsdp_group_size": 4}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_", "LOCAL_", "WORLD_", "RANK")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")  # written below, and restored afterwards


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ({}, {}, {}),
        ({"fsdp": "full"}, {"WORLD_SIZE": "8"}, FULL),
        ({"fsdp": "hybrid"}, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, GROUPS_OF_4),
        ({"fsdp": "hybrid", "fsdp_group_size": 2}, {"LOCAL_WORLD_SIZE": "4"}, {**GROUPS_OF_4, "fsdp_group_size": 2}),
        ({"sync_each_batch": True}, FILE, {**FULL, "sync_each_batch": True}),
        ({}, {**FILE, "FSDP_RESHARD_AFTER_FORWARD": "false"}, {**FULL, "fsdp_reshard_after_forward": False}),
        ({"fsdp": "full", "fsdp_reshard_after_forward": False}, {}, {**FULL, "fsdp_reshard_after_forward": False}),
        ({}, {**FILE, "FSDP_OFFLOAD_PARAMS": "true"}, {**FULL, "fsdp_cpu_offload": True}),
        ({}, {**FILE, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "WORLD_SIZE": "8"}, GROUPS_OF_4),
        ({"fsdp": "hybrid"}, {**FILE, "LOCAL_WORLD_SIZE": "4"}, GROUPS_OF_4),
        ({}, {**FILE, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "LOCAL_SIZE": "4"}, GROUPS_OF_4),
        ({"deepspeed": True, "zero_stage": 1}, {}, {"deepspeed": True, "zero_stage": 1}),
        ({}, ZERO_FILE, {"deepspeed": True, "zero_stage": 3, "zero_offload": True}),
    ],
)
def test_how_weights_are_split(
    options: dict[str, Any], environment: dict[str, str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert with_launcher(ParallelSection(**options)) == ParallelSection(**expected)
    if "fsdp" in expected:
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false", "or transformers loads empty text encoders"


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ({}, {"WORLD_SIZE": "8"}, ShardingSpec(copies_gradients=True)),
        ({"overlap_gradient_exchange": False}, {"WORLD_SIZE": "8"}, ShardingSpec()),
        ({}, {}, ShardingSpec()),
        ({"fsdp": "full", "sync_each_batch": True}, {"WORLD_SIZE": "8"}, ShardingSpec(8, 8, 8, gathers=True)),
        ({}, {**FILE, "WORLD_SIZE": "6"}, ShardingSpec(6, 6, 6, gathers=True, keeps_gradients=True)),
        (
            {"fsdp": "hybrid", "fsdp_group_size": 2, "fsdp_cpu_offload": True, "sync_each_batch": True},
            {"WORLD_SIZE": "8"},
            ShardingSpec(2, 2, 2, gathers=True, weights_on_host=True, optimizer_on_host=True),
        ),
        ({"deepspeed": True}, {"WORLD_SIZE": "4"}, ShardingSpec(1, 4, 4, zero_stage=2, buffer_numbers=500_000_000)),
        (
            {"deepspeed": True, "zero_stage": 3, "zero_offload": True},
            {"WORLD_SIZE": "4"},
            ShardingSpec(
                4,
                4,
                4,
                gathers=True,
                zero_stage=3,
                weights_on_host=True,
                optimizer_on_host=True,
                live_weights=1_000_000_000,
                buffer_numbers=500_000_000,
                update_numbers=1_000_000_000,
            ),
        ),
        (
            {},
            {"WORLD_SIZE": "4", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
            ShardingSpec(1, 1, 4, zero_stage=1, buffer_numbers=500_000_000),
        ),
        (  # the optimizer alone
            {},
            {
                "WORLD_SIZE": "4",
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
            },
            ShardingSpec(
                4,
                4,
                4,
                gathers=True,
                zero_stage=3,
                optimizer_on_host=True,
                live_weights=1_000_000_000,
                buffer_numbers=500_000_000,
                update_numbers=1_000_000_000,
            ),
        ),
    ],
)
def test_what_an_engine_will_split(
    options: dict[str, Any], environment: dict[str, str], expected: ShardingSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert expected_split(ParallelSection(**options)) == expected


@pytest.mark.parametrize(
    ("options", "environment", "where", "kind", "text"),
    [
        ({}, {**FILE, "FSDP_VERSION": "1"}, "fsdp_version", "unsupported", "FSDP1"),
        ({}, {**FILE, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "fsdp_sharding_strategy", "unsupported", "NO_SHARD"),
        (
            {}, {**FILE, "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "fsdp_activation_checkpointing", "unsupported", "--gradient_checkpointing",
        ),
        (
            {}, {**FILE, "PARALLELISM_CONFIG_CP_SIZE": "2"},
            "parallelism_config_cp_size", "unsupported", "--sp_size",
        ),
        ({"fsdp_group_size": 2}, FILE, "--fsdp_group_size", "conflict", "--fsdp hybrid"),
        ({"deepspeed": True}, FILE, "--deepspeed", "conflict", "FSDP2"),
        ({"fsdp": "full"}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "--deepspeed", "conflict", "FSDP2"),
        ({"zero_stage": 3}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "--zero_stage", "conflict", "launcher"),
        ({"deepspeed": True}, {}, "--deepspeed", "required", "torchrun"),
        ({"fsdp": "full"}, {}, "FSDP2", "required", "torchrun"),
    ],
)  # fmt: skip
def test_what_cannot_be(
    options: dict[str, Any],
    environment: dict[str, str],
    where: str,
    kind: Kind,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with refused_options((where, kind)) as caught:
        open_strategy(config_for(**options))
    assert text in str(caught.value)


def test_accelerate_does_not_know_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs it would wrap the network too, in another way."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    told: list[str] = []

    def join(**_: Any) -> None:
        told.append(os.environ["ACCELERATE_USE_FSDP"])
        raise InterruptedError

    monkeypatch.setattr("finetrainers.parallel.strategy.Accelerator", join)
    with pytest.raises(InterruptedError):
        open_strategy(config_for())
    assert told == ["false"]
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


def test_options_of_fsdp_without_it_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(open_strategy(config_for(sync_each_batch=True, fsdp_cpu_offload=True)), DDP)
    assert "--sync_each_batch " in caplog.text
    assert "--fsdp_cpu_offload " in caplog.text
    with refused_options(("FSDP2", "required")):
        open_strategy(config_for(fsdp="full", overlap_gradient_exchange=False))
    assert "--overlap_gradient_exchange " in caplog.text
    assert "--fsdp_reshard" not in caplog.text
