"""The memory of sampling is that of validation without what is trained; it decides what waits in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finetrainers.config.given import RawOptions
from finetrainers.config.sample import SampleSection
from finetrainers.models.sizes import num_weights
from finetrainers.models.spec import ModelSpec
from finetrainers.sampling.memory import offloads, sampling_bytes
from finetrainers.sampling.plan import SamplePlan, plan_samples
from finetrainers.sampling.weights import Weights


@pytest.fixture
def planned(tiny_repo: Callable[..., Path]) -> Callable[..., tuple[SamplePlan, ModelSpec]]:
    def plan(size: str, **flags: object) -> tuple[SamplePlan, ModelSpec]:
        options = SampleSection.model_validate({"prompts": f"a cat:::a dog@@@{size}", "size": "9x32x32"})
        found = plan_samples(
            [str(tiny_repo("ltx_video"))], options, RawOptions(dict(flags), {name: name for name in flags})
        )
        return found, found.family.load(found.config.model)

    return plan


def test_by_hand(planned: Callable[..., tuple[SamplePlan, ModelSpec]]) -> None:
    plan, spec = planned("49x512x768")
    weights = sum(p.numel() for p in spec.transformer_on_meta().parameters())
    vae = num_weights(spec, "vae")
    assert vae is not None
    working = 118 * 49 * 512 * 768  # of tests/plan/test_memory_plan.py
    assert sampling_bytes(plan, spec) == pytest.approx(2 * (weights + vae) + working, rel=1e-3)
    tiled, _ = planned("49x512x768", enable_tiling=True)
    assert sampling_bytes(tiled, tiled.family.load(tiled.config.model)) < 0.75 * working
    full = replace(plan.variants[0], weights=Weights("step 1", "full", Path(), is_checkpoint=True))
    config = plan.config.model_copy(
        update={"training": plan.config.training.model_copy(update={"training_type": "full-finetune"})}
    )
    more = sampling_bytes(replace(plan, variants=[full], config=config), spec) - sampling_bytes(plan, spec)
    assert more == pytest.approx(2 * weights, rel=0.05)


def test_offload(planned: Callable[..., tuple[SamplePlan, ModelSpec]], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for has, waits in ((80 * 2**30, False), (2**30, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, has=has: (has, has))
        plan, spec = planned("49x512x768")
        found, note = offloads(plan, spec, device=gpu)
        assert (found, "--no-enable_model_cpu_offload" in note) == (waits, waits)
        assert offloads(plan, spec, device=torch.device("cpu")) == (False, "")
        asked, spec = planned("49x512x768", enable_model_cpu_offload=True)
        assert offloads(asked, spec, device=gpu) == (True, "")
