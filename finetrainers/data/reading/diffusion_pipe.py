"""Translates dataset files of diffusion-pipe into data options, or into a message that says what to use.

Its keys are those of `examples/dataset.toml` there (commit 5145971); sizes in pairs are width first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: What cannot be had: key -> the way out.
_REFUSED = {
    "control_path": "control clips are for image editing models, which are not trained here; remove it",
    "shuffle_tags": "tags are not shuffled; write several captions, one a line of the .txt file, and set caption_lines",
    "cache_shuffle_num": "tags are not shuffled; write several captions, one a line of the .txt file, and set caption_lines",
}
#: What has no meaning here.
_WITHOUT_EFFECT = {
    "cache_shuffle_delimiter": "has no effect, since tags are not shuffled",
    "round_side": "has no effect: sizes are multiples of what the model takes",
}
_RENAMED = {"path": "data_root", "caption_prefix": "id_token", "mask_path": "mask_column"}


@dataclass
class Translated:
    """Options by our names; problems and warnings by the key that they are about."""

    options: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)


def translate(given: Mapping[str, Any]) -> Translated:
    """A `[[directory]]` table with the file's defaults as data options; unknown keys pass through."""
    made = Translated()
    rest = dict(given)
    for key, way_out in _REFUSED.items():
        if rest.pop(key, None):
            made.problems[key] = way_out
    for key, why in _WITHOUT_EFFECT.items():
        if rest.pop(key, None) is not None:
            made.warnings[key] = why
    skip_empty = rest.pop("skip_empty_caption", None)
    if skip_empty is not None:
        made.options["caption_missing"] = "skip" if skip_empty else "empty"
    for key, ours in _RENAMED.items():
        if key in rest:
            made.options[ours] = rest.pop(key)
    _translate_sizes(rest, made)
    made.options |= rest
    return made


def _translate_sizes(rest: dict[str, Any], made: Translated) -> None:
    """Areas, aspect ratios and explicit sizes; takes their keys out of `rest`."""
    explicit = rest.pop("size_buckets", None)
    resolutions, ratios = rest.pop("resolutions", None), rest.pop("ar_buckets", None)
    with_ratios = rest.pop("enable_ar_bucket", False)
    if explicit is not None:
        if _are_numbers(explicit, 3):
            made.options["video_resolution_buckets"] = [(frames, height, width) for width, height, frames in explicit]
        else:
            made.problems["size_buckets"] = f"must be a list of [width, height, frames], got {explicit!r}"
        return
    if resolutions is None:
        return
    for key, given, what in (("resolutions", resolutions, "sides of squares"), ("ar_buckets", ratios, "ratios")):
        if given is not None and not (_are_numbers(given, 2) or _are_numbers(given, 1)):
            made.problems[key] = f"must be {what} or [width, height], got {given!r}"
            return
    shapes = [tuple(one) if isinstance(one, list) else (one, one) for one in resolutions]
    areas = {width * height for width, height in shapes}
    if len(areas) > 1:
        made.warnings["resolutions"] = (
            f"there are {len(areas)} areas: diffusion-pipe trains each clip at all of them, here it is trained at one, the "
            "nearest in aspect ratio, then the largest; for all, repeat the table with one area each"
        )
    if ratios is not None:
        factors = [one[0] / one[1] if isinstance(one, list) else one for one in ratios]
        shapes = [
            (round(math.sqrt(area * factor)), round(math.sqrt(area / factor))) for area in areas for factor in factors
        ]
    if ratios is not None or not with_ratios:  # else the default, or what the file says, is the same there
        made.options["num_ar_buckets"] = 0
    if ratios is None and not with_ratios:
        _warn_of_missing_ratios(rest, shapes, made)
    made.options["resolutions"] = [[height, width] for width, height in shapes]


def _warn_of_missing_ratios(rest: dict[str, Any], shapes: list[tuple[Any, ...]], made: Translated) -> None:
    for key in ("min_ar", "max_ar", "num_ar_buckets"):
        if rest.pop(key, None) is not None:
            made.warnings[key] = "has no effect without enable_ar_bucket = true"
    if any(width != height for width, height in shapes):
        made.warnings["enable_ar_bucket"] = (
            "is not set: diffusion-pipe then cuts squares of these areas, here clips are cut to the resolutions as they are "
            "written, width first"
        )


def _are_numbers(values: Any, count: int) -> bool:
    """Whether it is a list of positive numbers, or of lists of so many."""
    if not isinstance(values, list) or not values:
        return False
    rows = values if count > 1 else [[value] for value in values]
    return all(
        isinstance(row, list) and len(row) == count and all(type(one) in (int, float) and one > 0 for one in row)
        for row in rows
    )
