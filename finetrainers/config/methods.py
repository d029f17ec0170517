"""Training methods before their code is imported: name, classes and options. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetrainers.utils.addresses import resolve
from finetrainers.utils.registry import Registry

from .base import Section
from .option import read_option


@dataclass(frozen=True)
class TrainingMethod:
    """A training method, as the entry points `finetrainers.methods` of installed packages declare it.

    Attributes:
        name: the value of `--method`.
        method: the class, or its address `module:Class`, which is called with `MethodParts`.
        spec: the subclass of `MethodSpec`, or its address, in a module that imports no torch; None for the default,
            training on clips.
        options: its options: a table that is called like the method, so that its flags are `--NAME.OPTION`; or None.
    """

    name: str
    method: str | type
    spec: str | type | None = None
    options: type[Section] | None = None


def _problem(name: str, value: Any) -> str | None:
    """Return why an object cannot be the method of a name, or None if it can."""
    if not isinstance(value, TrainingMethod):
        return f"must be a TrainingMethod, got {_describe(value)}"
    if value.name != name:
        return f"must have the name of its method, {value.name!r}"
    for attribute, address in (("method", value.method), ("spec", value.spec)):
        if isinstance(address, str):
            if not all(address.partition(":")):
                return f"needs an address module:attribute as its {attribute}, got {address!r}"
        elif address is not None and not isinstance(address, type):
            return f"needs a class or an address as its {attribute}, got {_describe(address)}"
    return None if value.options is None else _options_problem(name, value.options)


def _options_problem(name: str, options: Any) -> str | None:
    """Return why a class cannot be the table of options of a method, or None if it can."""
    if not (isinstance(options, type) and issubclass(options, Section)):
        return f"needs a subclass of Section as its options, got {_describe(options)}"
    if not name.isidentifier():
        return "has options, so its name must consist of letters, digits and underscores"
    if options.methods != (name,) or not options.qualified:
        return f'has options that must declare methods = ("{name}",) and qualified = True'
    for key, field in options.model_fields.items():
        try:
            option = read_option(key, name, key, field)
        except (AssertionError, TypeError) as error:
            return f"has a wrong option {key}: {error}"
        if field.is_required():
            return f"has the option {key}, which must have a default"
        if option.scope != "run" or option.encodes or option.former_name or option.former_table:
            return f"has the option {key}, which cannot have scope, encodes or former names"
    return None


def _describe(value: Any) -> str:
    return f"an object of type {type(value).__name__}" if not isinstance(value, type) else f"the class {value.__name__}"


METHODS: Registry[TrainingMethod] = Registry(
    "method", "methods", problem=_problem, origins=lambda method: (method.method,), module="methods.registry"
)


def trait(method: Any, name: str) -> Any:
    """Return an attribute of the `MethodSpec` of a method, or None if there is no such method, spec or attribute."""
    declared = METHODS.get(method) if isinstance(method, str) else None
    spec = None if declared is None else declared.spec
    try:
        return getattr(resolve(spec) if isinstance(spec, str) else spec, name, None)
    except (ImportError, AttributeError):  # `spec_problem` reports it
        return None


def is_reader(method: Any, readers: Sequence[str]) -> bool:
    """Return whether a method is among the readers of options; see `Option.readers`."""
    for reader in readers:
        name, equals, value = reader.partition("=")
        if method == reader or (trait(method, name) == value if equals else trait(method, name) is True):
            return True
    return False
