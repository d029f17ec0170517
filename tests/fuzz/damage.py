"""Damage to files: bytes that are changed, cut, inserted and spliced, and values replaced by hostile ones."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Sequence
from typing import Any, Literal

Format = Literal["bytes", "json", "jsonl", "toml", "yaml", "lines", "safetensors", "arguments"]

#: Numbers that sizes and counts are often not checked for, in both byte orders.
_EDGES = [
    bytes.fromhex(x) for x in ("00000000", "ffffffff", "7fffffff", "80000000", "00000001", "ffffff7f", "01000000")
]
_TEXTS = [
    "", " ", "a" * 300, "a" * 100_000, "a\0b", "\x1b[31m", "\ud800", "\u202e", "\u0666", "../../x", "x" * 256,
    "~nosuch/x", "{", "%s%n", "-1", "1e999", "nan", "NaN", "true", "9x0x0", "9x32x64", "9" * 400, "\r\n", "\U0001f327",
    "<script>", "0.5:", "demo://nosuch", "a=b", "a:b:::c", "@@@", "'", '"', "`", "|", "--x", "-",
]  # fmt: skip
#: Values of JSON as they are written; most are also those of TOML and YAML.
_NUMBERS = [
    "0", "-0.0", "-1", "1", "2.5", "1e18", "1e308", "-1e308", "1e999", "-1e999", "1e-400", "4.9e-324", "9" * 25,
    "9" * 320, "9" * 5000, str(2**31), str(2**63), str(-(2**63) - 1), str(2**64), "1000000000000",
]  # fmt: skip
_NESTED = ["[]", "{}", "[[]]", '{"": null}', '{"a": [1]}', "[null]", "[{}]", '["a", 1]', "[1, 2, 3]", '{"step": 1}']
_DEEP = ["[" * 70 + "]" * 70, "[" * 3000 + "]" * 3000, "[" * 100_000, '{"a":' * 70 + "1" + "}" * 70]
_CONSTANTS = ["null", "true", "false", "NaN", "Infinity", "-Infinity"]
_JSON_TEXTS = [json.dumps(text) for text in _TEXTS]
_MARK = "\x02%d\x02"  # takes the place of a value until the others are written


def damaged(content: bytes, form: Format, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return a file with one or several faults: by its form in most cases, by its bytes in the others.

    Args:
        content: the file as it was written.
        form: what it consists of.
        rng: the source of chance; equal states give equal files.
        others: files that parts may be taken from.
    """
    if form != "bytes" and (form == "arguments" or rng.random() < 0.75):
        return _BY_FORM[form](content, rng)
    return damaged_bytes(content, rng, others)


def damaged_bytes(content: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return a file with up to eight faults, most near its beginning or end, where headers and indexes are."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        size = len(data)
        if not size:
            break
        at = rng.choice((rng.randrange(size), rng.randrange(min(size, 600)), size - 1 - rng.randrange(min(size, 1200))))
        length = rng.choice((1, 4, 16, 64, 300))
        other = rng.randrange(size)
        match rng.randrange(10):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 4] = rng.choice(_EDGES)
            case 3:
                del data[at:]
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = rng.randbytes(length)
            case 6:
                data[at : at + length] = bytes(min(length, size - at))
            case 7:
                data[at:at] = data[other : other + length]
            case 8 if others:
                source = rng.choice(others)
                start = rng.randrange(len(source) or 1)
                data[at : at + length] = source[start : start + 4 * length]
            case _:
                data[at : at + length] = data[other : other + length]
    return bytes(data)


