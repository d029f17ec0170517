"""Strings from users in Markdown: plain, as code, link or table row, without effect on the rest of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

#: Characters that begin something within a line: code, emphasis, links, HTML, entities, tables, formulas, headings;
#: underscores only at the edge of a word, so that names stay readable.
_SPECIAL = re.compile(r"[\\`*\[\]<&|~$#]|(?<![^\W_])_|_(?![^\W_])")
#: Addresses that GitHub links wherever they are.
_ADDRESS = re.compile(r"(https?|ftp)(?=://)|(www)(?=\.)|(?<=\w)(?=@\w)", re.IGNORECASE)
_BACKTICKS = re.compile("`+")


def escape(value: Any) -> Markup:
    """Return a value as text of one line; Markdown, which these functions return, stays as it is."""
    if isinstance(value, Markup):
        return value
    text = _SPECIAL.sub(r"\\\g<0>", _one_line(value))
    return Markup(_ADDRESS.sub(r"\g<0>\\", text))


def code(value: Any) -> Markup:
    """Return a value as code within a line, between more backticks than it has itself; without a value, nothing."""
    text = _one_line(value)
    fence = "`" * (max(map(len, _BACKTICKS.findall(text)), default=0) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return Markup(f"{fence}{padding}{text}{padding}{fence}" if text else "")


def link(text: Any, address: str) -> Markup:
    """Return a link; the address is quoted where it could end the link."""
    return Markup(f"[{escape(text)}]({url(address)})")


def url(address: str) -> Markup:
    """Return an address or path for a link or an image."""
    return Markup(quote(address, safe="/:?#@!$&'+,;=%~"))


def row(cells: Iterable[Any]) -> Markup:
    """Return a row of a table; a pipe in code would end its cell."""
    texts = (re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", escape(cell)) for cell in cells)
    return Markup(f"| {' | '.join(texts)} |")


def _one_line(value: Any) -> str:
    """Return a value as text without line ends, control characters and surrounding spaces."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in str(value)).split())
