"""Objects of this package as JSON text, for another process of the same run, and back: equal, and of the same types.

Unlike a pickle, the text can make nothing but plain values, paths, and dataclasses, named tuples and options of this package;
and unlike pydantic's JSON it needs no declared types, which protocols and `Any` do not give.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from .addresses import resolve

_PACKAGE = __name__.partition(".")[0]
_PLAIN = frozenset((str, int, float, bool, type(None)))
_COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_TEXTS: dict[str, Callable[[str], Any]] = {"Path": Path, "SecretStr": SecretStr}


def to_json(value: Any) -> str:
    """The text of a value.

    Raises:
        TypeError: something in it is of a kind that cannot be written.
    """
    return json.dumps(_written(value), separators=(",", ":"))  # ASCII, so that names that are not UTF-8 survive


def from_json(text: str | bytes) -> Any:
    """The value of a text that `to_json` has written.

    Raises:
        ValueError: it is something else.
    """
    return _read(json.loads(text))


def _written(value: Any) -> Any:
    """What is not plain is a list: its kind, then its parts."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, *_all_written(value)]
    if isinstance(value, Path):
        return ["Path", str(value)]
    if isinstance(value, Mapping):
        return ["dict", *_all_written(value.keys()), *_all_written(value.values())]
    if isinstance(value, SecretStr):
        return ["SecretStr", value.get_secret_value()]
    address = f"{kind.__module__}:{kind.__qualname__}"
    return [address, *_all_written(_values(_class(address), value))]


def _all_written(values: Any) -> list[Any]:
    return [value if type(value) in _PLAIN else _written(value) for value in values]


def _read(written: Any) -> Any:
    if not isinstance(written, list):
        return written
    kind, *parts = written
    values = [_read(part) if type(part) is list else part for part in parts]
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](values)
    if kind == "dict":
        half = len(values) // 2
        return dict(zip(values[:half], values[half:], strict=True))
    if kind in _TEXTS:
        return _TEXTS[kind](*values)
    found = _class(kind)
    if issubclass(found, BaseModel):
        # It was validated when it was made.
        return found.model_construct(**dict(zip(_names(found), values, strict=True)))
    return found(*values)


@cache
def _class(address: str) -> type:
    """The class of this package at an address.

    Raises:
        TypeError: it is another one, or one that is more than its fields.
    """
    found = resolve(address) if address.startswith(f"{_PACKAGE}.") else None
    if not isinstance(found, type) or not (dataclasses.is_dataclass(found) or issubclass(found, (BaseModel, tuple))):
        raise TypeError(f"{address} is no dataclass, named tuple or table of options of {_PACKAGE}")
    return found


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """The fields, in the order in which the class takes them."""
    if issubclass(kind, tuple):
        return kind._fields
    if issubclass(kind, BaseModel):
        return tuple(kind.model_fields)
    return tuple(field.name for field in dataclasses.fields(kind))


def _values(kind: type, value: Any) -> tuple[Any, ...]:
    names = _names(kind)
    return _getter(names)(value) if len(names) > 1 else tuple(getattr(value, name) for name in names)


_getter = cache(lambda names: attrgetter(*names))
