"""Digests of Python objects, equal for equal source, settings and weights. Imports no torch."""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import json
import logging
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from finetrainers.utils.addresses import describe_address

#: Types whose `repr` has all of a value.
_PLAIN = (
    type(None), bool, int, float, complex, str, Enum, PurePath, range, slice, date, time, timedelta, Decimal, Fraction,
    type(...),
)  # fmt: skip
#: Depth of objects within objects.
_DEEPEST = 50
#: Hexadecimal digits of a digest, and those of earlier versions, which covered less.
_DIGITS, EARLIER_DIGITS = 16, 12
#: Methods that set what an object is; what others change is its state.
_SETTING = ("__init__", "__new__", "__post_init__", "__setstate__", "__init_subclass__")
#: Methods that change a container.
_CHANGING = frozenset((
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "reverse", "setdefault", "sort", "update",
))  # fmt: skip


class Fingerprint(NamedTuple):
    """Description of an object.

    Attributes:
        text: its name and digest, equal for equal objects.
        uncompared: names of what the digest does not cover.
    """

    text: str
    uncompared: list[str]


def describe(value: Any) -> Fingerprint:
    """Return the name of an object with a digest of its source, settings and weights, and what it does not cover.

    Code of Python's library and of installed packages counts by its name. Attributes with a leading underscore, and
    `device`, are left out, as are attributes and variables that methods and functions change.
    """
    digests = _Digests()
    digest = digests.digest(value)
    named = value.func if isinstance(value, partial) else value
    return Fingerprint(f"{describe_address(named)} {digest[:_DIGITS]}", sorted(digests.uncompared))


class _Digests:
    """Digests of an object and of all within it, each computed once; objects may refer to themselves.

    Attributes:
        uncompared: names of attributes, variables and objects that are left out.
    """

    def __init__(self) -> None:
        self.uncompared: set[str] = set()
        self._digests: dict[int, tuple[Any, str]] = {}  # with the object, so that no other one gets its id
        self._open: list[int] = []

    def digest(self, value: Any, name: str = "") -> str:
        """Return a digest, which is equal for equal values; `name` is that of the attribute or variable."""
        key = id(value)
        if key in self._open:
            return f"itself, {len(self._open) - self._open.index(key)} above"
        if len(self._open) > _DEEPEST:
            return self._leave_out(value, name)
        if key not in self._digests:
            self._open.append(key)
            content = json.dumps([type(value).__qualname__, self._content(value, name)], sort_keys=True)
            self._digests[key] = (value, hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest())
            self._open.pop()
        return self._digests[key][1]

    def _leave_out(self, value: Any, name: str) -> str:
        """Note that a value is not compared, and return what stands for it."""
        self.uncompared.add(name or type(value).__name__)
        return describe_address(type(value))

    def _content(self, value: Any, name: str) -> Any:
        """Return what a value consists of."""
        if (plain := _plain_content(value)) is not None:
            return plain
        if isinstance(value, Mapping):
            return sorted([self.digest(key), self.digest(item, str(key))] for key, item in value.items())
        if isinstance(value, (set, frozenset)):
            return sorted(map(self.digest, value))
        if isinstance(value, Sequence):
            return [self.digest(item, name) for item in value]
        if (parts := _wrapped(value)) is not None:
            return [self.digest(part, name) for part in parts]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType) or (
            callable(value) and hasattr(value, "__name__") and _is_installed(type(value))
        ):
            return [value.__name__, str(getattr(value, "__module__", None))]
        if (numbers := _numbers_digest(value)) is not None:
            return numbers
        return self._instance(value, name)

    def _function(self, function: FunctionType) -> Any:
        """Return the source of a function, its defaults, and its variables that it does not change."""
        if _is_installed(function):
            return describe_address(function)
        codes = list(_codes(function.__code__))
        instructions = [(i.opname, str(i.argval)) for code in codes for i in dis.get_instructions(code)]
        changed, _ = _changes([tree] if (tree := _tree(function)) is not None else [])
        changed |= {name for operation, name in instructions if operation in ("STORE_GLOBAL", "STORE_DEREF")}
        enclosed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        variables = {name: cell.cell_contents for name, cell in enclosed if _has_value(cell)}
        read = {name for operation, name in instructions if operation == "LOAD_GLOBAL"} - {"__name__", "__file__"}
        namespace = function.__globals__
        variables |= {name: namespace[name] for name in sorted(read) if name in namespace}
        self.uncompared |= changed & variables.keys()
        names = {name for code in codes for name in code.co_names}
        return [
            _source(function), self.digest(function.__defaults__), self.digest(function.__kwdefaults__),
            {name: self._variable(item, name, names) for name, item in variables.items() if name not in changed},
        ]  # fmt: skip

    def _variable(self, value: Any, name: str, names: Iterable[str]) -> Any:
        """Return the digest of a variable; of a module of the user's, only of those of its `names` that are used."""
        if not isinstance(value, ModuleType) or _is_installed(value):
            return self.digest(value, name)
        own = vars(value)
        return {
            used: self.digest(own[used], used) for used in sorted(names) if used in own and used not in vars(ModuleType)
        }

    def _class(self, cls: type) -> Any:
        """Return the source of a class and its bases, with what its functions refer to, and its public attributes."""
        if _is_installed(cls):
            return describe_address(cls)
        changed = _changed_attributes(cls)
        own = {
            name: self.digest(item, name)
            for name, item in vars(cls).items()
            if name not in changed and (name[:1] != "_" or _is_written(item)) and not inspect.ismemberdescriptor(item)
        }
        return [_source(cls), own, [self.digest(base) for base in cls.__bases__ if base is not object]]

    def _instance(self, value: Any, name: str) -> Any:
        """Return the class of an object with its attributes, or leave it out."""
        cls = type(value)
        attributes = _attributes(value)
        content: list[Any] = [self.digest(cls)]
        is_shown = bool(_public(attributes)) or getattr(value, "__dict__", None) == {}
        is_foreign = _is_installed(cls) and not (is_shown and _may_have_settings(cls))
        if hasattr(value, "state_dict") and hasattr(value, "named_parameters"):
            config = getattr(value, "config", {})
            attributes |= {"config": _public(config if isinstance(config, Mapping) else _attributes(config))}
            attributes.pop("training", None)
            held = ("_parameters", "_buffers", "_modules")
            content += [{n: self.digest(item, n) for n, item in vars(value)[part].items()} for part in held]
        elif is_dataclass(value):  # later versions have more fields
            attributes = {n: item for n, item in attributes.items() if not _is_default(value, n, item)}
        elif _is_installed(cls) and hasattr(value, "to_dict"):
            attributes = dict(value.to_dict())
        elif is_foreign or hasattr(value, "__next__"):
            return self._leave_out(value, name)
        changed = {
            attribute for base in cls.__mro__ if not _is_installed(base) for attribute in _changed_attributes(base)
        }
        self.uncompared |= changed & _public(attributes).keys()
        settings = {n: self.digest(item, n) for n, item in _public(attributes).items() if n not in changed}
        return [*content, settings]


