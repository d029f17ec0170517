"""The table of GPUs in the documentation is what the estimate says today."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Of every kind of run one; `benchmarks/memory_estimate.py --fits --write` makes all rows.
ROWS = [("LTX-Video", "LoRA r128", 12), ("LTX-Video", "full", 32), ("CogVideoX-2b", "LoRA r128", 80)]


@pytest.mark.timeout(300)
def test_rows_of_the_documentation() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "memory_estimate.py"))
    text = (ROOT / "docs" / "how-to" / "memory.md").read_text(encoding="utf-8")
    for row in ROWS:
        assert script["markdown"]([script["fits"](*row)]).splitlines()[-1] in text.splitlines(), row
    gpus = {f"| {gpu} GB" for gpu in script["GPUS"]}
    assert {line[: line.index(" GB") + 3] for line in text.splitlines() if line.startswith(tuple(gpus))} == gpus
