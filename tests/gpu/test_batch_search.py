"""The search for a batch size where memory really runs out: of a GPU, or of the host's allocator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_devices import devices, fp32

from finetrainers.config.load import load_config
from finetrainers.methods.sft import SFT
from finetrainers.plan.ready import preflight_by_model
from finetrainers.tools.batch_search.measure import load_timer, measure_sizes
from finetrainers.tools.batch_search.request import BucketSearch, searched_config

_HUNGER = 256 << 20  # bytes that a clip takes on a GPU
_TOO_MUCH = 1 << 60
_FIT = 5


@pytest.mark.parametrize("device", devices())
def test_a_search_ends_at_the_largest_size_that_fits(
    device: str, tiny_repo: Callable[..., Path], clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(device == "cpu").lower())
    values: dict[str, Any] = {
        "pretrained_model_name_or_path": str(tiny_repo("ltx_video")), "data_root": str(clips), "rank": 4,
        "video_resolution_buckets": ["9x64x64"], "output_dir": str(tmp_path / "run"), **fp32(),
    }  # fmt: skip
    loss = SFT.loss

    def hungry(self: SFT, transformer: Any, batch: Any) -> Any:
        on_gpu = batch.moments.is_cuda
        taken = _HUNGER * len(batch) if on_gpu else 1 if len(batch) <= _FIT else _TOO_MUCH
        held = torch.empty(taken, dtype=torch.uint8, device=batch.moments.device)
        found = loss(self, transformer, batch)
        del held
        return found

    monkeypatch.setattr(SFT, "loss", hungry)
    checked = preflight_by_model(searched_config(load_config(**values)), preparing=True)
    one = BucketSearch((9, 64, 64), clips=None, most=16, estimated=9)
    with load_timer(checked) as bench:
        assert bench.device.type == device
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        if device == "cuda":
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            more = _FIT * _HUNGER + _HUNGER // 2
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
            assert 0 < bench.limit(total / 2**30, margin=0.05) < 0.95 * total / 2**30
        try:
            measure_sizes(bench, one, steps=1, limit=1e6, say=lambda *_: None)
        finally:
            if device == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0)
        assert one.largest == _FIT
        assert one.chosen
        failed = [trial for trial in one.trials if trial.clips > _FIT]
        assert failed
        assert all(trial.error == "out of memory" for trial in failed)
        if device == "cuda":
            [largest] = [trial for trial in one.trials if trial.clips == _FIT]
            assert largest.peak is not None
            assert largest.peak >= _FIT * _HUNGER / 2**30
            assert torch.cuda.memory_allocated() < before + _HUNGER // 2  # nothing of the failed steps is held
