"""Objects by name: registered in this process, or offered by installed packages as entry points. Imports no torch.

Entry points are read when a name is not registered, or when all names are listed, and never otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module, metadata
from typing import Any, Generic, TypeVar

from .addresses import describe_address, same_origin
from .failures import InputError
from .text import nearest, printable

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one kind by name.

    A package that cannot be imported, or that offers something else, is listed in `broken` with the reason. It affects
    no name but its own.

    Attributes:
        noun: the kind, for messages.
        group: group of entry points, after `finetrainers.`.
        registered: the objects that are known so far, by name.
        packages: package and version of those that an installed package offers, by name.
        broken: reasons why entry points cannot be used, each a sentence with the package and a remedy.
    """

    def __init__(
        self,
        noun: str,
        group: str,
        *,
        problem: Callable[[str, Any], str | None],
        origins: Callable[[Any], tuple[Any, ...]],
        added: Callable[[str, T], str | None] = lambda name, value: None,
        module: str = "",
    ) -> None:
        """Args:
        noun, group: see the class.
        problem: returns why an object cannot have a name, to follow its description, or None if it can.
        origins: returns the functions, classes and addresses of an object. It replaces an object of its name if theirs
            are from the same modules: notebook cells are edited and run again.
        added: takes note of a new object; returns why it cannot, as `problem` does, or None if it can.
        module: module below `finetrainers` that registers the objects of this package, imported like an entry point.
        """
        self.noun, self.group = noun, group
        self.registered: dict[str, T] = {}
        self.packages: dict[str, str] = {}
        self.broken: list[str] = []
        self.added = added
        self._module = module
        self._problem, self._origins = problem, origins
        self._loaded: set[metadata.EntryPoint] = set()

    def add(self, name: str, value: T) -> None:
        """Register an object; it replaces one of its name that was defined in the same module.

        Raises:
            ValueError: the name is taken, or the object cannot have it.
        """
        problem = self._problem(name, value)
        if problem is None and name in self.registered:
            registered = self._origins(self.registered[name])
            if not all(map(same_origin, registered, self._origins(value))):
                place = describe_address(registered[0])
                raise InputError(
                    f"{self.noun} {name!r} is registered already, as {place}; use another name", "duplicate"
                )
        problem = problem or self.added(name, value)
        if problem is not None:
            raise ValueError(f"{self.noun} {name!r} {problem}")
        self.registered[name] = value

    def get(self, name: str) -> T | None:
        """Return the object of a name, or None if neither this process nor an installed package has it."""
        if name not in self.registered:
            self._load(name)
        return self.registered.get(name)

    def __getitem__(self, name: str) -> T:
        """Return the object of a name.

        Raises:
            KeyError: there is none.
        """
        value = self.get(name)
        if value is None:
            raise KeyError(self.unknown(name))
        return value

    def all(self) -> dict[str, T]:
        """Return all objects by name, including those of installed packages."""
        self._load(None)
        return dict(self.registered)

    def unknown(self, name: str, others: Iterable[str] = ()) -> str:
        """Return the message that a name is unknown, with the nearest name, and with packages that cannot be used.

        `others` are further valid names.
        """
        names = {*self.all(), *others}
        return "; ".join([f"unknown {self.noun} {name!r}{nearest(name, names)}", *self.broken])

    def _load(self, name: str | None) -> None:
        """Register what this package has, and what installed packages offer under a name, or under any name."""
        if self._module:
            import_module(f"finetrainers.{self._module}")
        if name in self.registered:
            return
        points = _entry_points(f"finetrainers.{self.group}", tuple(sys.path))
        for point in sorted(points, key=lambda point: (point.name, _package(point))):
            if point in self._loaded or name not in (None, point.name):
                continue
            self._loaded.add(point)
            problem = self._load_point(point)
            if problem is not None:
                self.broken.append(f"{_package(point)} offers {self.noun} {printable(point.name)!r}, {problem}")

    def _load_point(self, point: metadata.EntryPoint) -> str | None:
        """Register the object of an entry point; return the reason and the remedy if it cannot be."""
        uninstall = f"uninstall {point.dist.name if point.dist else 'it'}"
        try:
            value = point.load()
        except (Exception, SystemExit) as error:
            reason = printable(f"{type(error).__name__}: {error}".splitlines()[0])
            return f"which cannot be imported ({reason}); install its requirements, or {uninstall}"
        try:
            self.add(point.name, value)
        except InputError:
            owner = self.packages.get(point.name, "finetrainers, or in this process")
            return f"whose name is taken by {owner}; rename it, or {uninstall}"
        except ValueError as error:
            reason = str(error).removeprefix(f"{self.noun} {point.name!r} ")
            return f"which {reason}; correct its entry point, or {uninstall}"
        self.packages[point.name] = _package(point)
        return None


@lru_cache(maxsize=16)
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of a group; `path` is `sys.path`, where packages are searched."""
    return tuple(metadata.entry_points(group=group))


def _package(point: metadata.EntryPoint) -> str:
    """Return name and version of the package of an entry point."""
    return "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
