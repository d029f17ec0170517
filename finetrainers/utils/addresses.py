"""Import objects by address, `module:attribute`: rewards, methods, models."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def same_name(first: Any, second: Any) -> bool:
    """Return whether two objects, or their addresses, have one module and name: one may replace the other."""
    return first is second or (_name(first) is not None and _name(first) == _name(second))


def _name(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return None if module is None or name is None else f"{module}:{name}"


def resolve(address: str) -> Any:
    """Return the object at `module:attribute`, imported now; includes modules in the working directory.

    A console script, unlike `python -m`, does not search that directory. It is appended to `sys.path`, where it hides
    no other module, and stays there: the imported module may import its neighbors later.

    Raises:
        ModuleNotFoundError: there is no such module, or it imports a missing one.
        AttributeError: the module has no such attribute.
    """
    module, _, attribute = address.partition(":")
    if not module or module.startswith("."):
        raise ModuleNotFoundError(f"{module!r} is not the name of a module", name=module)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        working_directory = str(Path.cwd())
        if error.name != module.partition(".")[0] or working_directory in sys.path:
            raise
        sys.path.append(working_directory)
        importlib.invalidate_caches()
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as second:
            if second.name == error.name:
                sys.path.remove(working_directory)
            raise
    return getattr(imported, attribute)
