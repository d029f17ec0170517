"""Value types of options (buckets, lists of numbers, paths), and the text forms that users write."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from finetrainers.utils.gpus import read_gpu
from finetrainers.utils.text import quoted, shortened

from .base import expand_home

#: Bounds of sizes: an hour of 24 frames per second, and a side that no video has. Arithmetic with sizes stays exact.
MAX_FRAMES, MAX_SIDE = 100_000, 32_768
_BUCKET = re.compile(r"^([0-9]+)x([0-9]+)x([0-9]+)$")
_IMAGE_BUCKET = re.compile(r"^([0-9]+)x([0-9]+)$")
_PART = re.compile(
    r"(?P<name>\w+)=(?P<place>.*?)(?:,(?P<dtype>fp32|bf16|fp16|float8_e4m3fn|float8_e5m2))?", flags=re.ASCII
)
_RESOLUTION = re.compile(r"^([0-9]+)(?:x([0-9]+))?$")
_STEPS = re.compile(r"^([0-9]{1,12})(?::([0-9]{1,12}))?$")


def _sizes(pattern: re.Pattern[str], form: str) -> Callable[[Any], Any]:
    """Return a parser of whole numbers joined by `x`: text becomes a tuple, and other values pass through."""

    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = pattern.match(value.strip())
        if not match:
            raise ValueError(f"expected {form}, got {shortened(quoted(value))}")
        # Python refuses to read numbers of thousands of digits; a number that is cut here is out of bounds anyway.
        return check_size(tuple(int(part.lstrip("0")[:12] or 0) for part in match.groups() if part is not None))

    return parse


def check_size(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return a size, sides last, if every number is within bounds.

    Raises:
        ValueError: a number is not.
    """
    bounds = (MAX_FRAMES, MAX_SIDE, MAX_SIDE)[-len(size) :]
    if not all(1 <= number <= largest for number, largest in zip(size, bounds, strict=True)):
        frames = f", and frames from 1 to {MAX_FRAMES}" if len(size) == 3 else ""
        raise ValueError(f"{_joined(size)}: height and width must be from 1 to {MAX_SIDE}{frames}")
    return size


_parse_video_bucket = _sizes(_BUCKET, "FRAMESxHEIGHTxWIDTH, for example 49x512x768 (images: 1x512x768)")
_parse_image_bucket = _sizes(_IMAGE_BUCKET, "HEIGHTxWIDTH, for example 512x768")
_parse_sides = _sizes(_RESOLUTION, "the side of a square, for example 512, or HEIGHTxWIDTH")


