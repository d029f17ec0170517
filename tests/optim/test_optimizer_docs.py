"""The optimizer table of the documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from finetrainers.optim.table import OPTIMIZERS

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "optimizers.md"
OPTIONS = ("beta1", "beta2", "beta3", "epsilon")


def test_table() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| (\w+) \| ([\d.]+) \| ([a-z, ]+) \| ([a-z0-9, -]+) \|", DOCS.read_text(), re.M
    )
    assert rows == [
        (
            name,
            recipe.library,
            f"{recipe.state_bytes:.3g}",
            "cpu" if recipe.on_host else "cpu, cuda",
            ", ".join(option for option in OPTIONS if option in recipe.reads) or "-",
        )
        for name, recipe in OPTIMIZERS.items()
    ]
