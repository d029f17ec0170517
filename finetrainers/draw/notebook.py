"""Outputs of a run below the cell of a notebook: its progress, the first curves, and samples.

IPython is not required: a kernel has imported it.
"""

from __future__ import annotations

import base64
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from finetrainers.utils.launch import launched_processes
from finetrainers.utils.progress import polling
from finetrainers.utils.reading import read_bytes

from .curves import Records, is_number, matching, panels_of, points
from .svg_chart import COLORS, Chart, Series, chart_svg

#: Content of an output by MIME type; a reader shows the richest type that it can.
Bundle = dict[str, str]
_CURVES = 2  # charts, at most
_FEWEST_POINTS = 3  # of a chart
_MOST_BYTES = 8_000_000  # of media in an output, which the notebook's file stores
#: Elements of samples by the suffix of their files, the best first.
_ELEMENTS = {
    ".mp4": '<video src="data:video/mp4;base64,%s" autoplay loop muted controls></video>',
    ".png": '<img src="data:image/png;base64,%s">',
}
_STYLE = """<style>
.ft-run { display: flex; flex-wrap: wrap; gap: 12px; font: 13px system-ui, sans-serif; }
.ft-run figure { margin: 0; width: 420px; max-width: 100%; }
.ft-run figcaption { opacity: .75; overflow-wrap: anywhere; } .ft-run b { color: var(--c); margin-left: .6em; }
.ft-run svg, .ft-run video, .ft-run img { width: 100%; }
.ft-run text { font-size: 11px; fill: currentColor; opacity: .75; }
.ft-run path { fill: none; stroke: currentColor; stroke-width: .5; } .ft-run .rule { opacity: .25; }
.ft-run .c0 { --c: #2563a8; } .ft-run .c1 { --c: #c2571a; } .ft-run .c2 { --c: #1a7f4b; }
.ft-run .c3 { --c: #8a3ffc; } .ft-run .c4 { --c: #b42318; } .ft-run .c5 { --c: #0f8b8d; }
.ft-run .c6 { --c: #8a5a00; } .ft-run .c7 { --c: #777; }
.ft-run .line, .ft-run .pale { stroke: var(--c); stroke-width: 1.6; }
.ft-run .pale { opacity: .35; stroke-width: .8; }
.ft-run .dots { stroke: var(--c); stroke-width: 4; stroke-linecap: round; }
.ft-run .band { fill: var(--c); stroke: none; opacity: .15; }
</style>"""


def in_notebook() -> bool:
    """Return whether this process alone trains, in the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return launched_processes() == 1 and getattr(shell, "kernel", None) is not None


class Output:
    """An output of the current cell that later content replaces, from any thread."""

    def __init__(self, content: Bundle) -> None:
        """Display the content."""
        from IPython.display import display

        self._context = copy_context()  # of the cell
        self._handle: Any = display(content, raw=True, display_id=True)

    def show(self, content: Bundle) -> None:
        """Replace the content; a display that fails does not end the run."""
        with contextlib.suppress(Exception):
            self._context.copy().run(self._handle.update, content, raw=True)


class LiveOutput:
    """A line of progress that replaces itself twice a second; see `rich.live.Live`."""

    _INTERVAL_S = 0.5

    def __init__(self, content: Callable[[], Bundle]) -> None:
        self._content = content
        self._updated = time.monotonic()

    def start(self) -> None:
        """Display the line."""
        self._output = Output(self._content())
        self._polling = polling(self._poll)
        self._polling.__enter__()

    def stop(self) -> None:
        """Display the last state of the line."""
        self._polling.__exit__(None, None, None)
        self._output.show(self._content())

    def _poll(self) -> None:
        if time.monotonic() - self._updated >= self._INTERVAL_S:
            self._updated = time.monotonic()
            self._output.show(self._content())


def progress_bundle(step: int, total: int, text: str) -> Bundle:
    """Return a line of progress: a bar, and the text behind it."""
    bar = f'<progress value="{step}" max="{total}"></progress>'
    return {"text/plain": text, "text/html": f'{bar} <code style="white-space: pre-wrap">{escape(text)}</code>'}


def curves_bundle(records: Records) -> Bundle | None:
    """Return the most important curves of these records, or None if there are none yet."""
    names = dict.fromkeys(name for record in records for name, value in record.items() if is_number(value))
    charts: list[Chart] = []
    for _, panel in panels_of(names):
        metrics = {name: points(records, name) for name in matching(names, panel.names)}
        longest = max((len(xs) for xs, _ in metrics.values()), default=0)
        if panel.x == "step" and longest >= _FEWEST_POINTS and len(charts) < _CURVES:
            series = [
                Series(panel.label(name), line, color % COLORS, panel.style_of(name))
                for color, (name, line) in enumerate(metrics.items())
            ]
            charts.append(Chart(panel.heading, series))
    if not charts:
        return None
    figures = [(Markup(chart_svg(chart)), _caption(chart)) for chart in charts]
    return _page(figures, text="curves: " + ", ".join(chart.title for chart in charts))


def _caption(chart: Chart) -> Markup:
    """Return the title of a chart, with a legend if it has several lines."""
    lines = chart.series if len(chart.series) > 1 else []
    legend = Markup(" ").join(Markup('<b class="c%s">%s</b>') % (line.color, line.label) for line in lines)
    return Markup("%s %s") % (chart.title, legend)


def samples_bundle(step: int, samples: Sequence[tuple[str, Path]]) -> Bundle:
    """Return the samples of a step, each a prompt and a file, as videos; large ones as images, or as paths."""
    paths = [path for _, path in samples]
    media = [Markup("<code>%s</code>") % path for path in paths]
    for suffix, element in _ELEMENTS.items():
        files = [path.with_suffix(suffix) for path in paths]
        if all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) <= _MOST_BYTES:
            media = [Markup(element) % base64.b64encode(read_bytes(file, limit=_MOST_BYTES)).decode() for file in files]
            break
    captions = [Markup("step %s: %s") % (step, prompt) for prompt, _ in samples]
    figures = list(zip(media, captions, strict=True))
    return _page(figures, text=f"samples of step {step}:\n" + "\n".join(f"  {path}" for path in paths))


def _page(figures: Sequence[tuple[Markup, Markup]], *, text: str) -> Bundle:
    """Return figures with their captions side by side, and the text that stands in for them."""
    items = Markup("").join(
        Markup("<figure>%s<figcaption>%s</figcaption></figure>") % (content, caption) for content, caption in figures
    )
    return {"text/plain": text, "text/html": str(Markup(_STYLE) + Markup('<div class="ft-run">%s</div>') % items)}
