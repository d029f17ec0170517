"""What tests on a device stand on: their cases, and processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from on_devices import cases, devices, run_alone


def test_every_value_is_a_case_on_cuda_and_the_first_on_the_cpu() -> None:
    found = [(case.values, [mark.name for mark in case.marks]) for case in cases(("a", 1), ("b", 2), on_cpu=1)]
    assert [values for values, marks in found if "gpu" in marks] == [("cuda", "a", 1), ("cuda", "b", 2)]
    assert [values for values, marks in found if not marks][:1] == [("cpu", "a", 1)]
    assert "cpu" in devices()


def test_a_test_alone_ends_here_as_it_does_there(tmp_path: Path) -> None:
    path = tmp_path / "test_alone.py"
    path.write_text(
        "import os, pytest\n"
        "def test_fails(): raise KeyError('missing part')\n"
        "def test_skips(): os.environ['FINETRAINERS_TEST_ALONE'] == '1' and pytest.skip('needs about 90 GiB')\n"
    )
    with pytest.raises(pytest.fail.Exception, match="missing part"):
        run_alone(f"{path}::test_fails", rootdir=tmp_path)
    with pytest.raises(pytest.skip.Exception, match="needs about 90 GiB"):
        run_alone(f"{path}::test_skips", rootdir=tmp_path)