def _parse_compile(value: Any) -> Any:
    """Return a scope from other programs' values, which switch compiling on and off, or name the compiled part."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    words = {"true": "regional", "transformer": "regional", "false": "none"}
    return words.get(str(value).lower(), value)


def _parse_resolution(value: Any) -> Any:
    """Return `512` or `"512"` (sides of a square) or `"512x768"` (height x width) as a tuple; pairs pass through."""
    sides = (value,) if isinstance(value, int) and not isinstance(value, bool) else _parse_sides(value)
    return sides * 2 if isinstance(sides, tuple) and len(sides) == 1 else sides


class Steps(NamedTuple):
    """The first and the last of consecutive steps."""

    first: int
    last: int


def _parse_steps(value: Any) -> Any:
    """Return `"3:5"`, or `3` for one step, as the first and the last step; pairs pass through."""
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        match = _STEPS.fullmatch(str(value).strip())
        if not match:
            raise ValueError(f"must be FIRST:LAST, for example 3:5, got {shortened(quoted(str(value)))}")
        value = int(match[1]), int(match[2] or match[1])
    return value


def _check_steps(steps: Steps) -> Steps:
    """Return a range of steps, or raise ValueError if it is empty."""
    if not 1 <= steps.first <= steps.last:
        raise ValueError(f"must be two ascending steps from 1, got {steps.first}:{steps.last}")
    return steps


def _parse_number_or_auto(value: Any) -> Any:
    number = value.strip() if isinstance(value, str) else value
    if isinstance(number, bool) or not (number == "auto" or re.fullmatch(r"\d+", str(number))):
        raise ValueError(f"must be auto or a whole number from 0, got {value!r}")
    return number


def parse_for_bucket(value: Any) -> Any:
    """Return `"49x512x768=2"` as the bucket and the text of its value; pairs pass through. `512x768` means 1x512x768.

    Raises:
        ValueError: the text is not a bucket, `=` and a value.
    """
    if isinstance(value, str):
        bucket, equals, number = (part.strip() for part in value.partition("="))
        if not (_BUCKET.match(bucket) or _IMAGE_BUCKET.match(bucket)) or not equals or not number:
            raise ValueError(f"expected BUCKET=VALUE, for example 49x512x768=2, got {value!r}")
        return _parse_video_bucket(bucket if _BUCKET.match(bucket) else f"1x{bucket}"), number
    return value


def parse_media_column(value: Any) -> Any:
    """Return `"control_video=pose"` as the name of a medium and its column; pairs pass through.

    Raises:
        ValueError: the text is not a name, `=` and a column.
    """
    if isinstance(value, str):
        name, _, column = (part.strip() for part in value.partition("="))
        if not name or not column:
            raise ValueError(f"expected NAME=COLUMN, for example control_video=pose, got {value!r}")
        return name, column
    return value


def parse_pipeline_argument(value: Any) -> Any:
    """Return `"ar_step=5"` as the name of an argument and its value; pairs pass through.

    Raises:
        ValueError: the text is not a name, `=` and a whole number.
    """
    if isinstance(value, str):
        name, _, number = (part.strip() for part in value.partition("="))
        if not name.isidentifier() or not re.fullmatch(r"\d{1,6}", number):
            raise ValueError(f"expected NAME=NUMBER, for example ar_step=5, got {shortened(quoted(value))}")
        return name, int(number)
    return value


def parse_numbers(value: Any) -> Any:
    """Return the number strings of `"0:0.5"`, alone or as the only item of a list; other lists pass through."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return value.split(":") if isinstance(value, str) else value


#: Fractions, which have the form of `parse_numbers` too.
Fractions = Annotated[list[Annotated[float, Field(ge=0, le=1)]], BeforeValidator(parse_numbers)]
#: Added before a share of a number of steps is rounded down: 0.29 * 100 is 28.999999999999996.
ROUNDING = 1e-9


def range_between(fractions: Sequence[float], steps: int, end: int) -> range:
    """Return the steps between two fractions of `steps`, rounded to whole steps, and before `end`."""
    first, stop = (math.floor(share * steps + 0.5 + ROUNDING) for share in fractions)
    return range(first, min(stop, end))


def check_place(text: str) -> str:
    """Check a hub id, an address or a path, and expand `~`.

    Raises:
        ValueError: it is empty, or no path can be like this.
    """
    if not text.strip():
        raise ValueError("must not be empty; set a Hub id or a path")
    return text if "://" in text else expand_home(text)


def check_part(text: str) -> str:
    """Check `NAME=PLACE`, `NAME=PLACE,DTYPE` or `NAME=,DTYPE`, and expand `~`.

    Raises:
        ValueError: it is none of these.
    """
    match = _PART.fullmatch(text)
    if match is None or not (match["place"] or match["dtype"]):
        raise ValueError(
            "expected NAME=PATH, NAME=PATH,DTYPE or NAME=,DTYPE, for example image_encoder=someone/model,fp32, got "
            f"{shortened(quoted(text))}"
        )
    place = check_place(match["place"]) if match["place"] else ""
    return f"{match['name']}={place}" + (f",{match['dtype']}" if match["dtype"] else "")


def split_part(text: str) -> tuple[str, str | None, str | None]:
    """Return name, place and dtype of a checked part."""
    match = _PART.fullmatch(text)
    assert match is not None, text
    return match["name"], match["place"] or None, match["dtype"]


def check_expression(text: str) -> str:
    """Check that a text is a regular expression.

    Raises:
        ValueError: it is not.
    """
    if not text:
        raise ValueError("must not be empty; set a module name, or a regular expression")
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shortened(quoted(text))} is not a regular expression: {error}") from None
    return text