def _plain_content(value: Any) -> Any:
    """Return the content of a value that has no other values within it, or None for other objects."""
    if isinstance(value, float):
        return repr(float(value))  # also those of NumPy
    if isinstance(value, _PLAIN) or type(value).__qualname__ in ("dtype", "device"):
        return repr(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, re.Pattern):
        return [repr(value.pattern), value.flags]
    return value.name if isinstance(value, logging.Logger) else None


def _wrapped(value: Any) -> list[Any] | None:
    """Return the objects that an object consists of, if it wraps functions, else None."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    is_cached = callable(value) and hasattr(value, "cache_info")  # by lru_cache
    return [value.__wrapped__] if is_cached and hasattr(value, "__wrapped__") else None


def _numbers_digest(value: Any) -> Any:
    """Return the digest of an array, a tensor or an image, or None for other objects."""
    if hasattr(value, "dtype") and hasattr(value, "detach"):
        import torch

        if value.is_meta:
            return [str(value.dtype), list(value.shape)]
        try:
            numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, sharded or packed
            return None
        return [str(value.dtype), list(value.shape), hashlib.sha256(numbers).hexdigest()]
    if hasattr(value, "dtype") and hasattr(value, "tobytes") and value.dtype != object:
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if hasattr(value, "mode") and hasattr(value, "size") and hasattr(value, "tobytes"):
        return [str(value.mode), list(value.size), hashlib.sha256(value.tobytes()).hexdigest()]
    return None


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including those in slots."""
    slots = (slot for cls in type(value).__mro__ for slot in _slots(cls))
    in_slots = {slot: getattr(value, slot) for slot in slots if slot != "__dict__" and hasattr(value, slot)}
    return in_slots | dict(getattr(value, "__dict__", {}))


