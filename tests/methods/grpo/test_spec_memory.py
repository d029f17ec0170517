"""What reward finetuning keeps, against sums written out."""

from __future__ import annotations

from typing import Any

import pytest

from finetrainers.config.grpo import step_range
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.memory.estimate import GIB, bytes_of_copy, estimate_for
from finetrainers.methods.grpo.no_replay.gradient_plan import passes, plan_gradients, steps_with_graphs
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
    assert memory().trajectories == 16 * ELEMENTS * 4 * (1 + 2 * 2)  # clean, and both sides of two steps
    assert memory(trajectory_dtype="bf16").trajectories == 16 * ELEMENTS * (4 + 2 * 2 * 2)
    assert memory(window_size=0).trajectories == 16 * ELEMENTS * 4 * (1 + 9 * 2)
    assert memory(ratio_norm=True).trajectories == 16 * ELEMENTS * 4 * (1 + 2 * 3)
    nft = {"method": "nft", "init_same_noise": False}
    for options in ({"offload_trajectory": True}, nft):
        assert memory(**options).trajectories == 16 * ELEMENTS * 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert memory().trajectories == 8 * ELEMENTS * 4 * 5


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


@pytest.mark.parametrize(
    ("options", "on_device", "on_host"),
    [
        ({"batch_size": 1}, 3 + 1, 0),  # those that wait, and that of the clip's earlier steps
        ({"batch_size": 4}, 3 + 4, 0),
        ({"batch_size": 1, "window_size": 1}, 3, 0),
        ({"batch_size": 1, "best_of_n": 4, "offload_trajectory": True}, 1, 5),
        ({"batch_size": 1, "advantage": "global_std"}, 15 + 1, 0),
    ],
)
def test_gradients_taken_while_sampling(options: dict[str, Any], on_device: int, on_host: int) -> None:
    found = memory(rollout_gradients="reweight", rollout_cfg=3.0, **options)
    assert (found.gradients, found.gradients_on_host) == (on_device, on_host)
    assert found.trajectories == 0
    assert found.batch_size == 2  # a clip at a time, with both branches
    config = configured(rollout_gradients="reweight", **options)
    assert not method_spec(config).accumulates(config)


def test_processes_that_gather_weights_go_backward_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others sum up what waits of a prompt as soon as it is done; so do these where gradients wait, and not graphs."""
    early = {how: plan_gradients(configured(rollout_gradients=how)).early for how in ("reweight", "retain")}
    assert early == {"reweight": True, "retain": True}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    early = {how: plan_gradients(configured(rollout_gradients=how)).early for how in ("reweight", "retain")}
    assert early == {"reweight": True, "retain": False}


def test_steps_that_leave_graphs_where_processes_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clip's own, or those of any of the prompts, whose windows may lie apart; there are ten steps in all."""
    windows = {"rollout_gradients": "retain", "window_per_prompt": True, "window_size": 2, "sampling_steps": 10}
    configs = [configured(**windows, prompts_per_step=prompts) for prompts in (2, 4, 8)]
    assert [steps_with_graphs(config) for config in configs] == [2, 2, 2]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    found = [steps_with_graphs(config) for config in configs]
    assert found == [4, min(8, len(step_range(configs[1].grpo))), len(step_range(configs[2].grpo))]
    windows["window_per_prompt"] = False
    assert steps_with_graphs(configured(**windows, prompts_per_step=4)) == 2


def test_passes_of_a_clip() -> None:
    """Ten steps are sampled and two trained, of half of the clips; replay calls the network for these once more."""
    found = {
        how: passes(configured(rollout_gradients=how, sampling_steps=10, window_size=2, best_of_n=4))
        for how in ("replay", "reweight", "retain")
    }
    assert found == {"replay": (11, 1), "reweight": (10, 2), "retain": (10, 1)}


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
    rewarded, _ = plan(method="grpo", prompts="p.txt", reward=["brightness"], rollout_size="9x64x64", kl_coef=0.1)
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
    reweighted, _ = plan(
        method="grpo", prompts="p.txt", reward=["brightness"], rollout_size="9x64x64", rollout_gradients="reweight",
    )  # fmt: skip
    weights = 4 * sum(p.numel() for p in network.parameters()) / GIB
    assert reweighted.parts["gradients of clips"] == pytest.approx((3 + 2) * weights)
    assert reweighted.parts["activations kept"] == pytest.approx(plain.parts["activations kept"] / 2)
    assert reweighted.total > reweighted.parts["gradients of clips"] + 4 * weights  # state, weights, one more gradient
    grown = {name for name, size in rewarded.parts.items() if size and not plain.parts[name]}
    assert grown == {"copies of the policy", "sampled trajectories"}
