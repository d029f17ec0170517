"""The log file of a run."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

from finetrainers.utils.train_log import PRINTED, PrintedLines, train_log


def test_what_is_printed_and_logged_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run" / "train.log"
    handlers = list(PRINTED.handlers)
    console = Console(file=PrintedLines(), soft_wrap=True)
    console.print("before")
    with train_log(path):
        console.print("step 1/2\nstep 2/2  ")
        logging.getLogger("finetrainers.anywhere").warning("careful")
    with pytest.raises(RuntimeError, match="gone"), train_log(path):
        raise RuntimeError("disk gone")
    console.print("after")
    lines = path.read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "step 1/2", "step 2/2", "WARNING finetrainers.anywhere: careful", "ended by RuntimeError: disk gone",
    ]  # fmt: skip
    assert all(re.match(r"\d{4}-", line) for line in lines)
    assert capsys.readouterr().out == ""  # the file is all that becomes of it
    with train_log(None):
        console.print("nowhere")
    assert PRINTED.handlers == handlers
