"""Hooks of the documentation's website: navigation by docs/README.md, and pages for linked files outside docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Files that pages link to, by patterns below the repository's root; they keep their paths on the site.
_LINKED = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "examples/**/*", "benchmarks/*.md", "benchmarks/results/*.md")
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)")


def on_config(config: Any) -> Any:
    """Make the navigation from the sections and links of docs/README.md."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", index, re.MULTILINE | re.DOTALL)
    config.nav = ["README.md"]
    for title, text in sections:
        links = re.findall(r"\[[^\]]+\]\(([^)#]+\.md)\)", text)
        config.nav.append({title: [_on_site("README.md", link) for link in dict.fromkeys(links)]})
    config.nav.append({"Project": ["CONTRIBUTING.md", "CHANGELOG.md"]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that pages link to."""
    make = type(next(iter(files)))
    for path in sorted(found for pattern in _LINKED for found in ROOT.glob(pattern) if found.is_file()):
        files.append(make.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to where their targets are on the site."""

    def moved(match: re.Match[str]) -> str:
        target = _on_site(page.file.src_uri, match[1])
        return f"]({os.path.relpath(target, os.path.dirname(page.file.src_uri) or '.')}"  # noqa: PTH120

    return _LINK.sub(moved, markdown)


def _on_site(page: str, link: str) -> str:
    """Return the site's path of a link's target; pages of docs/ are at the top, other files as in the repository."""
    source = ROOT / "docs" / page if (ROOT / "docs" / page).exists() else ROOT / page
    target = Path(os.path.normpath(source.parent / link)).relative_to(ROOT)
    return (target.relative_to("docs") if target.parts[0] == "docs" else target).as_posix()
