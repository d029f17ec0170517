"""The table of rounding errors, of the packaged model."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

pytestmark = pytest.mark.rotating


def test_each_layer_has_a_row(
    benchmark_script: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark_script("quantization_error").main(["demo://ltx", "--layers"])
    first, *table = capsys.readouterr().out.splitlines()
    assert first == "50 layers, 2.949 M weights of demo://ltx"
    heading, _, *rows = [line.strip("| ").split(" | ") for line in table]
    assert heading == ["layer", "int8", "fp8", "nf4", "plain e4m3", "plain e5m2"]
    errors = {name: [float(value.rstrip("%")) for value in values] for name, *values in rows}
    assert len(errors) == 52
    for int8, fp8, nf4, e4m3, e5m2 in errors.values():
        assert 0 < int8 < fp8 < e4m3 < e5m2 < nf4 < 11
    assert errors["largest"][0] == max(values[0] for name, values in errors.items() if "blocks" in name)
