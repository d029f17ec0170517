"""The runs that the benchmark compares: of the new concept alone, without and with prior prompts that have no new
word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from finetrainers.demo.world import NEW_WORD
from finetrainers.plan.preflight import preflight

pytestmark = pytest.mark.rotating


def test_only_the_prior_differs(benchmark_script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    script = benchmark_script("prior_preservation")
    without, held, blank = (
        script.prior_config(tmp_path / name, steps=2, weight=weight, prior=prior)
        for name, weight, prior in (("a", 0.0, "captions"), ("b", 2.0, "captions"), ("c", 2.0, "blank"))
    )
    assert [config.sft.prior_preservation_weight for config in (without, held, blank)] == [0.0, 2.0, 2.0]
    clips = preflight(held).plan
    assert all(NEW_WORD in clip.caption for clip in clips.clips)
    assert len(set(clips.prior.texts)) > 100
    assert not any(NEW_WORD in text for text in clips.prior.texts)
    assert preflight(blank).plan.prior.texts == ("",)
    assert preflight(without).plan.prior is None
