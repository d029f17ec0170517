"""Memory that really runs out, and what dry batches tell of it beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_devices import Run, assert_equal, devices, fp32
from torch import nn

from finetrainers.config.sections import OptimizerSection
from finetrainers.methods.sft import SFT
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.training import memory_probe
from finetrainers.training.guards.memory import OutOfMemory, is_out_of_memory

Start = Callable[..., Run]
_HUNGER = 256 << 20  # bytes that a sample takes on a GPU
_TOO_MUCH = 1 << 60


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """`limit(bytes)`: on CUDA, this process may take so many more."""

    def set_limit(more: int) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)

    yield set_limit
    if torch.cuda.is_initialized():
        torch.cuda.set_per_process_memory_fraction(1.0)


def hungry(patch: pytest.MonkeyPatch, limit: Callable[[int], None]) -> list[int]:
    """Let each sample of a micro-batch take memory, of which there is enough for one; the sizes of all
    micro-batches."""
    loss, sizes = SFT.loss, []

    def limited(self: SFT, transformer: Any, batch: Any) -> Any:
        device = batch.moments.device
        if not sizes and device.type == "cuda":
            torch.cuda.empty_cache()
            limit(_HUNGER + _HUNGER // 2)
        sizes.append(len(batch))
        taken = _HUNGER * len(batch) if device.type == "cuda" else 1 if len(batch) == 1 else _TOO_MUCH
        held = torch.empty(taken, dtype=torch.uint8, device=device)
        found = loss(self, transformer, batch)
        del held
        return found

    patch.setattr(SFT, "loss", limited)
    return sizes


@pytest.mark.parametrize("device", devices())
def test_a_step_that_runs_out_of_memory_is_retried_in_halves(
    device: str, plain: Start, start: Start, limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(device, exact=True)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    with monkeypatch.context() as patch:
        sizes = hungry(patch, limit)
        run = start(device, **fp32(), dry_batches="off", train_steps=2)
    assert sizes == [2, 1, 1, 1, 1]
    [event] = [e for e in run.events if e["event"] == "out_of_memory"]
    assert (event["samples"], event["now"]) == (2, 1)
    assert "memory" in event["error"]
    assert run.curve() == pytest.approx(expected.curve()[:2], rel=1e-5)
    assert run.curve("grad_norm") == pytest.approx(expected.curve("grad_norm")[:2], rel=1e-4)
    if device == "cuda":
        assert torch.cuda.memory_allocated() < before + _HUNGER // 2  # nothing of the failed step is held


@pytest.mark.parametrize("device", devices())
def test_allocations_that_fail_count_as_out_of_memory(device: str) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as error:
        torch.empty(_TOO_MUCH, dtype=torch.uint8, device=device)
    assert is_out_of_memory(error.value)
    if device == "cuda":
        with pytest.raises(RuntimeError) as error:
            torch.empty(1 << 46, dtype=torch.uint8, pin_memory=True)
        assert is_out_of_memory(error.value)
        assert torch.ones(3, device="cuda").sum().item() == 3  # the context goes on


@pytest.mark.gpu
def test_room_for_the_optimizer_that_is_not_there_is_said_with_advice(limit: Callable[[int], None]) -> None:
    with torch.device("meta"):
        network = nn.Linear(1 << 16, 1 << 16)
    state = SimpleNamespace(
        parallel=SimpleNamespace(optimizer_device=torch.device("cuda"), optimizer_shards=1),
        config=SimpleNamespace(optimizer=OptimizerSection(optimizer="adamw")),
        transformer=network,
        optimizer=None,
    )
    limit(1 << 30)
    with pytest.raises(OutOfMemory, match=r" 32\.00 GiB .*--training_type lora"):
        memory_probe._reserve_optimizer_memory(state)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_loading_what_does_not_fit_is_said_with_advice(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LTXVideoSpec, "load_vae", lambda _: torch.empty(_TOO_MUCH, device="cuda"))
    with pytest.raises(OutOfMemory, match=r" loading .*\(CUDA .*--quantize_frozen int8"):
        start("cuda")


@pytest.mark.parametrize("device", devices(cpu=False))
def test_dry_batches_see_the_peak_of_training(
    device: str, start: Start, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's state is made by the first update; until then its room is held."""
    if device == "cuda":
        probe_memory = memory_probe.probe_memory

        def then_reset(*arguments: Any) -> None:
            probe_memory(*arguments)
            torch.cuda.reset_peak_memory_stats()

        monkeypatch.setattr("finetrainers.training.trainer.probe_memory", then_reset)
    options = {"training_type": "full-finetune", "checkpointing_steps": 2}
    run = start(device, dry_batches="on", **options)
    [event] = [e for e in run.events if e["event"] == "dry_batch"]
    assert (event["size"], event["samples"]) == ("9x64x64", 2)
    if device == "cuda":
        assert event["peak_gib"] >= 0.98 * torch.cuda.max_memory_allocated() / 2**30 > 0
    else:
        assert event["peak_gib"] is None
    expected = start(device, **options)
    assert run.curve() == expected.curve()
    assert_equal(run.trained, expected.trained)
