"""The report on a dataset as one HTML file that needs no other and no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from markupsafe import Markup, escape

from finetrainers.draw.page import render_page
from finetrainers.utils.progress import StageProgress

from ..reading.items import media_kind
from ..reading.sources.captions import LONG_CAPTION
from ..reading.status import MEANINGS, STATUSES
from .decode_worker import GAP, Lost, thumbnail_task
from .full_decode import isolated

_PATIENCE_S = 20.0
#: Items with a picture; a page with more would be too large for browsers.
MOST_PICTURES = 5000
#: Heights of pictures in pixels, and up to how many items have them: a page stays below some 25 MB.
_HEIGHTS = ((500, 216), (1500, 144), (MOST_PICTURES, 72))
_MOST_BARS = 12
_ORDER = {"rejected": 0, "skipped": 1}  # items that need attention come first


def make_page(report: dict[str, Any], *, jobs: int | None, progress: StageProgress) -> str:
    """Return the page of a report, with the first, middle and last picture of each item that can be decoded, and of its mask.

    Args:
        report: of `make_report`.
        jobs: processes that make pictures; None: one for each processor.
        progress: called as work proceeds.
    """
    pictures, masks = _pictures(report["items"], jobs=jobs, progress=progress)
    shown = ("index", "name", "caption", "use", "status", "reason", "bucket", "fps", "kind", "where", "frames",
             "source_fps", "width", "height", "crop", "marks", "same_as", "size_bytes")  # fmt: skip
    items = [
        {key: item[key] for key in shown}
        | {
            "picture": pictures.get(item["index"]),
            "mask": masks.get(item["index"]),
            "mask_white": item.get("mask_white"),
        }
        for item in report["items"]
    ]
    items.sort(key=lambda item: _ORDER.get(item["use"], 2))
    captions = [
        text for item in report["items"] if item["bucket"] for text in item.get("captions") or [item["caption"]]
    ]
    # Names and captions are anybody's: the template escapes them, and the script puts them in as text, never as HTML.
    return render_page(
        Path(__file__).with_name("html_report.html"),
        filters={"percent": lambda share: f"{100 * share:.1f} %", "code": with_code},
        report=report,
        items=items,
        meanings=dict(MEANINGS),
        gap=GAP,
        shares=shares_of(report["counts"]),
        lengths=_lengths([len(caption) for caption in captions]),
        without_pictures=max(sum(item["width"] > 0 for item in report["items"]) - MOST_PICTURES, 0),
    )


Pictures: TypeAlias = dict[int, dict[str, Any]]


def _pictures(items: list[dict[str, Any]], *, jobs: int | None, progress: StageProgress) -> tuple[Pictures, Pictures]:
    """By index, pictures as base64 and their sizes, and those of masks. Made by processes that may crash, like any decoding."""
    wanted = [item for item in items if item["width"] and item["status"] not in _NOT_SHOWN][:MOST_PICTURES]
    height = next(height for most, height in _HEIGHTS if len(wanted) <= most)
    masked = [item for item in wanted if item.get("mask_white") is not None]
    of_masks = [(item["mask"], media_kind(item["mask"]), (item["height"], item["width"]), height) for item in masked]
    calls = [(item["path"], item["kind"], (item["height"], item["width"]), height) for item in wanted] + of_masks
    made: tuple[Pictures, Pictures] = ({}, {})
    results = isolated(thumbnail_task, calls, limits_s=[_PATIENCE_S] * len(calls), jobs=jobs)
    for done, (place, picture) in enumerate(results, start=1):
        if picture is not None and not isinstance(picture, Lost):
            data = base64.b64encode(picture.content).decode("ascii")
            is_mask = place >= len(wanted)
            item = masked[place - len(wanted)] if is_mask else wanted[place]
            made[is_mask][item["index"]] = {**picture._asdict(), "content": data}
        progress("made pictures", done, len(calls))
    return made


_NOT_SHOWN = frozenset({"too_large", "decoder_failed", "outside_root"})


def shares_of(counts: dict[str, Any]) -> list[dict[str, Any]]:
    """Segments of the status bar: a name to filter by, words, a count, and a color."""
    found = [
        {"name": "train", "text": "trained on", "count": counts["train"], "color": "good"},
        {"name": "eval", "text": "held out", "count": counts["eval"], "color": "held"},
        {"name": "skipped", "text": "skipped", "count": counts["skipped"], "color": "soft"},
    ]
    rejected = [status for status in STATUSES if status not in ("used", "skipped") and status in counts["statuses"]]
    found += [
        {"name": f, "text": f.replace("_", " "), "count": counts["statuses"][f], "color": "bad"} for f in rejected
    ]
    return [share for share in found if share["count"]]


def _lengths(lengths: Sequence[int]) -> dict[str, Any] | None:
    """Return a histogram of caption lengths in at most `_MOST_BARS` bars of a round width."""
    if not lengths:
        return None
    widths = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    width = next(width for width in widths if width >= 5 and max(lengths) < width * _MOST_BARS)
    counts = [0] * (max(lengths) // width + 1)
    for length in lengths:
        counts[length // width] += 1
    bars = [
        {
            "low": k * width,
            "high": (k + 1) * width - 1,
            "count": n,
            "share": n / max(counts),
            "long": (k + 1) * width > LONG_CAPTION,
        }
        for k, n in enumerate(counts)
    ]
    return {
        "bars": bars,
        "shortest": min(lengths),
        "median": round(median(lengths)),
        "longest": max(lengths),
        "most": LONG_CAPTION,
    }


def with_code(text: str) -> Markup:
    """Text whose parts in backticks are set as code."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:  # the last one is not closed
        parts[-2:] = [Markup("`").join(parts[-2:])]
    return Markup("").join(Markup("<code>%s</code>") % part if k % 2 else part for k, part in enumerate(parts))
