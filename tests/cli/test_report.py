"""`finetrainers report`: where the page is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetrainers.cli.main import main


def make_run(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "metrics.jsonl").write_text("".join(json.dumps({"step": k, "loss": 1.0 / k}) + "\n" for k in (1, 2)))
    return root


def test_pages_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a" / "run")
    make_run(tmp_path / "b" / "run")
    assert main(["report", "a/run"]) == 0
    assert "<title>a/run</title>" in (tmp_path / "a" / "run" / "report.html").read_text()
    assert main(["report", "a/run", "b/run", "a/run"]) == 0
    assert "<title>a/run, b/run</title>" in (tmp_path / "report.html").read_text()
    assert main(["report", "a/run", "--output", "new/page.html", "--videos", "none"]) == 0
    assert main(["report", "a/run", "--output", "new"]) == 0
    said = capsys.readouterr().out.splitlines()
    written = ["a/run/report.html", "report.html", "new/page.html", "new/report.html"]
    assert [line.partition(" (")[0] for line in said] == written


@pytest.mark.parametrize("name", ["page.pdf", "page", "run/page.md", "page.html.gz"])
def test_a_name_that_says_something_else_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    assert main(["report", "run", "--output", name]) == 2
    assert (
        f"--output: {name} would not be opened as what it is, an HTML page; give a name that ends in .html"
        in capsys.readouterr().err
    )
    assert not Path(name).exists()


def test_what_is_no_run_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "mystyle")
    (tmp_path / "runs" / "mystyle" / "samples").mkdir()
    (tmp_path / "clips").mkdir()
    (tmp_path / "a.txt").write_text("")
    arguments = ["runs/mystile", "runs", "runs/mystyle/samples", "clips", "a.txt", "--output", "a.txt/page.html"]
    assert main(["report", *arguments]) == 2
    said = capsys.readouterr().err
    for part in (
        "runs/mystile does not exist: there is no 'mystile' in",
        "did you mean 'runs/mystyle'?",
        "runs is no run directory, but contains some: runs/mystyle",
        f"runs/mystyle/samples is a folder of a run; give the run directory, {tmp_path / 'runs' / 'mystyle'}",
        "clips is no run directory: it has none of metrics.jsonl, events.jsonl, config.toml",
        "a.txt is not a folder but a file",
        "--output: nothing can be written to",
    ):
        assert part in said
    assert not (tmp_path / "report.html").exists()
    assert main(["report", "runs/mystyle", "--videos", "many"]) == 2
    assert "'many' is neither a number nor none" in capsys.readouterr().err
