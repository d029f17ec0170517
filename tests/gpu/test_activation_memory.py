"""`--activation_memory auto` on CUDA: the link, a plan that a measured step corrects, and the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from on_devices import Run, assert_equal, fp32

from finetrainers.plan import automatic
from finetrainers.plan.automatic import link_bandwidth
from finetrainers.training.activation_memory import ActivationPlanner

pytestmark = pytest.mark.gpu


def test_the_link_is_no_faster_than_its_memory() -> None:
    assert 1e9 < link_bandwidth(torch.device("cuda")) < 1e12


@pytest.mark.alone
def test_a_measured_step_corrects_the_plan_and_no_bit(
    start: Callable[..., Run], deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of the GPU, and with a little less memory than storing everything takes."""
    plain = start("cuda", **fp32(), activation_memory="checkpoint", dry_batches="off")
    planners: list[ActivationPlanner] = []
    init = ActivationPlanner.__init__

    def noted(self: ActivationPlanner, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]
        planners.append(self)

    monkeypatch.setattr(ActivationPlanner, "__init__", noted)
    auto = start("cuda", **fp32(), activation_memory="auto", dry_batches="off")
    [planner] = planners
    assert planner.choice.stored == "none"
    assert planner.machine.link > 1e9
    assert planner.machine.flops > 0
    assert planner._model.correction > 0
    assert not planner._awaits_measurement
    assert_equal(auto.trained, plain.trained)

    machine = replace(planner.machine, device=0.99 * planner.choice.device)
    monkeypatch.setattr(automatic, "_machine", lambda *_: machine)
    limited = start("cuda", **fp32(), activation_memory="auto", dry_batches="off")
    assert planners[1].choice.stored != "none"
    assert_equal(limited.trained, plain.trained)
