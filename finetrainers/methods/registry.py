"""The training methods by name. Reading this file imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_METHODS: dict[str, str] = {}


def register_method(name: str, factory: str) -> None:
    """Make `module:Class` available as `--method name`.

    Raises:
        ValueError: the name is taken.
    """
    if name in _METHODS:
        raise ValueError(f"method {name!r} is registered already")
    _METHODS[name] = factory


def method_names() -> list[str]:
    """Registered names."""
    return sorted(_METHODS)


def load_method(name: str) -> Any:
    """The class of a method (imports torch)."""
    module, _, attribute = _METHODS[name].partition(":")
    return getattr(import_module(module), attribute)


register_method("sft", "finetrainers.methods.sft:SFT")
