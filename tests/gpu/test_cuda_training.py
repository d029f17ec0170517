"""Training steps on a device: of every family, resumed, on data that workers load, across kinds of devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from on_devices import Run, assert_equal, cases, devices, fp32

from finetrainers.training import trainer

Start = Callable[..., Run]


@pytest.mark.parametrize(("device", "family", "training_type"), cases(*product(FAMILIES, ("lora", "full-finetune"))))
def test_sft_steps(device: str, family: str, training_type: str, plain: Start) -> None:
    """In bf16, and close to fp32 on the CPU: the noise is the same, since it is drawn on the host."""
    run, reference = plain(device, family, training_type), plain("cpu", family, training_type, exact=True)
    assert run.curve()[0] == pytest.approx(reference.curve()[0], rel=1e-2)
    assert run.curve() == pytest.approx(reference.curve(), rel=5e-2)  # later ones are of weights that were rounded, too
    assert all(math.isfinite(norm) and norm > 0 for norm in run.curve("grad_norm"))
    before = dict(run.state.spec.load_transformer(torch.float32).named_parameters())
    for name, weight in run.trained.items():
        assert weight.isfinite().all(), name
        if training_type == "lora":
            assert "lora_A" in name or weight.any(), name  # B begins at zero
        else:
            assert weight.ndim < 2 or not torch.equal(weight, before[name]), name


@pytest.mark.parametrize("device", devices(cpu=False))
def test_resuming_is_bit_equal(device: str, start: Start, deterministic: None) -> None:
    options = {
        "train_steps": 4, "checkpointing_steps": 2, "lora_dropout": 0.3, "use_ema": True, "lr_scheduler": "cosine",
        "lr_warmup_steps": 1,
    }  # fmt: skip
    straight = start(device, **options)
    checkpoint = straight.root / "checkpoints" / "step-2"
    resumed = start(device, **options, resume_from_checkpoint=str(checkpoint))
    assert resumed.curve() == straight.curve()[2:]
    assert_equal(resumed.trained, straight.trained)
    assert_equal(resumed.state.ema.weights, straight.state.ema.weights)


@pytest.mark.parametrize("device", devices())
def test_a_checkpoint_of_a_cpu_continues(device: str, plain: Start, start: Start) -> None:
    """With the same noise, and with the optimizer's step as it is computed on this device."""
    straight = plain("cpu", exact=True)
    checkpoint = straight.root / "checkpoints" / "step-2"
    resumed = start(device, **fp32(), resume_from_checkpoint=str(checkpoint))
    assert resumed.curve() == pytest.approx(straight.curve()[2:], rel=0 if device == "cpu" else 1e-3)
    optimizer = resumed.state.optimizer
    assert [group["fused"] for group in optimizer.param_groups] == [True if device == "cuda" else None]
    for state in optimizer.state.values():
        assert state["step"].device.type == device
        assert state["step"].item() == 3
        assert state["exp_avg"].device.type == device


@pytest.mark.parametrize("device", devices(cpu=False))
def test_workers_and_page_locked_memory_change_nothing(device: str, plain: Start, start: Start) -> None:
    """Workers are forks: one that touched CUDA would fail."""
    loaded = start(device, **fp32(), dataloader_num_workers=2, pin_memory=True)
    assert loaded.curve() == pytest.approx(plain(device, exact=True).curve(), rel=0 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("device", devices())
def test_what_is_encoded_beforehand_trains_as_on_the_fly(device: str, plain: Start, start: Start) -> None:
    """Two clips at a time."""
    cached = start(device, precompute_conditions=True, precompute_batch_size=2)
    assert cached.curve() == pytest.approx(plain(device).curve(), rel=1e-2)


@pytest.mark.parametrize(("device", "family"), cases(*FAMILIES, on_cpu=0))
def test_no_loss_waits_for_the_device(device: str, family: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on; the first may look at what never changes."""
    accumulate, begun = trainer.accumulate_gradients, []

    def watched(state: Any, micro_batches: Any) -> Any:
        loss = state.method.loss

        def watched_loss(*arguments: Any) -> Any:
            if device == "cpu" or len(begun) < 2:
                return loss(*arguments)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return loss(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        begun.append(state.step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state.method, "loss", watched_loss)
            return accumulate(state, micro_batches)

    monkeypatch.setattr(trainer, "accumulate_gradients", watched)
    assert len(start(device, family).curve()) == len(begun) == 3
