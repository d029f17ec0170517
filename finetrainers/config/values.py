"""The small value types of the configuration: buckets and rows of numbers, and the text forms users write."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_BUCKET = re.compile(r"^(\d+)x(\d+)x(\d+)$")
_IMAGE_BUCKET = re.compile(r"^(\d+)x(\d+)$")


def parse_video_bucket(value: Any) -> Any:
    """`"49x512x768"` (frames x height x width) as a tuple; tuples pass through.

    Raises:
        ValueError: the text is not three positive integers joined by `x`.
    """
    if isinstance(value, str):
        match = _BUCKET.match(value.strip())
        if not match or "0" in match.groups():
            raise ValueError(f"{value!r} is not FRAMESxHEIGHTxWIDTH, for example 49x512x768 (images: 1x512x768)")
        return tuple(int(part) for part in match.groups())
    return value


def parse_image_bucket(value: Any) -> Any:
    """`"512x768"` (height x width) as a tuple; tuples pass through.

    Raises:
        ValueError: the text is not two positive integers joined by `x`.
    """
    if isinstance(value, str):
        match = _IMAGE_BUCKET.match(value.strip())
        if not match or "0" in match.groups():
            raise ValueError(f"{value!r} is not HEIGHTxWIDTH, for example 512x768")
        return tuple(int(part) for part in match.groups())
    return value


def parse_numbers(value: Any) -> Any:
    """`"0:0.5"` as the texts of its numbers, also as the only item of a list; other lists pass through."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return value.split(":") if isinstance(value, str) else value


def _joined(value: tuple[int, ...]) -> str:
    return "x".join(str(part) for part in value)


VideoBucket = Annotated[
    tuple[int, int, int],
    BeforeValidator(parse_video_bucket),
    PlainSerializer(_joined, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _BUCKET.pattern}),
]
ImageBucket = Annotated[
    tuple[int, int],
    BeforeValidator(parse_image_bucket),
    PlainSerializer(_joined, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _IMAGE_BUCKET.pattern}),
]
