"""What reward finetuning keeps, against sums written out."""

from __future__ import annotations

from typing import Any

import pytest

from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.memory.estimate import GIB, bytes_of_copy, estimate_for
from finetrainers.methods.registry import method_spec
from finetrainers.methods.spec import MethodMemory
from finetrainers.parallel.sharding import ShardingSpec

LATENT = (16, 5, 8, 8)
ELEMENTS = 16 * 5 * 8 * 8


def configured(**options: Any) -> TrainConfig:
    return load_config(**{
        "model_name": "m", "pretrained_model_name_or_path": "repo", "method": "grpo", "prompts": "p.txt",
        "reward": ["brightness"], "rollout_size": "17x64x64", "train_steps": 4, "prompts_per_step": 2,
        "num_generations": 8, "batch_size": 4, **options,
    })  # fmt: skip


def memory(**options: Any) -> MethodMemory:
    config = configured(**options)
    size = config.dataloader.batch_size
    return method_spec(config).memory(config, LATENT, batch_size=size, trained=4 * 100, reference=4 * 1000)


def test_trajectories_are_the_latents_of_all_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"init_same_noise": False}
    assert memory(**other).trajectories == 16 * ELEMENTS * 4 * (1 + 2 * 2)  # clean, and both sides of two steps
    assert memory(**other, trajectory_dtype="bf16").trajectories == 16 * ELEMENTS * (4 + 2 * 2 * 2)
    assert memory(**other, window_size=0).trajectories == 16 * ELEMENTS * 4 * (1 + 9 * 2)
    assert memory(**other, ratio_norm=True).trajectories == 16 * ELEMENTS * 4 * (1 + 2 * 3)
    for options in ({"offload_trajectory": True}, {"method": "nft"}):
        assert memory(**other, **options).trajectories == 16 * ELEMENTS * 4
    # The starts of two prompts, and the loss of 16 clips with the predictions of two: 14 more.
    assert memory().trajectories == memory(**other).trajectories + 4 * ELEMENTS * (2 * 2 + 12 * 14)
    assert memory(batch_size=1, best_of_n=4, updates_per_rollout=3).trajectories == (
        memory(**other).trajectories + 4 * ELEMENTS * (2 * 2 + 12 * 1)  # of four clips in turn, two are in one update
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert memory(**other).trajectories == 8 * ELEMENTS * 4 * 5
    assert memory().trajectories == memory(**other).trajectories + 4 * ELEMENTS * (2 * 1 + 12 * 7)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, 0),
        ({"kl_coef": 0.1}, 0),  # the LoRA is switched off
        ({"training_type": "full-finetune"}, 0),
        ({"training_type": "full-finetune", "kl_coef": 0.1}, 1000),
        ({"method": "nft"}, 100),
        ({"method": "nft", "training_type": "full-finetune"}, 1100),
        ({"method": "nft", "training_type": "full-finetune", "nft_kl": 0.0}, 100),
        ({"method": "awm", "old_policy_kl": 0.0}, 0),
        ({"method": "awm", "updates_per_rollout": 2, "training_type": "full-finetune", "kl_coef": 0.1}, 1200),
    ],
)
def test_copies_of_the_policy(options: dict[str, Any], weights: int) -> None:
    assert memory(**options).copies == 4 * weights


@pytest.mark.parametrize(
    ("split", "bytes_each"),
    [
        (ShardingSpec(), 4),
        (
            ShardingSpec(weights=4, gradients=4, optimizer=4, gathers=True),
            2 / 4,
        ),  # split as the network, in what it computes in
        (ShardingSpec(weights=4, gathers=True, weights_on_host=True), 0),
        (ShardingSpec(optimizer=4, zero_stage=1), 2),  # DeepSpeed splits nothing that is not trained
        (ShardingSpec(weights=4, gathers=True, zero_stage=3), 2),
    ],
)
def test_a_copy_of_the_model_before_training(split: ShardingSpec, bytes_each: float) -> None:
    given = {"model_name": "m", "pretrained_model_name_or_path": "repo"}
    assert bytes_of_copy(load_config(**given, mixed_precision="bf16"), split, trainable_bytes=4) == bytes_each
    if split != ShardingSpec() and bytes_each:
        config = load_config(**given, mixed_precision="no")
        assert bytes_of_copy(config, split, trainable_bytes=4) == 2 * bytes_each


def test_calls_of_the_network() -> None:
    assert (memory().batch_size, memory(rollout_cfg=2.0).batch_size) == (4, 8)
    for options, several in (({}, True), ({"batch_size": 16, "window_size": 1}, False), ({"batch_size": 16}, True)):
        config = configured(**options)
        assert method_spec(config).accumulates(config) is several


def test_they_are_part_of_the_estimate(tiny_repo: Any) -> None:
    from finetrainers.models.registry import get_family

    family = get_family("ltx_video")

    def plan(**options: Any) -> Any:
        config = load_config(
            model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")), batch_size=2,
            training_type="full-finetune", optimizer="adamw", **options,
        )  # fmt: skip
        network = family.load(config.model).transformer_on_meta()
        return estimate_for(
            config, family.facts.geometry, network, spec=family.load(config.model), bucket=(9, 64, 64)
        ), network

    plain, network = plan(train_steps=1, data_root="clips", gradient_accumulation_steps=2)
    rewarded, _ = plan(
        method="grpo", prompts="p.txt", reward=["brightness"], rollout_size="9x64x64", kl_coef=0.1,
        init_same_noise=False,
    )  # fmt: skip
    assert plain.parts["copies of the policy"] == plain.parts["sampled trajectories"] == 0
    assert rewarded.parts["copies of the policy"] == pytest.approx(
        4 * sum(p.numel() for p in network.parameters()) / GIB
    )
    assert rewarded.parts["sampled trajectories"] == pytest.approx(
        4 * 8 * network.config.out_channels * 2 * 2 * 2 * 4 * 5 / GIB
    )
    assert rewarded.total == pytest.approx(
        plain.total + rewarded.parts["copies of the policy"] + rewarded.parts["sampled trajectories"]
    )
    grown = {name for name, size in rewarded.parts.items() if size and not plain.parts[name]}
    assert grown == {"copies of the policy", "sampled trajectories"}
