"""Objects of a run as JSON text, for another process of the same run, and back: equal, and of the same types.

Unlike a pickle, the text can only make plain values, paths, and dataclasses, named tuples and options of `PACKAGES`.
Unlike pydantic's JSON, it needs no declared types, which protocols and `Any` do not have.
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

#: Packages whose classes can be written: this one, and those of registered methods.
PACKAGES = {__name__.partition(".")[0]}
_PLAIN = frozenset((str, int, float, bool, type(None)))
_COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_TEXTS: dict[str, Callable[[str], Any]] = {"Path": Path, "SecretStr": SecretStr}


def to_json(value: Any) -> str:
    """Return the text of a value.

    Raises:
        TypeError: a part of it has a type that cannot be written.
    """
    return json.dumps(_to_plain(value), separators=(",", ":"))  # ASCII, so that names that are not UTF-8 survive


def from_json(text: str | bytes) -> Any:
    """Return the value of a text that `to_json` has written.

    Raises:
        ValueError: it is another text.
    """
    return _from_plain(json.loads(text))


def _to_plain(value: Any) -> Any:
    """Return a JSON value; a value that is not plain is a list of its type and its parts."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, *_all_to_plain(value)]
    if isinstance(value, Path):
        return ["Path", str(value)]
    if isinstance(value, Mapping):
        return ["dict", *_all_to_plain(value.keys()), *_all_to_plain(value.values())]
    if isinstance(value, SecretStr):
        return ["SecretStr", value.get_secret_value()]
    address = f"{kind.__module__}:{kind.__qualname__}"
    values = _values(_class(address), value)
    if isinstance(value, BaseModel):  # what the user has set, and private attributes, are a part of its value
        values = (
            *values,
            sorted(value.model_fields_set),
            {name: getattr(value, name) for name in _private_names(kind)},
        )
    return [address, *_all_to_plain(values)]


def _all_to_plain(values: Any) -> list[Any]:
    return [value if type(value) in _PLAIN else _to_plain(value) for value in values]


def _from_plain(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, *parts = plain
    values = [_from_plain(part) if type(part) is list else part for part in parts]
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](values)
    if kind == "dict":
        half = len(values) // 2
        return dict(zip(values[:half], values[half:], strict=True))
    if kind in _TEXTS:
        return _TEXTS[kind](*values)
    cls = _class(kind)
    if issubclass(cls, BaseModel):
        *values, set_fields, private = values
        # It was validated when it was created.
        model = cls.model_construct(_fields_set={*set_fields}, **dict(zip(_names(cls), values, strict=True)))
        for name, attribute in private.items():
            setattr(model, name, attribute)
        return model
    return cls(*values)


@cache
def _class(address: str) -> type:
    """Return the class of this package at an address.

    Raises:
        TypeError: it is another class, or one with more state than its fields.
    """
    cls = resolve(address) if address.partition(":")[0].partition(".")[0] in PACKAGES else None
    if not isinstance(cls, type) or not (dataclasses.is_dataclass(cls) or issubclass(cls, (BaseModel, tuple))):
        raise TypeError(
            f"{address} is not a dataclass, named tuple or table of options of {', '.join(sorted(PACKAGES))}"
        )
    return cls


def _names(kind: Any) -> tuple[str, ...]:
    """Return the fields in the order of the class's arguments."""
    return tuple(kind.model_fields) if issubclass(kind, BaseModel) else _fixed_names(kind)


@cache
def _fixed_names(kind: Any) -> tuple[str, ...]:
    return kind._fields if issubclass(kind, tuple) else tuple(field.name for field in dataclasses.fields(kind))


def _private_names(kind: type[BaseModel]) -> tuple[str, ...]:
    return tuple(kind.__private_attributes__)


def _values(kind: type, value: Any) -> tuple[Any, ...]:
    names = _names(kind)
    return _getter(names)(value) if len(names) > 1 else tuple(getattr(value, name) for name in names)


_getter = cache(lambda names: attrgetter(*names))
