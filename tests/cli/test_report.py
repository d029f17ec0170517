"""`finetrainers report`: where the page is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import refused_command

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
    assert main(["report", "a/run", "b/run"]) == 0
    assert "<title>a/run, b/run</title>" in (tmp_path / "report.html").read_text()
    assert main(["report", "a/run", "--output", "new/page.html", "--videos", "none"]) == 0
    assert main(["report", "a/run", "--output", "new"]) == 0
    said = capsys.readouterr().out.splitlines()
    written = ["a/run/report.html", "report.html", "new/page.html", "new/report.html"]
    assert [line.partition(" (")[0] for line in said] == written


def test_a_page_is_written_again_until_training_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(tmp_path / "run")
    pages: list[str] = []

    def finish(seconds: float) -> None:
        pages.append((root / "report.html").read_text())
        if len(pages) == 2:
            (root / "events.jsonl").write_text(json.dumps({"event": "finished", "step": 2}) + "\n")

    monkeypatch.setattr("finetrainers.rundir.run_records.in_use", lambda _: True)
    monkeypatch.setattr("finetrainers.cli.report.time.sleep", finish)
    assert main(["report", str(root)]) == 0
    assert not pages  # once
    assert main(["report", str(root), "--every", "7"]) == 0
    pages.append((root / "report.html").read_text())
    assert len(capsys.readouterr().out.splitlines()) == 4
    reloads = ['<meta http-equiv="refresh" content="7">' in page for page in pages]
    assert reloads == [True, True, False]
    assert refused_command(["report", str(root), "--every", "0"]) == (2, [("--every", "invalid")])


@pytest.mark.parametrize("name", ["page.pdf", "page", "run/page.md", "page.html.gz"])
def test_a_name_that_says_something_else_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    assert refused_command(["report", "run", "--output", name]) == (2, [("--output", "invalid")])
    said = capsys.readouterr().err
    assert f"{name} " in said
    assert ".html" in said.replace(name, "")
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
    runs = [("RUN", "not_found"), *[("RUN", "invalid")] * 4]
    assert refused_command(["report", *arguments]) == (2, [*runs, ("--output", "unavailable")])
    lines = capsys.readouterr().err.splitlines()[1:]
    for line, (path, value) in zip(
        lines,
        (
            ("runs/mystile", "'runs/mystyle'"), ("runs", "runs/mystyle"),
            ("runs/mystyle/samples", str(tmp_path / "runs" / "mystyle")), ("clips", "metrics.jsonl"), ("a.txt", ""),
            (str(tmp_path / "a.txt"), ""),
        ),
        strict=True,
    ):  # fmt: skip
        assert path in line.split()
        assert value in line
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "mine.html").write_text("mine")
    assert refused_command(["report", "runs/mystyle", "--output", "mine.html"]) == (2, [("--output", "occupied")])
    assert refused_command(["report", "runs/mystyle", "--videos", "many"]) == (2, [("--videos", "invalid")])
    assert "'many'" in capsys.readouterr().err
