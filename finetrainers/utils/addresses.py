"""Import objects by address, `module:attribute`: rewards, methods, models."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def same_origin(first: Any, second: Any) -> bool:
    """Return whether two objects are defined in one module, or two addresses are equal: one may replace the other."""
    if first is second or isinstance(first, str) or isinstance(second, str):
        return bool(first == second)
    module = getattr(first, "__module__", None)  # an instance has its class's
    return module is not None and module == getattr(second, "__module__", None)


def describe_address(value: Any) -> str:
    """Return the address of a function, of a class or of an instance's class; an address is returned as it is."""
    if isinstance(value, str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


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
