"""Import objects by address, `module:attribute`: rewards, methods, models."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def same_name(one: Any, other: Any) -> bool:
    """Return whether two objects, or addresses of objects, are the same by module and name: one may replace the other."""
    return one is other or (_name(one) is not None and _name(one) == _name(other))


def _name(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return None if module is None or name is None else f"{module}:{name}"


def resolve(address: str) -> Any:
    """The object at `module:attribute`, imported now; modules in the working directory are found, too.

    A console script, unlike `python -m`, does not search that directory. It is appended to `sys.path`, where it hides no
    other module, and stays there: what was found may import its neighbors later.

    Raises:
        ModuleNotFoundError: there is no such module, or it imports one that is not there.
        AttributeError: the module has no such attribute.
    """
    module, _, attribute = address.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        here = str(Path.cwd())
        if error.name != module.partition(".")[0] or here in sys.path:
            raise
        sys.path.append(here)
        importlib.invalidate_caches()
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as second:
            if second.name == error.name:
                sys.path.remove(here)
            raise
    return getattr(found, attribute)