def _hostile(rng: random.Random) -> str:
    """Return a JSON value as it is written."""
    kind = rng.choices((_NUMBERS, _CONSTANTS, _JSON_TEXTS, _NESTED, _DEEP), (30, 20, 25, 20, 5))[0]
    return rng.choice(kind)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON value as a container and a key."""
    places: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        container = pending.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, child in list(items):
            places.append((container, key))
            if isinstance(child, (dict, list)):
                pending.append(child)
    return places


def _damaged_json(content: bytes, rng: random.Random) -> bytes:
    value = [json.loads(content)]
    hostile: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(value)
        if not places:
            break
        container, key = rng.choice(places)
        match rng.randrange(10):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(_TEXTS)] = container.pop(key)
            case 2:
                source, name = rng.choice(places)
                container[key] = json.loads(json.dumps(source[name])) if name in _keys(source) else None
            case 3:
                container[key] = rng.choice(([container[key]], {"a": container[key]}, str(container[key])))
            case _:
                container[key] = _MARK % len(hostile)
                hostile.append(_hostile(rng))
    text = json.dumps(value[0] if value else None, ensure_ascii=rng.random() < 0.5)
    for index, token in enumerate(hostile):
        text = text.replace(json.dumps(_MARK % index), token)
    return text.encode(errors="surrogatepass")


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _damaged_lines(content: bytes, rng: random.Random) -> bytes:
    """Damage lines of plain text."""
    lines = content.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        text = rng.choice(_TEXTS).encode(errors="surrogatepass")
        match rng.randrange(5):
            case 0:
                lines[at] = text
            case 1:
                lines.insert(at, text)
            case 2:
                lines[at] += rng.choice((b" ", b"=", b"\t")) + text
            case 3:
                lines.insert(at, lines[at])
            case _:
                lines[at] = lines[at].replace(rng.choice((b" ", b"=", b"/", b".")), text, 1)
    return b"\n".join(lines)


def _damaged_jsonl(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        match rng.randrange(8):
            case 0:
                lines.insert(at, _hostile(rng).encode(errors="surrogatepass"))
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            case _:
                try:
                    lines[at] = _damaged_json(lines[at], rng)
                except (ValueError, RecursionError):  # damaged before
                    del lines[at]
                    lines = lines or [b""]
    return b"\n".join(lines) + b"\n"


def _damaged_settings(content: bytes, rng: random.Random, line: str, *, constants: Sequence[str]) -> bytes:
    """Damage lines that set a value, such as those of TOML and YAML."""
    lines = content.decode().splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        settings = [(at, match) for at, text in enumerate(lines) if (match := re.fullmatch(line, text))]
        if not settings:
            break
        at, match = rng.choice(settings)
        name, between, value = match.groups()
        kind = rng.choices((_NUMBERS, constants, _JSON_TEXTS, _NESTED, _DEEP), (30, 15, 25, 20, 5))[0]
        hostile = rng.choice(kind)
        match rng.randrange(9):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[at])
            case 2:
                lines[at] = f"{json.dumps(rng.choice(_TEXTS))}{between}{value}"
            case 3:
                lines[at] = f"{name}{between}[{value}]"
            case 4:
                lines[at] = f"{name}{between}{rng.choice(settings)[1][3]}"
            case _:
                lines[at] = f"{name}{between}{hostile}"
    return "\n".join(lines).encode(errors="surrogatepass")


def _damaged_toml(content: bytes, rng: random.Random) -> bytes:
    constants = (
        "nan",
        "inf",
        "-inf",
        "true",
        "false",
        "2020-01-01",
        "07:32:00",
        "'a'",
        '"""a\nb"""',
        "{a = 1}",
        "0x10",
    )
    return _damaged_settings(content, rng, r"([\w.\"-]+)(\s*=\s*)(.+)", constants=constants)


def _damaged_yaml(content: bytes, rng: random.Random) -> bytes:
    constants = (
        ".nan",
        ".inf",
        "~",
        "yes",
        "2020-01-01",
        "2020-99-99",
        "!!python/name:os.system",
        "&a [1]",
        "*a",
        "|",
        "a: b",
    )
    return _damaged_settings(content, rng, r"(\s*\w+)(:\s*)(.*)", constants=constants)


def _damaged_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Damage the header, or a JSON text within its metadata; its length is right unless it is a fault itself."""
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length]
    value = json.loads(header)
    texts = [key for key, text in value.get("__metadata__", {}).items() if text.startswith("{")]
    if texts and rng.random() < 0.5:
        key = rng.choice(texts)
        value["__metadata__"][key] = _damaged_json(value["__metadata__"][key].encode(), rng).decode(errors="replace")
        header = json.dumps(value).encode()
    else:
        header = _damaged_json(header, rng)
    edges = (0, 1, len(header) - 1, len(header) + 1, 2**31, 2**63, 2**64 - 1)
    size = rng.choice(edges) if rng.random() < 0.05 else len(header)
    return struct.pack("<Q", max(size, 0)) + header + content[8 + length :]


def _damaged_arguments(content: bytes, rng: random.Random) -> bytes:
    """Damage a command line, a JSON list of texts."""
    arguments = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(1, len(arguments))
        hostile = rng.choice([*_TEXTS, *_NUMBERS, *_CONSTANTS, *_NESTED, "-" * 50_000, "(" * 3000])
        match rng.randrange(7):
            case 0 if len(arguments) > 2:
                del arguments[at]
            case 1:
                arguments.insert(at, hostile)
            case 2:
                arguments.insert(at, rng.choice(arguments[1:]))
            case 3 if arguments[at].startswith("--"):
                arguments[at] = f"{arguments[at]}={hostile}"
            case _:
                arguments[at] = hostile
    return json.dumps(arguments).encode()


_BY_FORM: dict[Format, Any] = {
    "json": _damaged_json, "jsonl": _damaged_jsonl, "toml": _damaged_toml, "yaml": _damaged_yaml,
    "lines": _damaged_lines, "safetensors": _damaged_safetensors, "arguments": _damaged_arguments,
}  # fmt: skip
