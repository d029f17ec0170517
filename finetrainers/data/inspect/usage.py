"""The part of each clip that its examples use, of the area and of the frames. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetrainers.config.sections import DataSection

from ..reading.sources.rows import summarize_items
from .item_report import ItemReport

#: Share of the area or of the frames of a clip above which a loss is a warning.
MOST_LOST = 1 / 3
#: Warnings of several clips and of one.
_CROPPED = "lose over a third of their area to cropping", "loses over a third of its area to cropping"
_SHORTENED = "lose over a third of their frames", "loses over a third of its frames"
_NOTICEABLE = 0.01  # as sizes are always rounded


def frame_loss(item: Mapping[str, Any]) -> float:
    """Return the share of a clip's frames, at its rate, that none of its examples uses, from its record."""
    return 1 - item["used_frames"] / item["usable_frames"] if item["usable_frames"] else 0.0


def least_used(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records of clips that are not used whole, least used share of pixels first."""
    shares = [((1 - item["crop"]) * (1 - frame_loss(item)), item) for item in items if item["bucket"]]
    shares.sort(key=lambda entry: entry[0])
    return [item for share, item in shares if share < 1 - _NOTICEABLE]


def describe_usage(item: Mapping[str, Any]) -> str:
    """Return the used parts of a clip: `15% of the area, 49 of 60 frames, enlarged 3.56x`."""
    parts = [f"{1 - item['crop']:.0%} of the area"]
    if item["kind"] == "video":
        parts.append(f"{item['used_frames']} of {item['usable_frames']} frames")
    if item["scale"] > 1:
        parts.append(f"enlarged {item['scale']:.3g}x")
    return ", ".join(parts)


def usage_warnings(reports: Sequence[ItemReport], data: DataSection) -> Iterator[str]:
    """Yield a warning if clips lose over a third of their area, and one if they lose over a third of their frames.

    Args:
        reports: on the items of a dataset.
        data: the options of the dataset.
    """
    items = [{name: getattr(report, name) for name in ("name", "crop", "usable_frames", "used_frames")}
             for report in reports if report.bucket]  # fmt: skip
    cropped = sorted((item for item in items if item["crop"] > MOST_LOST), key=lambda item: -item["crop"])
    if cropped:
        names = [f"{item['name']} ({item['crop']:.0%})" for item in cropped]
        yield f"{summarize_items(names, *_CROPPED)}; {_area_remedy(data)}"
    is_drawn_again = data.frame_selection == "random" and not data.precompute_conditions
    shortened = sorted((item for item in items if frame_loss(item) > MOST_LOST), key=frame_loss, reverse=True)
    if shortened and not is_drawn_again:
        names = [f"{item['name']} ({item['used_frames']} of {item['usable_frames']} used)" for item in shortened]
        yield f"{summarize_items(names, *_SHORTENED)}; {_frame_remedy(data)}"


def _area_remedy(data: DataSection) -> str:
    names = [name for name in ("video_resolution_buckets", "image_resolution_buckets") if getattr(data, name)]
    if names:
        options = " and ".join(f"`{name}`" for name in names)
        return f"leave out {options}, so that sizes are chosen from the clips, or add buckets of their shape"
    if data.resolutions and data.num_ar_buckets:
        return "widen the range of `min_ar` to `max_ar`, or crop the files"
    return "crop the files to the part that matters, or remove them"


def _frame_remedy(data: DataSection) -> str:
    if data.sliding_window_size is not None:
        return (
            "lower `sliding_window_stride`, or raise the length of the buckets, which bounds what windows are cut from"
        )
    if data.frame_selection == "chunk":
        return "add a shorter bucket"
    return "`frame_selection` chunk trains on all of a clip, in consecutive segments; or add longer buckets"
