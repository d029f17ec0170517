"""Display of a run in a notebook, besides its line of progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.draw.curves import read_metrics
from finetrainers.draw.notebook import Bundle, Output, curves_bundle, samples_bundle
from finetrainers.training.callbacks.base import Callback, Record
from finetrainers.utils.progress import is_silent

if TYPE_CHECKING:
    from finetrainers.training.state import Sample, TrainState


class NotebookView(Callback):
    """Outputs with the most important curves of the run, and with the samples of the latest step."""

    def __init__(self) -> None:  # samples of the start precede `on_start`
        self._curves: Output | None = None
        self._media: Output | None = None
        self._sampled: tuple[int, list[tuple[str, Path]]] = (-1, [])  # step; prompt and file of its samples
        self._started = self._drawn = time.monotonic()
        self._records: list[dict[str, Any]] = []

    def on_start(self, state: TrainState) -> None:
        self.on_back(state)

    def on_back(self, state: TrainState) -> None:
        metrics = state.run_dir.metrics_file
        self._records = read_metrics(metrics) if metrics.is_file() else []

    def on_log(self, state: TrainState, record: Record) -> None:
        self._records.append(dict(record))
        if is_silent(self._drawn, self._started):
            self._draw()

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> None:
        earlier = self._sampled[1] if self._sampled[0] == state.step else []
        self._sampled = state.step, [*earlier, *((sample.prompt, sample.path) for sample in samples)]
        self._media = _shown(self._media, samples_bundle(*self._sampled)) if samples else self._media

    def on_stop(self, state: TrainState) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if (content := curves_bundle(self._records)) is not None:
            self._curves = _shown(self._curves, content)


def _shown(output: Output | None, content: Bundle) -> Output:
    """Return the output with this content, or a new one."""
    if output is None:
        return Output(content)
    output.show(content)
    return output
