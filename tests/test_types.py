"""Type checkers accept the programs of the pages and `typed_program.py`, and refuse their wrong names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import blocks, page_id

ROOT = Path(__file__).parents[1]
#: Pages with programs of Python; those of others are about classes of diffusers.
PAGES = [
    ROOT / "docs" / name
    for name in (
        *("reference/python.md", "reference/rewards.md", "reference/host-program.md"),
        *("how-to/own-loop.md", "how-to/adding-a-method.md"),
    )
]
#: What mypy reads of other packages is limited, as for this one: all of it would take three times as long.
MYPY = """[mypy]
strict = true
python_version = 3.10
ignore_missing_imports = true

# The programs of the pages have no annotations.
[mypy-pages.*]
disallow_untyped_defs = false
disallow_untyped_calls = false

[mypy-{skipped}]
follow_imports = skip
"""
#: A line of mypy: file, line, message.
_ERROR = re.compile(r"^(.*?):(\d+): error: ", re.M)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the programs: one for each page, and one for each file that a page has."""
    folder = tmp_path_factory.mktemp("programs")
    texts: dict[str, str] = {"__init__": ""}
    for page in PAGES:
        for block in blocks(page, "python", "py"):
            first = block.text.partition("\n")[0].removeprefix("# ").removesuffix(".py")
            name = first if first.isidentifier() else Path(page_id(page)).stem.replace("-", "_")
            texts[name] = texts.get(name, "") + block.text
    (folder / "pages").mkdir()
    for name, text in texts.items():
        (folder / "pages" / f"{name}.py").write_text(text)
    shutil.copy(ROOT / "tests" / "typed_program.py", folder)
    return folder


def refused_lines(programs: Path) -> set[tuple[str, int]]:
    """Return file and line of each call with a wrong name or type, which the programs mark, or which a page shows."""
    return {
        (path.relative_to(programs).as_posix(), number)
        for path in programs.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.endswith("# refused") or "rnk=8" in line
    }


@pytest.mark.rotating
def test_mypy_strict(programs: Path) -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    skipped = re.findall(r'"([\w.]+\.\*)"', settings.partition("[[tool.mypy.overrides]]")[2].partition("]\nfollow")[0])
    assert "diffusers.*" in skipped
    (programs / "mypy.ini").write_text(MYPY.format(skipped=",".join(skipped)))
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "pages", "typed_program.py"]
    done = subprocess.run(command, cwd=programs, capture_output=True, text=True, timeout=400, check=False)
    errors = {(file, int(line)) for file, line in _ERROR.findall(done.stdout)}
    assert errors == refused_lines(programs), done.stdout + done.stderr


@pytest.mark.rotating
def test_pyright(programs: Path) -> None:
    settings = {"typeCheckingMode": "standard", "pythonVersion": "3.10"}  # the defaults of pyright
    (programs / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=programs, capture_output=True, text=True, timeout=400, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] > len(PAGES)
    errors = {
        (Path(problem["file"]).relative_to(programs).as_posix(), problem["range"]["start"]["line"] + 1)
        for problem in report["generalDiagnostics"]
        if 'from module "diffusers' not in problem["message"]  # which loads its names on use
    }
    assert errors == refused_lines(programs), done.stdout
