"""Read files and strings from outside: JSON, JSON lines, TOML, YAML and plain text.

Everything else in the package reads through this module (a test forbids the plain functions): only regular files, of
bounded size, with numbers of bounded length and values that are nested to a bounded depth. Errors name the file and
what to change. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from .failures import FileError, InputError, MissingFileError
from .files import missing_path_problem, open_regular
from .text import file_size, printable, quoted, shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
TOMLDecodeError = tomllib.TOMLDecodeError

#: Largest file of settings, and largest table, list of prompts or record of a run, in bytes.
MAX_SETTINGS, MAX_RECORDS = 64 << 20, 2 << 30
#: Deepest nesting of lists and tables. Code that walks or prints deeper values reaches Python's limit.
MAX_DEPTH = 64
#: Most digits of a whole number: larger ones are not floats.
MAX_DIGITS = 300
_CHUNK = 1 << 20
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
_TOO_LONG = f"a number has more than {MAX_DIGITS} digits"
_DIGITS = "0123456789_"  # TOML and YAML group digits by underscores
_LONG_NUMBER = re.compile(f"[0-9](?:_?[0-9]){{{MAX_DIGITS}}}")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')
_TYPES = {dict: "a table", list: "a list", str: "text", int: "a whole number", float: "a number", bool: "true or false"}


# ---- files -----------------------------------------------------------------------------------------------------------


def read_bytes(path: Path, *, limit: int = MAX_SETTINGS) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        FileError: it is missing, something else, larger, or cannot be read.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = bytearray()
        # One read of `limit` bytes would allocate them all, and the file may have grown since.
        while max(size, len(content)) <= limit and (chunk := file.read(max(_CHUNK, size - len(content)))):
            content += chunk
    if max(size, len(content)) > limit:
        message = f"{_name(path)} has {file_size(max(size, len(content)))}; at most {file_size(limit)} are read"
        raise FileError(message, "too_large")
    return bytes(content)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, and name it in errors of the block.

    Raises:
        FileError: it is missing, something else, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            yield file
    except FileError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(f"{_name(path)} {missing_path_problem(path)}", "not_found", error) from None
    except OSError as error:
        reason = error.strerror or str(error)
        verb = "" if reason.startswith("is ") else "cannot be read: "
        raise FileError(f"{_name(path)} {verb}{reason}", cause=error) from None


def check_regular(path: Path) -> None:
    """Check that a path is a regular file that can be opened, for libraries that open it themselves.

    Raises:
        FileError: it is not.
    """
    with opened(path):
        pass


def read_text(path: Path, *, limit: int = MAX_SETTINGS, errors: str = "strict") -> str:
    """Return the UTF-8 text of a file, without BOM; `errors` is that of `bytes.decode`.

    Raises:
        FileError: as `read_bytes`, or it has another encoding; with the line.
    """
    content = read_bytes(path, limit=limit)
    try:
        return content.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "not UTF-8"
        line = content.count(b"\n", 0, error.start) + 1
        raise FileError(f"{_name(path)}:{line}: the file is {encoding}; save it as UTF-8 text") from None


def read_json(path: Path, *, limit: int = MAX_SETTINGS) -> Any:
    """Return the JSON value in a file.

    Raises:
        InputError: as `read_text`, or it is not JSON; with line and column.
    """
    text = read_text(path, limit=limit)
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{_name(path)} cannot be read as JSON: {error}", "unreadable") from None


def read_json_object(path: Path, *, limit: int = MAX_SETTINGS) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        InputError: as `read_json`, or it is another value.
    """
    value = read_json(path, limit=limit)
    if not isinstance(value, dict):
        raise InputError(f"{_name(path)} must be a JSON object, got {type(value).__name__}")
    return value


def find_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file is missing, damaged or something else."""
    with contextlib.suppress(FileError, InputError):
        return read_json_object(path)
    return {}


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return the JSON objects of a file of JSON lines, and the invalid lines: truncated, not UTF-8, not objects.

    Raises:
        FileError: as `read_bytes`.
    """
    records: list[dict[str, Any]] = []
    damaged: list[bytes] = []
    for line in read_bytes(path, limit=MAX_RECORDS).splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            records.append(value)
        elif line.strip():
            damaged.append(line)
    return records, damaged


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        InputError: as `read_text`, or it is not TOML; with line and column.
    """
    text = read_text(path)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise InputError(f"{_name(path)} is not valid TOML: {error}", "unreadable") from None


# ---- strings ---------------------------------------------------------------------------------------------------------


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Return the value of a JSON text; `hooks` are those of `json.loads`.

    Raises:
        json.JSONDecodeError: it is not JSON, not UTF-8, nested too deeply, or has a number with too many digits.
        ValueError: a hook refuses a value.
    """
    if isinstance(text, bytes):
        content = text
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise json.JSONDecodeError("not UTF-8 text", content.decode("latin-1"), error.start) from None
    number = _find_long_number(text)
    try:
        value = json.loads(text, **hooks)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError(_TOO_DEEP, text, _deep_place(text)) from None
    except ValueError:
        if number is None:
            raise
        raise json.JSONDecodeError(_TOO_LONG, text, number) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise json.JSONDecodeError(_TOO_DEEP, text, _deep_place(text))
    if number is not None and _has_long_number(value):
        raise json.JSONDecodeError(_TOO_LONG, text, number)
    return value


