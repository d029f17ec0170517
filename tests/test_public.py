"""What `finetrainers` offers as a package: these names, found when they are used, typed, and nothing heavy before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import finetrainers
from finetrainers.utils.failures import Kind

ROOT = Path(__file__).parents[1]


def fresh(code: str, *, cwd: Path) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_shows_its_public_names() -> None:
    assert dir(finetrainers) == sorted([*finetrainers.__all__, "__version__"])
    for name in finetrainers.__all__:
        found = getattr(finetrainers, name)
        assert found.__name__ == name
        assert found.__doc__


def test_the_page_on_python_explains_each_kind_of_problem() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    table = page.partition("| kind | meaning |")[2]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.M)) == get_args(Kind)


def test_importing_the_package_costs_nothing(tmp_path: Path) -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\nimport finetrainers\nnew = {n.partition('.')[0] for n in "
        "set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names))\n"
        "from finetrainers import Callback, ConfigError, TrainResult, check, load_config, register_method, "
        "register_model\n"
        "from finetrainers import register_reward, train\n"
        "print('torch' in sys.modules)\n"
        "@register_reward('mine')\ndef mine(videos, prompts): ...\n"
        "print('torch' in sys.modules)\n"
    )
    assert fresh(code, cwd=tmp_path).splitlines() == ["['finetrainers']", "False", "False"]


def test_the_package_is_built_with_its_type_marker_and_data(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    package = tmp_path / "lib" / "finetrainers"
    assert (package / "py.typed").is_file()
    assert (package / "data" / "inspect" / "html_report.html").is_file()
    for name in ("sampling/page.html", "sampling/grid.html", "draw/head.html", "draw/page.css"):
        assert (package / name).is_file()
    assert list((package / "demo" / "weights").glob("*/model_index.json"))
