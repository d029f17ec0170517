"""The report on a data set as one HTML file that needs no other and no network."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from .decode_worker import Lost, thumbnail_task
from .fates import MEANINGS
from .full_decode import isolated
from .probing import Progress

_HEIGHT = 72  # of a thumbnail, in pixels
_PATIENCE_S = 20.0
#: Items with a picture; a page with more would be too large for browsers (4 kB each).
MOST_PICTURES = 5000


def make_page(report: dict[str, Any], *, jobs: int | None, progress: Progress | None = None) -> str:
    """The page of a report, with the first, middle and last picture of each item that can be decoded.

    Args:
        report: of `make_report`.
        jobs: processes that make pictures; None: one for each processor.
        progress: is told how far it is.
    """
    pictures = _pictures(report["items"], jobs=jobs, progress=progress or (lambda what, done, total: None))
    shown = ("index", "name", "caption", "use", "fate", "reason", "bucket", "fps", "kind", "where", "frames",
             "source_fps", "width", "height", "crop", "marks", "same_as", "size_bytes")  # fmt: skip
    items = [{key: item[key] for key in shown} | {"picture": pictures.get(item["index"])} for item in report["items"]]
    # Names and captions are anybody's: the template escapes them, and the script puts them in as text, never as HTML.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["percent"] = lambda share: f"{100 * share:.1f} %"
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        items=items,
        meanings=dict(MEANINGS),
        without_pictures=max(sum(item["width"] > 0 for item in report["items"]) - MOST_PICTURES, 0),
    )


def _pictures(items: list[dict[str, Any]], *, jobs: int | None, progress: Progress) -> dict[int, str]:
    """By index, pictures as base64. Made by processes that may crash, like any decoding."""
    wanted = [item for item in items if item["width"] and item["fate"] not in _NOT_SHOWN][:MOST_PICTURES]
    calls = [(item["path"], item["kind"], _HEIGHT) for item in wanted]
    made: dict[int, str] = {}
    task: Callable[..., bytes | None] = thumbnail_task
    for done, (place, picture) in enumerate(
        isolated(task, calls, limits_s=[_PATIENCE_S] * len(calls), jobs=jobs), start=1
    ):
        if picture is not None and not isinstance(picture, Lost):
            made[wanted[place]["index"]] = base64.b64encode(picture).decode("ascii")
        progress("pictures", done, len(calls))
    return made


_NOT_SHOWN = frozenset({"too_large", "decoder_failed", "outside_root"})
