"""The report on a dataset as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
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
from .full_decode import run_isolated
from .usage import MOST_LOST

_PATIENCE_S = 20.0
#: Number of items with thumbnails; a page with more would be too large for browsers.
MAX_THUMBNAILS = 5000
#: Heights of thumbnails in pixels by maximum number of items, so that a page stays below about 25 MB.
_HEIGHTS = ((500, 216), (1500, 144), (MAX_THUMBNAILS, 72))
_MAX_BARS = 12
_ORDER = {"rejected": 0, "skipped": 1}  # items that need attention come first


def make_page(report: dict[str, Any], *, jobs: int | None, progress: StageProgress) -> str:
    """Return the page of a report, with first, middle and last frame of each decodable item and of its mask.

    Args:
        report: of `make_report`.
        jobs: number of processes that make thumbnails, or None for one per processor.
        progress: called as work proceeds.
    """
    thumbnails, masks = _make_thumbnails(report["items"], jobs=jobs, progress=progress)
    keys = ("index", "name", "caption", "use", "status", "reason", "bucket", "fps", "kind", "where", "frames",
             "source_fps", "width", "height", "crop", "scale", "usable_frames", "used_frames", "marks", "same_as",
             "size_bytes")  # fmt: skip
    items = [
        {key: item[key] for key in keys}
        | {
            "thumbnails": thumbnails.get(item["index"]),
            "mask": masks.get(item["index"]),
            "mask_white": item.get("mask_white"),
        }
        for item in report["items"]
    ]
    items.sort(key=lambda item: _ORDER.get(item["use"], 2))
    captions = [
        text for item in report["items"] if item["bucket"] for text in item.get("captions") or [item["caption"]]
    ]
    # Names and captions are untrusted: the template escapes them, and the script inserts them as text, never as HTML.
    return render_page(
        Path(__file__).with_name("html_report.html"),
        filters={"percent": lambda share: f"{share:.1%}", "code": with_code},
        report=report,
        items=items,
        meanings=dict(MEANINGS),
        gap=GAP,
        shares=shares_of(report["counts"]),
        lengths=_lengths([len(caption) for caption in captions]),
        without_thumbnails=max(sum(map(_has_thumbnails, report["items"])) - MAX_THUMBNAILS, 0),
        most_lost=MOST_LOST,
    )


ThumbnailsByIndex: TypeAlias = dict[int, dict[str, Any]]


def _make_thumbnails(
    items: list[dict[str, Any]], *, jobs: int | None, progress: StageProgress
) -> tuple[ThumbnailsByIndex, ThumbnailsByIndex]:
    """Return thumbnails of items, and of masks, by index: base64 and sizes. The processes that make them may crash."""
    selected = list(filter(_has_thumbnails, items))[:MAX_THUMBNAILS]
    height = next(height for limit, height in _HEIGHTS if len(selected) <= limit)
    files = [(item, item["path"], item["kind"]) for item in selected]
    files += [(item, item["mask"], media_kind(item["mask"])) for item in selected if item.get("mask_white") is not None]
    calls = [(path, kind, (item["height"], item["width"]), height) for item, path, kind in files]
    thumbnails: tuple[ThumbnailsByIndex, ThumbnailsByIndex] = ({}, {})
    results = run_isolated(thumbnail_task, calls, limits_s=[_PATIENCE_S] * len(calls), jobs=jobs)
    for done, (position, thumbnail) in enumerate(results, start=1):
        if thumbnail is not None and not isinstance(thumbnail, Lost):
            data = base64.b64encode(thumbnail.content).decode("ascii")
            by_index = thumbnails[position >= len(selected)]
            by_index[files[position][0]["index"]] = {**thumbnail._asdict(), "content": data}
        progress("made thumbnails", done, len(calls))
    return thumbnails


_WITHOUT_THUMBNAIL = frozenset({"too_large", "decoder_failed", "outside_root"})


def _has_thumbnails(item: Mapping[str, Any]) -> bool:
    """Return whether a file may be decoded: it is intact by its header, or lacks only a caption."""
    return item["status"] == "caption_missing" or (item["width"] > 0 and item["status"] not in _WITHOUT_THUMBNAIL)


def shares_of(counts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the segments of the status bar: a name to filter by, a label, a count, and a color."""
    segments = [
        {"name": "train", "text": "trained on", "count": counts["train"], "color": "good"},
        {"name": "eval", "text": "held out", "count": counts["eval"], "color": "held"},
        {"name": "skipped", "text": "skipped", "count": counts["skipped"], "color": "soft"},
    ]
    segments += [
        {"name": status, "text": status.replace("_", " "), "count": counts["statuses"].get(status), "color": "bad"}
        for status in STATUSES
        if status not in ("used", "skipped")
    ]
    return [segment for segment in segments if segment["count"]]


def _lengths(lengths: Sequence[int]) -> dict[str, Any] | None:
    """Return a histogram of caption lengths in at most `_MAX_BARS` bars of a round width."""
    if not lengths:
        return None
    widths = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    width = next(width for width in widths if width >= 5 and max(lengths) < width * _MAX_BARS)
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
    """Return text whose parts in backticks are set as code."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:  # the last one is not closed
        parts[-2:] = [Markup("`").join(parts[-2:])]
    return Markup("").join(Markup("<code>%s</code>") % part if k % 2 else part for k, part in enumerate(parts))
