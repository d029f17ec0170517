"""Compiled blocks in whole runs: what is compiled in which step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch._dynamo.utils import counters

from finetrainers.config.load import load_config
from finetrainers.engine.callbacks.base import Callback
from finetrainers.engine.ready import get_ready
from finetrainers.engine.run import run
from finetrainers.engine.state import TrainState

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


@pytest.mark.parametrize(("family", "graphs"), [("ltx_video", 2), ("cogvideox", 2), ("hunyuan_video", 4)])
def test_the_first_step_of_a_size_compiles_and_later_ones_do_not(
    family: str, graphs: int, options: Callable[..., dict]
) -> None:
    """Two graphs for each class of blocks: the first block of a LoRA has inputs without a gradient, or is given views.

    Some steps of LTX-Video are given the clean first frame, and others are not, which must not change what blocks see.
    Sampling compiles once more.
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
    assert found.by_step == [graphs, sampled, *[0] * (values["train_steps"] - 2)]
    assert not counters["graph_break"]
