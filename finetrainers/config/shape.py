"""The kind of an option, as the user sees it: switch, list, choice, type of value, default."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from .frame_conditioning import FrameKind
from .rewards import RewardEntry


def is_list(field: FieldInfo) -> bool:
    """Whether the option takes several values."""
    return get_origin(field.annotation) is list


def is_switch(field: FieldInfo) -> bool:
    """Whether the option is a boolean flag, perhaps without a fixed default."""
    return field.annotation in (bool, bool | None)


def choices(annotation: Any) -> tuple[str, ...]:
    """Allowed values of a Literal, of an optional Literal, or of a list of Literals; `N` where a number is another choice."""
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    if origin in (list, Union, UnionType, Annotated):
        arguments = get_args(annotation)
        found = tuple(choice for argument in arguments for choice in choices(argument))
        return (*found, "N") if found and any(kind(other) == "integer" for other in arguments) else found
    return ()


def kind(annotation: Any) -> str:
    """The type of one value of an option, in a word."""
    while get_origin(annotation) in (list, Union, UnionType, Annotated):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is tuple:
        return {str: "text", FrameKind: "kinds"}.get(get_args(annotation)[0], "size")
    return {int: "integer", float: "number", Path: "path", RewardEntry: "reward"}.get(annotation, "text")


def value_text(value: Any) -> str:
    """A value as a user would write it."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def value_cell(value: Any) -> str:
    """A value in a cell of a Markdown table."""
    text = value_text(value)
    return text if text in ("none", "on", "off") else f"`{escape_cell(text)}`"


def escape_cell(text: str) -> str:
    """A text for a cell of a Markdown table."""
    return text.replace("|", "\\|")
