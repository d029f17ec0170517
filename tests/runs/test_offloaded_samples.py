"""Validation samples move parts of the model to the host by themselves only where they would not fit otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetrainers.config.load import load_config
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import with_reserve
from finetrainers.plan import automatic
from finetrainers.plan.automatic import choose_settings
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.preflight import preflight
from finetrainers.utils.phases import VALIDATION


def test_samples_are_offloaded_only_where_they_would_not_fit(
    options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the planned peak of validation; what the user says counts, and without a GPU nothing is moved.

    A run and the estimate of its GPU say the same.
    """
    values = options(validation_prompts="a cat@@@9x64x64")
    checked = preflight(load_config(**values))
    plan = RunMemory(checked).plan()
    needed, loaded = with_reserve(plan.peaks[VALIDATION]), plan.other_networks
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: loaded)
    monkeypatch.setattr(automatic, "peak_flops", lambda _: None)
    monkeypatch.setattr(automatic, "link_bandwidth", lambda _: 25e9)
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), weights_are_movable=True, gather_objects=lambda one: one)

    def offloads(size: float, *, parallel: Any = gpu, **changes: Any) -> bool | None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (size - with_reserve(loaded), size))
        run = preflight(load_config(**values, **changes))
        config, _ = choose_settings(run, parallel)
        if parallel is gpu:
            estimated = RunMemory(run, gpu_gib=size / GIB).choose().config
            assert estimated.validation.enable_model_cpu_offload == config.validation.enable_model_cpu_offload
        return config.validation.enable_model_cpu_offload

    assert offloads(1.01 * needed) is False
    assert "note" not in capsys.readouterr().out
    assert offloads(0.99 * needed) is True
    assert re.search(r"note: .*\(--no-enable_model_cpu_offload\)", capsys.readouterr().out)
    for asked in (True, False):
        assert offloads(0.99 * needed, enable_model_cpu_offload=asked) is asked
    for other in ({"device": torch.device("cpu")}, {"weights_are_movable": False}):
        assert offloads(0.99 * needed, parallel=SimpleNamespace(**{**vars(gpu), **other})) is False
    values = options()
    assert offloads(1.0) is None