def check_hub_id(text: str) -> str:
    """Check that a text is a valid repository name of the Hub.

    Raises:
        ValueError: it is not.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError as error:
        raise ValueError(f"{str(error).rstrip('.')}; write NAME or NAMESPACE/NAME") from None
    return text


def _joined(value: tuple[int, ...]) -> str:
    return "x".join(str(part) for part in value)


def _resolution_text(value: tuple[int, int]) -> str:
    return str(value[0]) if value[0] == value[1] else _joined(value)


def _assigned(value: tuple[tuple[int, int, int], int | float]) -> str:
    return f"{_joined(value[0])}={value[1]}"


_ASSIGNMENT = WithJsonSchema({"type": "string", "pattern": r"^(\d+x)?\d+x\d+=.+$"})


#: A hub id or a path.
Place = Annotated[str, AfterValidator(check_place)]
#: Choice of a part of a model; see `split_part`.
PartChoice = Annotated[str, AfterValidator(check_part)]
#: A regular expression.
Expression = Annotated[str, AfterValidator(check_expression)]
#: A repository of the Hub.
HubId = Annotated[str, AfterValidator(check_hub_id)]
#: A time limit; timers overflow at very long ones.
Seconds = Annotated[int, Field(le=10_000_000)]
#: A number that the program may choose.
NumberOrAuto = Annotated[Literal["auto"] | int, BeforeValidator(_parse_number_or_auto)]
VideoBucket = Annotated[
    tuple[int, int, int],
    BeforeValidator(_parse_video_bucket),
    AfterValidator(check_size),
    PlainSerializer(_joined, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _BUCKET.pattern}),
]
ImageBucket = Annotated[
    tuple[int, int],
    BeforeValidator(_parse_image_bucket),
    AfterValidator(check_size),
    PlainSerializer(_joined, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _IMAGE_BUCKET.pattern}),
]
#: Scope of compiling in the transformer.
CompileScope = Annotated[Literal["none", "regional"], BeforeValidator(_parse_compile)]
#: An area in pixels, by the height and width of an image that has it.
Resolution = Annotated[
    tuple[int, int],
    BeforeValidator(_parse_resolution),
    AfterValidator(check_size),
    PlainSerializer(_resolution_text, return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "pattern": _RESOLUTION.pattern}),
]
#: Consecutive optimizer steps.
StepRange = Annotated[
    Steps,
    BeforeValidator(_parse_steps),
    AfterValidator(_check_steps),
    PlainSerializer(lambda steps: f"{steps.first}:{steps.last}", return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "pattern": _STEPS.pattern}),
]
#: A further medium of clips, and its column.
MediaColumn = Annotated[
    tuple[str, str],
    BeforeValidator(parse_media_column),
    PlainSerializer("=".join, return_type=str),
    WithJsonSchema({"type": "string", "pattern": "^.+=.+$"}),
]
#: An argument of a pipeline's call for samples, a whole number.
PipelineArgument = Annotated[
    tuple[str, int],
    BeforeValidator(parse_pipeline_argument),
    PlainSerializer(lambda pair: f"{pair[0]}={pair[1]}", return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^\w+ *= *\d+$"}),
]
BucketSize = Annotated[
    tuple[VideoBucket, Annotated[int, Field(ge=1)]],
    BeforeValidator(parse_for_bucket),
    PlainSerializer(_assigned, return_type=str),
    _ASSIGNMENT,
]
BucketShare = Annotated[
    tuple[VideoBucket, Annotated[float, Field(gt=0, le=1)]],
    BeforeValidator(parse_for_bucket),
    PlainSerializer(_assigned, return_type=str),
    _ASSIGNMENT,
]


def gpu_memory(value: Any) -> Any:
    """Return the GiB of a text that `--gpu` takes; other values pass through.

    Raises:
        ValueError: the text is neither a card nor a size.
    """
    return read_gpu(value).gib if isinstance(value, str) else value


def _gpu_text(value: Any) -> Any:
    """Return a number as the text of an exact size; other values pass through."""
    return f"{value}GiB" if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def check_gpu(text: str) -> str:
    """Return the text if it names a GPU to plan for.

    Raises:
        ValueError: it is neither a card nor a size.
    """
    read_gpu(text)
    return text


#: Memory of a GPU in GiB.
GpuMemory = Annotated[float, BeforeValidator(gpu_memory), Field(gt=0, le=10_000)]
#: A GPU to plan for, which `read_gpu` reads.
GpuName = Annotated[str, BeforeValidator(_gpu_text), AfterValidator(check_gpu)]
