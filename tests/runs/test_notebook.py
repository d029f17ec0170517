"""Outputs of a run in a notebook, which replace themselves, instead of a line for each step."""

from __future__ import annotations

import base64
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from finetrainers import Callback, TrainState, load_config, train
from finetrainers.draw import notebook
from finetrainers.draw.notebook import curves_bundle, in_notebook, samples_bundle

Bundle = dict[str, str]


class Display(ModuleType):
    """IPython with a kernel; `outputs` has the contents of each output, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("IPython")
        self.outputs: list[list[Bundle]] = []
        monkeypatch.setitem(sys.modules, "IPython", self)
        monkeypatch.setitem(sys.modules, "IPython.display", self)

    def get_ipython(self) -> Any:
        return SimpleNamespace(kernel=object())

    def display(self, content: Bundle, *, raw: bool, display_id: bool) -> Any:
        assert (raw, display_id) == (True, True)
        contents = [content]
        self.outputs.append(contents)
        return SimpleNamespace(update=lambda content, raw: contents.append(content))

    def last(self, start: str) -> Bundle:
        """Return the last content of the only output whose text begins so."""
        [contents] = [contents for contents in self.outputs if contents[0]["text/plain"].lstrip().startswith(start)]
        return contents[-1]


class Interrupt(Callback):
    """Interrupts the kernel after the third step, as the button of a notebook does."""

    def on_step(self, state: TrainState) -> None:
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.rotating
def test_a_run_replaces_its_outputs_and_survives_an_interrupt(
    options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = options(
        train_steps=6, logging_steps=1, validation_prompts="<b> ball:::a cup", validation_steps=3,
        validation_inference_steps=2, resume_from_checkpoint="auto",
    )  # fmt: skip
    monkeypatch.setattr(notebook.LiveOutput, "_INTERVAL_S", 0.0)
    display = Display(monkeypatch)
    result = train(load_config(**values), callbacks=[Interrupt()])
    assert (result.stopped_by, result.weights) == ("SIGINT", None)
    assert 3 <= result.step < 6
    assert len(display.outputs) == 3  # progress, samples, curves
    progress = display.last("step")
    assert progress["text/plain"].startswith(f"step {result.step}/6  took")
    assert f'<progress value="{result.step}" max="6">' in progress["text/html"]
    assert "Training loss" in display.last("curves")["text/html"]
    samples = display.last("samples")
    videos = [path for path in result.samples if path.parent.name == "step-000003"]
    assert len(videos) == 2
    assert all(base64.b64encode(path.read_bytes()).decode() in samples["text/html"] for path in videos)
    assert "step 3: &lt;b&gt; ball" in samples["text/html"]
    out = capsys.readouterr().out
    assert "step 2/6" not in out  # no line for each step
    assert "stopped by SIGINT" in out
    assert 'train(load_config("' in out.replace("'", '"')

    # The same cell again continues, and its curves begin with the first step.
    display.outputs.clear()
    result = train(load_config(**values))
    assert (result.step, result.stopped_by) == (6, None)
    assert str(result.samples[-1]) in display.last("samples")["text/plain"]
    assert curves_bundle(result.metrics) == display.last("curves")


def test_lines_replace_outputs_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(monkeypatch)
    assert in_notebook()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not in_notebook()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(display, "get_ipython", lambda: SimpleNamespace())  # of a terminal
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_curves_and_samples_choose_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert curves_bundle([]) is None
    assert curves_bundle([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]) is None
    scores = [{"step": n, "reward/a": n / 9, "reward/b": 1.0, "kl": 0.1, "loss": 0.0} for n in range(4)]
    curves = curves_bundle(scores)
    assert curves is not None
    assert curves["text/plain"] == "curves: Reward of rollouts: a, Reward of rollouts: b"
    assert curves["text/html"].count("<svg") == 2
    levels = [{"step": n, "eval_loss_0.10": 0.1, "eval_loss_0.90": 0.2} for n in range(3)]
    legend = curves_bundle(levels)
    assert legend is not None
    assert legend["text/html"].count("<b class") == 2  # each line has its color and its name

    path = tmp_path / "00-ball.mp4"
    path.write_bytes(b"v" * 100)
    path.with_suffix(".png").write_bytes(b"i" * 10)
    for limit, expected in {100: "<video", 99: "<img", 9: f"<code>{path}"}.items():
        monkeypatch.setattr(notebook, "_MOST_BYTES", limit)
        bundle = samples_bundle(5, [("a ball", path)])
        assert f"<figure>{expected}" in bundle["text/html"]
        assert str(path) in bundle["text/plain"]