def parse_json_object(text: str | bytes, name: str) -> dict[str, Any]:
    """Return the object of a JSON text; errors begin with `name`.

    Raises:
        InputError: it is not JSON, or another value.
    """
    try:
        return expect(parse_json(text), dict, name)
    except json.JSONDecodeError as error:
        raise InputError(f"{name} cannot be read as JSON: {error}", "unreadable") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of a TOML text.

    Raises:
        TOMLDecodeError: it is not TOML, nested too deeply, or has a number with too many digits.
    """
    try:
        value = tomllib.loads(text)
    except TOMLDecodeError:
        raise
    except RecursionError:
        raise TOMLDecodeError(_TOO_DEEP) from None
    except ValueError as error:
        raise TOMLDecodeError(str(error) if _find_long_number(text) is None else _TOO_LONG) from None
    if _is_deep(value):
        raise TOMLDecodeError(_TOO_DEEP)
    if _find_long_number(text) is not None and _has_long_number(value):
        raise TOMLDecodeError(_TOO_LONG)
    return value


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Aliases are refused: a few lines of them stand for values of any size.

    Raises:
        ValueError: it is not YAML, has aliases, or is nested too deeply.
    """
    import yaml

    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise yaml.YAMLError("aliases (*name) are not supported; write the values out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise yaml.YAMLError(_TOO_DEEP)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except ValueError as error:  # a number or a date
        raise ValueError(str(error) if _find_long_number(text) is None else _TOO_LONG) from None
    if _has_long_number(value):
        raise ValueError(_TOO_LONG)
    return value


def expect(value: Any, kind: type[T], name: str) -> T:
    """Check the type of a value from outside, and return the value; `float` stands for any number.

    Raises:
        InputError: it has another type; the message begins with `name`.
    """
    kinds: Any = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        text = shortened(printable(repr(value)) if not isinstance(value, str) else quoted(value), 60)
        raise InputError(f"{name}: expected {_TYPES[kind]}, got {text}")
    return value


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value from outside has a type: `float` is any finite number.

    Args:
        value: the value.
        kind: a type, `[kind]` for a list, `{str: kind}` for a table, several kinds as a tuple, or a predicate.
    """
    if isinstance(kind, tuple):
        return any(fits(value, choice) for choice in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(fits(item, kind[str]) for item in value.values())
    if not isinstance(kind, type):
        return bool(kind(value))
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int | float) and math.isfinite(value) if kind is float else isinstance(value, kind)


def fitting(record: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the values that do not fit their `kinds`, as if they were not recorded."""
    return {name: value for name, value in record.items() if name not in kinds or fits(value, kinds[name])}


def _name(path: Path) -> str:
    return shortened(printable(str(path)), 300)


def _children(values: list[Any]) -> list[Any]:
    """Return the items of lists and tables."""
    return [child for value in values for child in (value.values() if isinstance(value, Mapping) else value)]


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = _children([item for item in level if isinstance(item, (dict, list, tuple))])
    return any(isinstance(item, (dict, list, tuple)) for item in level)


def _find_long_number(text: str) -> int | None:
    """Return the position of a number with too many digits, in a value or in a text, or None.

    Only each character that such a number cannot miss is looked at, since files may be large.
    """
    for place in range(0, len(text), MAX_DIGITS + 1):
        if text[place] in _DIGITS:
            before = text[max(0, place - 2 * MAX_DIGITS) : place]
            begin = place - len(before) + len(before.rstrip(_DIGITS))
            after = text[place : place + 2 * MAX_DIGITS]
            end = place + len(after) - len(after.lstrip(_DIGITS))
            if end - begin > MAX_DIGITS and (long := _LONG_NUMBER.search(text, begin, end)):
                return long.start()
    return None


def _has_long_number(value: Any) -> bool:
    level = [value]
    while level:
        if any(type(item) is int and abs(item) >= 10**MAX_DIGITS for item in level):
            return True
        level = _children([item for item in level if isinstance(item, (dict, list, tuple))])
    return False


def _deep_place(text: str) -> int:
    """Return the position in a JSON text where the nesting exceeds the limit."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if depth > MAX_DEPTH:
            return token.start()
    return 0