def _slots(cls: type) -> Sequence[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without private ones, the device, which differs between processes, and versions."""
    excluded = ("device", "transformers_version")
    return {str(name): value for name, value in settings.items() if str(name)[:1] != "_" and name not in excluded}


def _is_default(value: Any, name: str, item: Any) -> bool:
    field = {field.name: field for field in fields(value)}.get(name)
    if field is None:
        return False
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return (
        type(item) is type(default)
        and (is_dataclass(item) or isinstance(item, (*_PLAIN, list, tuple, dict, set)))
        and bool(item == default)
    )


def _is_installed(value: Any) -> bool:
    """Return whether an object is defined by Python's library, finetrainers or an installed package."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(name, str) or (name == "builtins" and isinstance(value, FunctionType)):
        return False  # made by `exec`
    top = name.partition(".")[0]
    file = getattr(sys.modules.get(name) or sys.modules.get(top), "__file__", None) or ""
    return top in (*sys.stdlib_module_names, "finetrainers") or bool(re.search(r"[/\\](site|dist)-packages[/\\]", file))


def _may_have_settings(cls: type) -> bool:
    """Return whether attributes of an installed class may be settings: those of Python's library are mostly state."""
    return cls.__module__.partition(".")[0] not in sys.stdlib_module_names or cls.__name__.endswith("Namespace")


def _is_written(item: Any) -> bool:
    """Return whether a member of a class is a function that stands in a file or a cell, and is not generated."""
    function = inspect.unwrap(getattr(item, "__func__", item)) if callable(getattr(item, "__func__", item)) else item
    return isinstance(function, FunctionType) and function.__code__.co_filename != "<string>"


def _has_value(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return False
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of all functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _source(value: FunctionType | type) -> str:
    """Return the source of a function or class without its comments and layout, or its compiled code."""
    tree = _tree(value)
    if tree is not None:
        return ast.unparse(tree)
    if isinstance(value, FunctionType):
        return repr([[c.co_code.hex(), c.co_names, _constants(c)] for c in _codes(value.__code__)])
    return describe_address(value)


def _constants(code: CodeType) -> list[str]:
    return [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType)]


def _tree(value: FunctionType | type) -> ast.AST | None:
    """Return the syntax tree of a function or class, or None if its source is not known."""
    try:
        if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
            return _lambda_tree(value)
        tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        _drop_docstrings(tree)
    return tree


def _lambda_tree(function: FunctionType) -> ast.AST | None:
    """Return the syntax tree of the lambda expressions at the place of a function, usually one."""
    lines, _ = inspect.findsource(function)
    first = function.__code__.co_firstlineno
    lambdas = [n for n in ast.walk(ast.parse("".join(lines))) if isinstance(n, ast.Lambda) and n.lineno == first]
    if len(lambdas) > 1 and hasattr(function.__code__, "co_positions"):  # Python 3.11
        columns = [column for line, _, column, _ in function.__code__.co_positions() if line == first and column]
        body = min(columns, default=0)
        inner = [n for n in lambdas if n.body.col_offset <= body < (n.body.end_col_offset or 0)]
        lambdas = inner[-1:] or lambdas
    return ast.Module([ast.Expr(node) for node in lambdas], []) if lambdas else None


def _drop_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]


@lru_cache(maxsize=256)
def _changed_attributes(cls: type) -> frozenset[str]:
    """Return the attributes that methods of a class assign or change after its creation."""
    tree = _tree(cls)
    body = getattr(tree, "body", [])
    methods = [node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return frozenset(_changes([method for method in methods if method.name not in _SETTING])[1])


def _changes(trees: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the variables whose content statements change, and the attributes that they assign or change."""
    names: set[str] = set()
    attributes: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        targets: list[ast.AST] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            targets = [ast.Starred(node.func.value)]  # as if its content were assigned
        while targets:
            base: Any = targets.pop()
            targets += getattr(base, "elts", [])  # of a tuple
            is_part = isinstance(base, (ast.Attribute, ast.Subscript, ast.Starred))
            while isinstance(base, (ast.Attribute, ast.Subscript, ast.Starred)):
                attributes |= {base.attr} if isinstance(base, ast.Attribute) else set()
                base = base.value
            names |= {base.id} if is_part and isinstance(base, ast.Name) else set()
    return names, attributes
