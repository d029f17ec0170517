"""The benchmark of the gradient exchange runs, by one process that exchanges with itself. No times are checked here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from real_process import RealProcess

pytestmark = pytest.mark.rotating

SMALL = """
import runpy

names = runpy.run_path("benchmarks/gradient_exchange.py")
worker = names["worker"]
worker.__globals__.update(WIDTH=8, LAYERS=3, ROWS=2)
worker(1)
print(names["row"]("loopback", "a line of gloo's\\n10 30.5 20.0"))
"""


def test_it_prints_three_medians(python: Callable[..., RealProcess]) -> None:
    alone = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    process = python("-c", SMALL, **alone)
    assert process.wait() == 0, process.stderr
    medians, row = process.stdout.splitlines()[-2:]
    assert len(medians.split()) == 3
    assert all(float(one) > 0 for one in medians.split())
    assert row == "| loopback | 10 | 30 | 20 | 1.52 |"
