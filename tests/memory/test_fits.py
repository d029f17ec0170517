"""The table of GPUs in the documentation, and the planned peaks of the recipes, are what the estimate says today."""

from __future__ import annotations

import atexit
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = [path for path in sorted(ROOT.glob("examples/*/*.toml")) if "# Planned peak: " in path.read_text()]
#: Of every kind of run one; `benchmarks/memory_estimate.py --fits --write` makes all rows.
ROWS = [("LTX-Video", "LoRA r128", 12), ("LTX-Video", "full", 32), ("CogVideoX-2b", "LoRA r128", 80)]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of the benchmark."""
    return runpy.run_path(str(ROOT / "benchmarks" / "memory_estimate.py"))


def test_folders_of_models_are_removed_at_the_end(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], Any]] = []
    monkeypatch.setattr(atexit, "register", lambda call, *args, **more: at_exit.append(partial(call, *args, **more)))
    model = script["model"].__wrapped__("LTX-Video")
    assert model.is_dir()
    for call in at_exit:
        call()
    assert not model.parent.exists()


@pytest.mark.rotating
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_planned_peak_of_a_recipe(recipe: Path, script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert list(script["recipes"]()) == RECIPES
    assert script["with_planned_peak"](recipe) == recipe.read_text(encoding="ascii"), (
        f"{recipe}: run benchmarks/memory_estimate.py --recipes --write"
    )


@pytest.mark.timeout(300)
def test_rows_of_the_documentation(script: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "how-to" / "memory.md").read_text(encoding="utf-8")
    for row in ROWS:
        assert script["markdown"]([script["fits"](*row)]).splitlines()[-1] in text.splitlines(), row
    gpus = {f"| {gpu} GB" for gpu in script["GPUS"]}
    assert {line[: line.index(" GB") + 3] for line in text.splitlines() if line.startswith(tuple(gpus))} == gpus


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
