"""Compiled blocks in whole runs: what is compiled in which step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from finetrainers.config.load import load_config
from finetrainers.memory.activation_plan import Machine
from finetrainers.plan import automatic
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.ready import get_ready
from finetrainers.runs.run import run
from finetrainers.training import activation_memory
from finetrainers.training.activation_memory import ActivationPlanner
from finetrainers.training.callbacks.base import Callback
from finetrainers.training.state import TrainState

pytestmark = pytest.mark.usefixtures("traced")


class Graphs(Callback):
    """Counts the graphs of each step, with what is evaluated and sampled after it."""

    def __init__(self) -> None:
        self.totals = [0]

    def on_step(self, state: TrainState) -> None:
        self.totals.append(counters["stats"]["unique_graphs"])

    @property
    def by_step(self) -> list[int]:
        return [after - before for before, after in zip(self.totals, self.totals[1:], strict=False)]


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "graphs"), [("ltx_video", 2), ("hunyuan_video", 4)])
def test_the_first_step_of_a_size_compiles_and_later_ones_do_not(
    family: str, graphs: int, options: Callable[..., dict]
) -> None:
    """Two graphs for each class of blocks: the first block of a LoRA has inputs without a gradient, or is given views.

    Some steps of LTX-Video are given the clean first frame, and others are not, which must not change what blocks see.
    Sampling, which begins before the first step, compiles once more.
    """
    values, sampled = options(family, compile="regional"), 0
    if family == "ltx_video":
        values |= options(
            family, clips=4, compile="regional", first_frame_conditioning_p=0.5, train_steps=4, validation_steps=2,
            validation_prompts="a@@@9x64x64", validation_inference_steps=2,
        )  # fmt: skip
        sampled = 1
    found = Graphs()
    run(get_ready(load_config(**values)), callbacks=[found])
    assert found.by_step == [graphs + sampled, *[0] * (values["train_steps"] - 1)]
    assert not counters["graph_break"]


@pytest.mark.rotating
def test_activation_memory_is_chosen_again_after_a_step_that_did_not_compile(
    options: Callable[..., dict], tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step is measured. The new choice compiles at most as much again as the first step."""
    model = str(tiny_repo("ltx_video", layers=4))
    values = options("ltx_video", clips=4, compile="regional", train_steps=4, pretrained_model_name_or_path=model)
    plain = Graphs()
    reference = run(get_ready(load_config(**{**values, "output_dir": tmp_path / "plain"})), callbacks=[plain])
    torch._dynamo.reset()
    counters.clear()

    planners: list[ActivationPlanner] = []
    init = ActivationPlanner.__init__

    def noted(self: ActivationPlanner, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        planners.append(self)

    def less_than_planned(_: Any) -> float:
        model = planners[0]._model
        return model.persistent_bytes + 0.5 * (planners[0].choice.device - model.persistent_bytes) - model.others

    monkeypatch.setattr(ActivationPlanner, "__init__", noted)
    monkeypatch.setattr(activation_memory, "measured_peak", less_than_planned)
    auto = {**values, "activation_memory": "auto", "memory_budget": 100, "output_dir": tmp_path / "auto"}
    sizes = RunMemory(get_ready(load_config(**auto))).choose().model.sizes
    room = (sizes("none", 0)[0] + sizes("checkpoint", 4)[0]) / 2
    monkeypatch.setattr(automatic, "_machine", lambda *_: Machine(room, 2**40, 1e9, 1.0))
    found = Graphs()
    state = run(get_ready(load_config(**auto)), callbacks=[found])
    [planner] = planners
    assert planner.choice.stored == "none"
    assert found.by_step[0] == plain.by_step[0]
    assert found.by_step[1] == 0
    assert found.by_step[2] <= plain.by_step[0]
    assert found.by_step[3] == 0
    events = [json.loads(line) for line in (tmp_path / "auto" / "events.jsonl").read_text().splitlines()]
    assert [(one["step"], one["setting"]) for one in events if one["event"] == "activation_memory"] == [(1, "none")]
    assert state is not None
    assert reference is not None
    for one, other in zip(state.network.parameters(), reference.network.parameters(), strict=True):
        assert torch.equal(one, other)
