"""The published memory figures: all of them are in the documentation, with today's estimate; one of each kind is
counted again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotating

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import memory_seed_table as benchmark  # noqa: E402

WRITE = "run `python benchmarks/memory_seed_table.py --write`"


def test_the_page_has_every_figure_and_the_estimate() -> None:
    lines = [line for line in benchmark.PAGE.read_text().splitlines() if line.startswith(("| 2b", "| 5b"))]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    expected = [cells for _, cells in benchmark.table(counting=False)]
    assert len(shown) == len(expected) == 65, WRITE
    counted = benchmark.HEADINGS.index("counted")
    for found, cells in zip(shown, expected, strict=True):
        assert [*found[:counted], *found[counted + 1 :]] == [*cells[:counted], *cells[counted + 1 :]], WRITE
        if found[counted]:
            assert float(found[counted - 1]) == pytest.approx(float(found[counted]), rel=0.05), found
        assert bool(found[counted]) == (found[2] != "deepspeed")


def test_counted_figures_are_in_the_page() -> None:
    rows = [row for row in benchmark.rows() if row.model == "2b" and row.batch == 1 and row.rank in ("16", "-")]
    shown = benchmark.PAGE.read_text()
    for row in (rows[0], rows[-2]):  # a LoRA without checkpointing; full finetuning whose gradients leave
        gib = benchmark.counted(row)
        assert gib is not None, row
        assert f"| {benchmark.estimated(row):.1f} | {gib:.1f} |" in shown, WRITE
    assert [rows[-2].kind, rows[-2].optimizer] == ["full", "offload"]
