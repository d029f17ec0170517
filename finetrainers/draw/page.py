"""HTML pages that need no other file and no network; their templates share a styled head, `head.html`, and parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2


def render_page(template: Path, *, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """Render a template, which escapes every value, and may include `head.html` and the parts next to it.

    Args:
        template: its file, which may include others of its folder.
        filters: further filters, by name.
        values: of the template's variables.
    """
    environment = _environment(template.parent)
    environment.filters |= filters or {}
    return environment.get_template(template.name).render(**values)


@cache
def _environment(folder: Path) -> jinja2.Environment:
    """Return one environment for each folder: compiling a template takes longer than rendering it."""
    return jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent], encoding="utf-8"),
    )
