"""The table of GPUs in the documentation, and the planned peaks of the recipes, are what the estimate says today."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from published_networks import NETWORKS

from finetrainers.utils.gpus import read_gpu

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "memory-by-card.md").read_text(encoding="utf-8")
RECIPES = [path for path in sorted(ROOT.glob("examples/*/*.toml")) if "# Planned peak: " in path.read_text()]
RECIPES += sorted(ROOT.glob("examples/*/*/stages.toml"))  # a peak for each stage


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of the benchmark."""
    return runpy.run_path(str(ROOT / "benchmarks" / "memory_estimate.py"))


@pytest.mark.rotating
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_planned_peak_of_a_recipe(recipe: Path, script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert list(script["recipes"]()) == RECIPES
    assert script["with_planned_peak"](recipe) == recipe.read_text(encoding="ascii"), (
        f"{recipe}: run benchmarks/memory_estimate.py --recipes --write"
    )


def test_recipes_fit_the_card_of_their_head(script: dict[str, Any]) -> None:
    """By their planned peaks, which another test computes."""
    for recipe in script["recipes"]():
        head = recipe.read_text(encoding="ascii").partition("\n\n")[0]
        [card] = re.findall(r"^# GPUs?: (?:\d of )?(\d+ GB)", head, re.M)
        peaks = re.findall(r"peak(?: of \w+)?: ([\d.]+) GiB", head)
        assert 0 < max(map(float, peaks)) <= read_gpu(card).gib, recipe


@pytest.mark.rotating
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in NETWORKS for kind in ("LoRA", "full")])
def test_settings_by_gpu_size(script: dict[str, Any], name: str, kind: str) -> None:
    """The rows of the page are what the estimate computes today; every size of cards has one."""
    table = PAGE.partition(f"<!-- cards, {kind} -->")[2].partition(f"<!-- end of cards, {kind} -->")[0]
    shown = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    assert shown == script["markdown"](list(script["cards"](name, kind))).splitlines()[2:], (
        "run benchmarks/memory_estimate.py --cards --write"
    )
    if kind == "LoRA":
        assert [line.split(" | ")[1] for line in shown] == [f"{gpu} GB" for gpu in script["GPUS"]]


def test_readme_agrees_with_the_page(script: dict[str, Any]) -> None:
    """By the rows of the page, which other tests compute."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tables = [PAGE.partition(f"<!-- cards, {kind} -->")[2].partition("<!-- end")[0] for kind in ("LoRA", "full")]
    rows = [[tuple(line.strip("| ").split(" | ")) for line in table.splitlines()] for table in tables]
    for name in NETWORKS:
        lora, full = ([row for row in table if row[0] == name] for table in rows)
        assert "| " + " | ".join(script["summary"](name, lora, full)) + " |" in readme.splitlines()


@pytest.mark.rotating
@pytest.mark.timeout(300)
def test_rows_of_what_to_launch_on_several_gpus(script: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "how-to" / "distributed.md").read_text(encoding="utf-8")
    lines = text.partition("<!-- what to launch -->")[2].partition("<!-- end of what to launch -->")[0].splitlines()
    for setting in [("HunyuanVideo", "129x720x1280", "full"), ("CogVideoX-5b", "49x480x720", "LoRA r128")]:
        rows = script["markdown"](list(script["clusters"](*setting)), script["CLUSTER_HEADINGS"]).splitlines()
        assert set(rows) <= set(lines), f"{setting}: run benchmarks/memory_estimate.py --clusters --write"
    text = (ROOT / "docs" / "how-to" / "sequence-parallel.md").read_text(encoding="utf-8")
    assert script["markdown"]([script["sharing"](4)]).splitlines()[-1] in text.splitlines()
    shown = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines if "GiB" in line}
    assert shown == {(f"{name} {kind}", clip) for name, clip in script["CLIPS"] for kind in script["KINDS"]}
