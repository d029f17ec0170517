"""Machines read again and again beside a run: which counters rise, machines that do not answer, and the run's page."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetrainers.cli.main import main
from finetrainers.results.reports.health import health_of
from finetrainers.results.reports.media import VideoLimits
from finetrainers.results.reports.page import make_report
from finetrainers.rundir.run_records import read_run

SMI = """#!/bin/sh
echo "0, NVIDIA H100, 570, 81559, 412, 97, 500.0, 700.0, 61, {uncorrected}, {corrected}, {clock}, 1980"
echo "1, NVIDIA H100, 570, 81559, 412, 97, 400.0, 700.0, 64, [N/A], [N/A], 1900, 1980"
"""
#: What connects: one machine answers with text that would control a terminal, one with something else, one not at all.
CONNECT = """#!/bin/sh
case $1 in
    good) read question; printf 'finetrainers-doctor {"gpus": [{"index": 0, "power_w": 10, "clock_mhz": "fast"}, 7],
 "ports": {"m\\\\u001b[2J/1": {"active": 1, "symbol_error": %s}},
 "gpu_error": "\\\\u0007rings"}\\n' $(cat {count}) | tr -d '\\n'; echo ;;
    odd) read question; echo 'finetrainers-doctor [1]' ;;
    *) printf 'ssh: \\033]0;x\\007 gone\\n' >&2; exit 255 ;;
esac
"""


class Machine:
    """The GPUs and InfiniBand ports of this machine, in files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.smi, self.port = root / "nvidia-smi", root / "infiniband" / "mlx5_0" / "ports" / "1"
        for folder in ("counters", "hw_counters"):
            (self.port / folder).mkdir(parents=True)
        monkeypatch.setenv("PATH", f"{root}:/usr/bin:/bin")
        monkeypatch.setattr("finetrainers.rundir.health._INFINIBAND", root / "infiniband")
        self.now()

    def now(self, *, errors: int = 3, retries: int = 0, state: str = "4: ACTIVE", **gpu: int) -> None:
        """Set the counters."""
        values = {"uncorrected": 0, "corrected": 5, "clock": 1950, **gpu}
        self.smi.write_text(SMI.format(**values))
        self.smi.chmod(0o755)
        (self.port / "state").write_text(f"{state}\n")
        (self.port / "counters" / "symbol_error").write_text(f"{errors}\n")
        (self.port / "counters" / "port_rcv_data").write_text("123456789\n")
        (self.port / "hw_counters" / "local_ack_timeout_err").write_text(f"{retries}\n")


