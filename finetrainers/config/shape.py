"""Kind of an option for users: switch, list, choice, type of value, default."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from .frame_conditioning import FrameKind
from .rewards import RewardEntry
from .values import Steps


def is_list(field: FieldInfo) -> bool:
    """Return whether the option takes several values."""
    return get_origin(field.annotation) is list


def is_switch(field: FieldInfo) -> bool:
    """Return whether the option is a boolean flag, perhaps without a fixed default."""
    return field.annotation in (bool, bool | None)


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the allowed values of a Literal, of an optional Literal, or of a list of Literals.

    A number as another choice is `N`.
    """
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    if origin in (list, Union, UnionType, Annotated):
        arguments = get_args(annotation)
        values = tuple(choice for argument in arguments for choice in choices(argument))
        return (*values, "N") if values and any(kind(other) == "integer" for other in arguments) else values
    return ()


def kind(annotation: Any) -> str:
    """Return the type of one value of an option, in a word."""
    while get_origin(annotation) in (list, Union, UnionType, Annotated):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is tuple:
        return {str: "text", FrameKind: "kinds"}.get(get_args(annotation)[0], "size")
    return {int: "integer", float: "number", Path: "path", RewardEntry: "reward", Steps: "steps"}.get(
        annotation, "text"
    )


def value_text(value: Any) -> str:
    """Return a value as a user would write it."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def value_cell(value: Any) -> str:
    """Return a value as a cell of a Markdown table."""
    text = value_text(value)
    return text if text in ("none", "on", "off") else f"`{escape_cell(text)}`"


def escape_cell(text: str) -> str:
    """Return a text escaped for a cell of a Markdown table."""
    return text.replace("|", "\\|")
