"""Reward finetuning on a device: what is replayed has the density that it was sampled with, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from every_family import FAMILIES
from on_devices import Run, cases, fp32


@pytest.mark.parametrize(("device", "family"), cases(*FAMILIES))
def test_ratios_are_one_under_autocast_and_checkpointing(device: str, family: str, start: Callable[..., Run]) -> None:
    """Rollout and replay call kernels with other batches: sampled four at a time, trained two at a time."""
    run = start(device, family, method="grpo", train_steps=1, gradient_checkpointing=True)
    assert run.curve("ratio_error") == [0.0]
    assert run.curve("ratio") == pytest.approx([1.0], abs=1e-6)
    assert all(math.isfinite(norm) and norm > 0 for norm in run.curve("grad_norm"))


@pytest.mark.gpu
def test_scores_of_a_stream_of_its_own_are_the_same(start: Callable[..., Run], deterministic: None) -> None:
    """Scored on the GPU that samples, while it samples."""
    found = [
        start("cuda", method="grpo", train_steps=2, batch_size=2, overlap_rewards=overlap) for overlap in (False, True)
    ]
    names = ("reward/brightness", "loss", "grad_norm")
    assert [found[0].curve(name) for name in names] == [found[1].curve(name) for name in names]
    assert found[1].curve("seconds/reward_overlapped")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", ["nft", "awm"])
def test_steps_on_noised_clips(method: str, device: str, start: Callable[..., Run]) -> None:
    run = start(device, method=method, noise_levels=2, init_same_noise=False, train_steps=2)
    assert all(map(math.isfinite, run.curve()))
    assert all(norm > 0 for norm in run.curve("grad_norm"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_reward_gradients_are_those_of_a_cpu(family: str, start: Callable[..., Run]) -> None:
    """Through the decoder, which is recomputed, and two steps; in fp32, and in bf16 nearby."""
    options = {"method": "refl", "draft_k": 2, "num_generations": 1, "batch_size": 2, "train_steps": 1}
    reference = start("cpu", family, **options, **fp32(family))
    for name in ("loss", "reward_gradient", "grad_norm"):
        exact = start("cuda", family, **options, **fp32(family)).curve(name)
        assert exact == pytest.approx(reference.curve(name), rel=1e-2), name
    rounded = start("cuda", family, **options, gradient_checkpointing=True)
    assert rounded.curve("loss") == pytest.approx(reference.curve("loss"), rel=5e-2)
    assert all(math.isfinite(norm) and norm > 0 for norm in rounded.curve("grad_norm"))
