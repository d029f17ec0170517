"""Translation of diffusion-pipe's dataset files into data options, or into messages with the remedy.

Its keys are those of `examples/dataset.toml` there (commit 5145971); sizes in pairs are width first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetrainers.utils.failures import InputError

#: Keys that are not supported -> the remedy.
_REFUSED = {
    "control_path": "control clips are for image editing models, which are not supported; remove it",
    "shuffle_tags": "tags are not shuffled; write several captions, one a line of the .txt file, and set caption_lines",
    "cache_shuffle_num": "tags are not shuffled; write several captions, one a line of the .txt file, and set "
    "caption_lines",
}
#: Keys that have no meaning here -> the warning.
_WITHOUT_EFFECT = {
    "cache_shuffle_delimiter": "has no effect, since tags are not shuffled",
    "round_side": "has no effect: sizes are multiples required by the model",
}
_RENAMED = {"path": "data_root", "caption_prefix": "id_token", "mask_path": "mask_column"}


@dataclass
class Translated:
    """Options by our names; problems and warnings by the key that they are about."""

    options: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, InputError] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)


def translate(table: Mapping[str, Any]) -> Translated:
    """Return a `[[directory]]` table with the file's defaults as data options; unknown keys pass through."""
    translated = Translated()
    rest = dict(table)
    for key, remedy in _REFUSED.items():
        if rest.pop(key, None):
            translated.problems[key] = InputError(remedy, "unsupported")
    for key, warning in _WITHOUT_EFFECT.items():
        if rest.pop(key, None) is not None:
            translated.warnings[key] = warning
    skip_empty = rest.pop("skip_empty_caption", None)
    if skip_empty is not None:
        translated.options["caption_missing"] = "skip" if skip_empty else "empty"
    for key, option in _RENAMED.items():
        if key in rest:
            translated.options[option] = rest.pop(key)
    if translated.options.get("id_token"):  # it is put before every caption
        translated.options["repeat_id_token"] = True
    _translate_sizes(rest, translated)
    translated.options |= rest
    return translated


def _translate_sizes(rest: dict[str, Any], translated: Translated) -> None:
    """Translate areas, aspect ratios and explicit sizes, and remove their keys from `rest`."""
    explicit = rest.pop("size_buckets", None)
    resolutions, ratios = rest.pop("resolutions", None), rest.pop("ar_buckets", None)
    with_ratios = rest.pop("enable_ar_bucket", False)
    if explicit is not None:
        if _is_number_list(explicit, 3):
            translated.options["video_resolution_buckets"] = [
                (frames, height, width) for width, height, frames in explicit
            ]
        else:
            message = f"must be a list of [width, height, frames], got {explicit!r}"
            translated.problems["size_buckets"] = InputError(message, "invalid")
        return
    if resolutions is None:
        return
    for key, values, expected in (("resolutions", resolutions, "sides of squares"), ("ar_buckets", ratios, "ratios")):
        if values is not None and not (_is_number_list(values, 2) or _is_number_list(values, 1)):
            message = f"must be {expected} or [width, height], got {values!r}"
            translated.problems[key] = InputError(message, "invalid")
            return
    shapes = [tuple(side) if isinstance(side, list) else (side, side) for side in resolutions]
    areas = {width * height for width, height in shapes}
    if len(areas) > 1:
        translated.warnings["resolutions"] = (
            f"there are {len(areas)} areas: diffusion-pipe trains each clip at all of them, this program at one (the "
            "nearest in aspect ratio, then the largest); for all, repeat the table with one area each"
        )
    if ratios is not None:
        factors = [ratio[0] / ratio[1] if isinstance(ratio, list) else ratio for ratio in ratios]
        shapes = [
            (round(math.sqrt(area * factor)), round(math.sqrt(area / factor))) for area in areas for factor in factors
        ]
    if ratios is not None or not with_ratios:  # otherwise the option of the file, or the default, is the same there
        translated.options["num_ar_buckets"] = 0
    if ratios is None and not with_ratios:
        _warn_of_missing_ratios(rest, shapes, translated)
    translated.options["resolutions"] = [[height, width] for width, height in shapes]


def _warn_of_missing_ratios(rest: dict[str, Any], shapes: list[tuple[Any, ...]], translated: Translated) -> None:
    for key in ("min_ar", "max_ar", "num_ar_buckets"):
        if rest.pop(key, None) is not None:
            translated.warnings[key] = "has no effect without enable_ar_bucket = true"
    if any(width != height for width, height in shapes):
        translated.warnings["enable_ar_bucket"] = (
            "is not set: diffusion-pipe then cuts squares of these areas; this program cuts clips to the resolutions "
            "as written, width first"
        )


def _is_number_list(values: Any, count: int) -> bool:
    """Return whether `values` is a list of positive numbers, or of lists of `count` of them."""
    if not isinstance(values, list) or not values:
        return False
    rows = values if count > 1 else [[value] for value in values]
    return all(
        isinstance(row, list)
        and len(row) == count
        and all(type(number) in (int, float) and number > 0 for number in row)
        for row in rows
    )
