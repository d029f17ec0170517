"""Validation samples move parts of the model to the host by themselves only where they would not fit otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finetrainers.config.load import load_config
from finetrainers.engine.memory_plan import RunMemory, offloads_samples
from finetrainers.engine.preflight import preflight
from finetrainers.memory.phases import RESERVE
from finetrainers.utils.phases import VALIDATION


def test_samples_are_offloaded_only_where_they_would_not_fit(
    options: Callable[..., dict], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the planned peak of validation; what the user says counts, and without a GPU nothing is moved."""
    values = options(validation_prompts="a cat@@@9x64x64")
    checked = preflight(load_config(**values))
    needed = (1 + RESERVE) * RunMemory(checked).plan().peaks[VALIDATION]
    assert not offloads_samples(checked, gpu_bytes=None)
    assert not offloads_samples(checked, gpu_bytes=1.01 * needed)
    assert "note" not in capsys.readouterr().out
    assert offloads_samples(checked, gpu_bytes=0.99 * needed)
    assert "samples are drawn with the model's parts in host memory" in capsys.readouterr().out
    for asked in (True, False):
        decided = preflight(load_config(**values, enable_model_cpu_offload=asked))
        assert offloads_samples(decided, gpu_bytes=0.99 * needed) is asked
    none = preflight(load_config(**options()))
    assert not offloads_samples(none, gpu_bytes=1.0)