def run_directory(root: Path, begun: float) -> Path:
    """A run that has trained a step each second."""
    metrics = [{"step": k, "time": begun + k, "step_s": 1.0 + k / 10, "loss": 1.0} for k in range(1, 10)]
    root.mkdir()
    (root / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    (root / "events.jsonl").write_text(json.dumps({"time": begun, "event": "start", "step": 0}) + "\n")
    return root


def test_this_machine_beside_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading is appended, what rose is printed, and the page has charts by step and a table."""
    machine = Machine(tmp_path, monkeypatch)
    begun = time.time()
    clock = [begun + 1.5]
    monkeypatch.setattr("finetrainers.cli.doctor.time", SimpleNamespace(
        time=lambda: clock[0], sleep=lambda seconds: sleep(seconds), monotonic=time.monotonic,
        strftime=time.strftime))  # fmt: skip
    later: list[dict[str, Any]] = [
        {"errors": 10, "clock": 1200},
        {"errors": 2, "corrected": 9, "retries": 4},  # the port was reset
        {"errors": 2, "corrected": 9, "retries": 4, "uncorrected": 1, "state": "1: DOWN"},
    ]

    def sleep(seconds: float) -> None:
        assert seconds >= 0
        if not later:
            raise KeyboardInterrupt
        machine.now(**later.pop(0))
        clock[0] += 2

    run = run_directory(tmp_path / "run", begun)
    assert main(["doctor", str(run), "--every", "60"]) == 130
    said, err = capsys.readouterr()
    assert str(run / "health.jsonl") in err
    lines = said.splitlines()
    assert sum("900 W" in line and "64 C" in line for line in lines) == 4
    assert [line.partition(": ")[2] for line in lines if line.startswith("  ")] == [
        "mlx5_0/1 symbol_error +7",
        "GPU 0 corrected memory errors +4, mlx5_0/1 local_ack_timeout_err +4",
        "GPU 0 uncorrected memory errors +1, mlx5_0/1 down +1",
    ]
    records = [json.loads(line) for line in (run / "health.jsonl").read_text().splitlines()]
    assert [record["ports"]["mlx5_0/1"]["symbol_error"] for record in records] == [3, 10, 2, 2]
    assert [record["gpus"][0]["clock_mhz"] for record in records] == [1950, 1200, 1950, 1950]

    with open(run / "health.jsonl", "a") as file:  # edited, and cut short by a kill
        file.write(
            '{"time": 1, "host": 3}\n{"time": 2, "host": "b", "gpus": 7, "ports": {"p": {"active": null}}}\n{"tim'
        )
    found = health_of(read_run(run))
    assert found is not None
    assert [(name, by, steps) for _, name, by, steps in found.rises] == [
        ("mlx5_0/1 symbol_error", "7", "3"),
        ("GPU 0 corrected memory errors", "4", "5"),
        ("mlx5_0/1 local_ack_timeout_err", "4", "5"),
        ("GPU 0 uncorrected memory errors", "1", "7"),
        ("mlx5_0/1 down", "1", "7"),
    ]
    charts = {chart.title.partition(",")[0]: chart.series[0].points for chart in found.charts}
    assert charts["Seconds per step"][0] == list(range(1, 10))
    assert charts["Errors since the first reading"] == ([1, 3, 5, 7], [0, 7, 15, 17])
    assert charts["Slowest GPU clock"] == ([1, 3, 5, 7], [1900, 1200, 1900, 1900])
    page = make_report([read_run(run)], VideoLimits(0))
    shown = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    assert page.count('<figure class="chart">') == len(shown)
    titles = page.split('<section id="machines">')[1].split("<figcaption>")[1:6]
    assert [title.startswith(chart) for title, chart in zip(titles, charts, strict=True)] == [True] * 5

    (tmp_path / "new").mkdir()
    before = set(tmp_path.glob("**/*"))
    assert main(["doctor", str(tmp_path), "--every", "60", "--disk_mib", "1"]) == 2  # measures no disk
    assert main(["doctor", "--every", "60", "--output_dir", str(tmp_path / "new")]) == 130  # no run has begun there
    assert set(tmp_path.glob("**/*")) == before


def test_machines_that_do_not_answer_are_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, connect, hosts = tmp_path / "count", tmp_path / "connect", tmp_path / "hosts"
    connect.write_text(CONNECT.replace("{count}", str(count)))
    connect.chmod(0o755)
    hosts.write_text("good\nodd\ngone\n")
    count.write_text("1")
    counts = ["4"]

    def sleep(_: float) -> None:
        if not counts:
            raise KeyboardInterrupt
        count.write_text(counts.pop())

    namespace = SimpleNamespace(time=time.time, sleep=sleep, monotonic=time.monotonic, strftime=time.strftime)
    monkeypatch.setattr("finetrainers.cli.doctor.time", namespace)
    run = run_directory(tmp_path / "run", time.time() - 5)
    command = ["doctor", str(run), "--hosts", str(hosts), "--rsh", str(connect), "--timeout", "20", "--every", "60"]
    assert main(command) == 130
    said, _ = capsys.readouterr()
    assert "\x1b" not in said
    assert "\x07" not in said
    assert said.count("1 of 3 machines  10 W") == 2
    assert said.count("  odd: no answer: ") == said.count("  gone: no answer: ") == 2
    assert r"good: \x07rings, m\x1b[2J/1 symbol_error +3" in said
    found = health_of(read_run(run))
    assert found is not None
    assert [(host, readings) for host, readings, _ in found.silent] == [("odd", 2), ("gone", 2)]
    assert [(host, by) for host, _, by, _ in found.rises] == [("good", "3")]


def test_a_machine_answers_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on the other machine, and the report of this one with its counters."""
    machine = Machine(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO("health\n"))
    assert main(["doctor", "--answer"]) == 0
    answer = json.loads(capsys.readouterr().out.removeprefix("finetrainers-doctor "))
    assert answer["ports"] == {"mlx5_0/1": {"active": 1, "symbol_error": 3, "local_ack_timeout_err": 0}}
    assert [gpu["corrected_errors"] for gpu in answer["gpus"]] == [5, None]
    monkeypatch.setattr("finetrainers.tools.doctor.facts.torch_facts", dict)
    machine.now(retries=7, uncorrected=0)
    main(["doctor", "--disk_mib", "0", "--output_dir", str(tmp_path)])
    report = capsys.readouterr().out
    rows = dict(line.split("  ", 1) for line in report.split("\n\n")[0].splitlines())
    assert {name: rows[name].strip() for name in ("slowest clock", "ECC errors", "link errors")} == {
        "slowest clock": "1900 of 1980 MHz", "ECC errors": "5 + 0", "link errors": "3",
    }  # fmt: skip
    assert "mlx5_0/1 (3)" in report.partition("notes:")[2]
