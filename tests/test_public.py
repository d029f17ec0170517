"""What `finetrainers` offers as a package: these names, found when they are used, typed, and nothing heavy before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import finetrainers
from finetrainers.utils.failures import Kind
from finetrainers.utils.video import write_mp4

ROOT = Path(__file__).parents[1]


def fresh(code: str, *, cwd: Path, path: Path = ROOT) -> str:
    """What a fresh interpreter prints that has a directory on its path."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, "PYTHONPATH": str(path)}, capture_output=True,
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


def test_the_page_on_stability_lists_each_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "stability.md").read_text()
    names = re.findall(r"`(\w+)`", page.partition("| subject | names |")[2])
    assert sorted(names) == sorted(finetrainers.__all__)
    assert "(stability.md)" in (ROOT / "docs" / "reference" / "python.md").read_text()


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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked wheel, built without writing to the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder),
            *("build", "--build-base", folder / "build"),
            *("bdist_wheel", "--bdist-dir", folder / "unpacked", "--dist-dir", folder),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    [file] = folder.glob("finetrainers-*.whl")
    assert file.name == f"finetrainers-{finetrainers.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_the_wheel_has_data_recipes_and_launcher_files(wheel: Path) -> None:
    package = wheel / "finetrainers"
    for name in (
        *("py.typed", "data/inspect/html_report.html", "sampling/page.html", "sampling/grid.html", "draw/head.html"),
        "draw/page.css",
    ):
        assert (package / name).is_file()
    assert list((package / "demo" / "weights").glob("*/model_index.json"))
    for name in ("examples", "accelerate_configs"):
        files = [path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file()]
        launching = [path for path in files if path.name in ("train.sh", "grpo.sh")]  # train.py, of the checkout
        assert not any((package / path).exists() for path in launching)
        files = [path for path in files if path not in launching]
        assert [path for path in files if (package / path).read_bytes() != (ROOT / path).read_bytes()] == []


@pytest.mark.rotating
def test_an_editable_install_shows_types(tmp_path: Path) -> None:
    """Type checkers read a directory of a path file; they do not run the import hooks of setuptools."""
    command = (sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path)
    command += ("editable_wheel", "--dist-dir", tmp_path)
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        [name] = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert Path(archive.read(name).decode().strip()) == ROOT


def test_recipes_of_the_wheel_are_found_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    code = "from finetrainers.config.load import load_config as l; print(l('ltx_video/grpo_lora').grpo.prompts)"
    assert fresh(code, cwd=tmp_path, path=wheel).strip() == str(wheel / "finetrainers" / "examples" / "prompts.txt")


@pytest.mark.rotating
def test_recipes_of_the_wheel_run_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    for number in range(2):
        write_mp4(tmp_path / "clips" / f"{number}.mp4", np.full((60, 32, 64, 3), 90, np.uint8), fps=25)
        (tmp_path / "clips" / f"{number}.txt").write_text("a grey clip")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "finetrainers", "train", "--config", "ltx_video/lora", "--dry_run"),
            *("--pretrained_model_name_or_path", "demo://ltx"),
        ],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(wheel)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "49x32x64" in done.stdout
