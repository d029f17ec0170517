"""Damaged files, in a separate process: each gets an answer, regardless of its content. `fuzz.py` makes any number."""

from __future__ import annotations

import json
from pathlib import Path

from fuzz import MEDIA_SUFFIXES_MADE
from real_process import Python

MEDIA, TABLES = 800, 500


def test_every_damaged_file_is_usable_or_refused_with_a_reason(python: Python, tmp_path: Path) -> None:
    folder = tmp_path / "fuzz"
    process = python("tests/data/fuzz.py", "--media", str(MEDIA), "--tables", str(TABLES), "--folder", str(folder))
    code = process.wait(timeout=300)
    places = {name: (folder / name / "at").read_text() for name in ("media", "tables")}
    assert code == 0, f"{code} at {places}; see --only of tests/data/fuzz.py\n{process.stderr[-2000:]}"
    report = json.loads(process.stdout)
    for name in ("media", "tables"):
        assert report[name]["violations"] == []
        assert report[name]["slowest_s"][0] < 10, report[name]["slowest_s"]
    # The files are damaged in every place: of every kind some are usable all the same, and some are not.
    outcomes = report["media"]["outcomes"]
    usable = {outcome.partition(":")[0] for outcome in outcomes if outcome.endswith(": usable")}
    refused = {outcome.partition(":")[0] for outcome in outcomes if not outcome.endswith(": usable")}
    assert usable == refused == MEDIA_SUFFIXES_MADE
    count = sum(number for outcome, number in outcomes.items() if outcome.endswith(": usable"))
    assert 0.2 < count / MEDIA < 0.7
    tables = report["tables"]["outcomes"]
    assert {outcome.partition(":")[0] for outcome in tables if outcome.endswith(": refused")} >= {
        "t.csv", "t.json", "t.jsonl", "t.tar", "t.tar.gz", "videos.txt", "prompts.txt", "d.toml",
    }  # fmt: skip
