"""The pages' form: lengths, the index, and the website that is built of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import PAGES, ROOT, page_id

MAX_LINES, MAX_COLUMNS = 300, 120
#: Printed by `finetrainers docs`: one row per option, to be searched and not read.
GENERATED = {"docs/reference/configuration.md", "docs/reference/grpo-presets.md"}
#: A list of changes by version, which is only added to.
LOGS = {"CHANGELOG.md"}
#: Presets name files of the publications' code, two rows of models.md those of other versions and programs.
OTHERS_FILES = {"docs/training/cogvideox.md", "examples/cogvideo", "training/prepare_dataset.py"}
KINDS = ("tutorials", "how-to", "reference", "explanation")


def prose(page: Path) -> list[str]:
    """A page's lines outside code blocks, tables and pictures."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if not line.startswith(("|", "!["))]


@pytest.mark.parametrize("page", [page for page in PAGES if page_id(page) not in LOGS], ids=page_id)
def test_pages_are_short_and_prose_is_wrapped(page: Path) -> None:
    num_lines = len(page.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES or page_id(page) in GENERATED, "split the page"
    assert [line for line in prose(page) if len(line) > MAX_COLUMNS] == []


def test_every_page_is_of_one_of_four_kinds_and_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/**/*.md")} - {Path("README.md")}
    assert {path.parts[0] for path in pages} == set(KINDS)
    assert [page for page in sorted(pages) if f"({page.as_posix()}" not in index] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("CHANGELOG.md", "grpo-presets.md")], ids=page_id
)
def test_named_files_exist(page: Path) -> None:
    """Paths in code spans are of the repository, or below finetrainers/ or tests/; `my_...`, NAME and folders in runs/
    are the reader's."""
    bases = (ROOT, ROOT / "finetrainers", ROOT / "tests")
    folders = {path.name for base in bases for path in base.iterdir() if path.is_dir()}
    spans = re.findall(r"`([\w.-]+/[\w./-]*)`", "\n".join(page.read_text(encoding="utf-8").splitlines()))
    paths = {
        span
        for span in spans
        if span.partition("/")[0] in folders and not re.search(r"my_|NAME|^runs/(?!\w+\.py)", span)
    } - OTHERS_FILES
    assert [path for path in sorted(paths) if not any((base / path).exists() for base in bases)] == []


def test_the_website_builds_without_a_warning(tmp_path: Path) -> None:
    """Navigation, links and anchors; and files outside docs/ that pages link to."""
    pytest.importorskip("properdocs")
    built = subprocess.run(
        [sys.executable, "-m", "properdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site" / "reference" / "models" / "index.html").read_text(encoding="utf-8")
    assert 'href="../../examples/ltx_video/lora.toml"' in page
    assert (tmp_path / "site" / "examples" / "ltx_video" / "lora.toml").is_file()
