"""What the facts of machines are judged to be: limits, disks, memory errors, differences from most."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetrainers.tools.doctor.columns import clock
from finetrainers.tools.doctor.disk import disk_facts
from finetrainers.tools.doctor.findings import Needs, findings
from finetrainers.tools.doctor.hosts import Node
from finetrainers.tools.doctor.table import report_lines
from finetrainers.utils.nvidia_smi import gpu_facts

GIB = 1 << 30
GPU = {"index": 3.0, "name": "NVIDIA H100", "memory_used_mib": 10.0, "temperature_c": 60.0, "memory_errors": None}
FACTS = {"torch": "2.9.1", "torch_gpus": 1, "gpus": [GPU], "driver": "570", "open_files": 65536, "memlock": -1,
         "shm": 16 * GIB, "disk_path": "/runs", "disk_free": 100 * GIB, "disk_write": 2.0 * GIB}  # fmt: skip


def node(
    host: str = "a", *, slots: int | None = None, skew: float | None = None, trip: float = 0.01, **facts: Any
) -> Node:
    return Node(host, slots, {**FACTS, **facts}, clock_skew_s=skew, round_trip_s=trip)


def told(*nodes: Node, needs: Needs | None = None) -> list[tuple[str, str, bool]]:
    return [(one.host, one.text, one.is_problem) for one in findings(nodes, needs)]


@pytest.mark.parametrize(
    ("machine", "said", "is_problem"),
    [
        (node(gpus=[], torch_gpus=0), "no GPU;.* CPU", False),
        (node(slots=2), "1 GPU, .*slots=2;", True),
        (node(gpus=[], gpu_error="nvidia-smi is late"), "nvidia-smi is late; ", True),
        (node(torch_gpus=0), "torch .*0 of 1 GPU; .*CUDA_VISIBLE_DEVICES", False),
        (node(torch_gpus=0, torch_problem="driver 470"), "driver 470", True),
        (node(gpus=[{**GPU, "memory_errors": 1.0}]), "GPU 3 .* 1 .*memory errors", True),
        (node(gpus=[{**GPU, "temperature_c": 90.0}]), "GPU 3 .* 90 C", False),
        (node(gpus=[{**GPU, "memory_used_mib": 2048.0}]), "2 GiB .*GPU 3", False),
        (node(version_problem="peft 0.1"), "peft 0.1", True),
        (node(open_files=1024), ".* 1024; .*`ulimit", False),
        (node(open_files=1023), ".* 1023; .*`ulimit", True),
        (node(shm=64 << 20), "/dev/shm .*64 MiB", True),
        (node(memlock=1 << 20, ib_ports=2, ib_active=2), "1 MiB .*InfiniBand", True),
        (node(disk_error="/runs: read-only"), "/runs: read-only; ", True),
        (node(disk_free=GIB), "/runs .*1 GiB .*20 GiB", True),
        (node(disk_write=GIB / 8), ".*10 GiB .*80 s; --async_checkpointing", False),
        (node(skew=-2.0), ".*clock .*2 s behind", True),
    ],
)
def test_a_machine(machine: Node, said: str, is_problem: bool) -> None:
    [(_, text, found)] = told(machine, needs=Needs(10 * GIB, 20 * GIB))
    assert re.match(said, text), text
    assert found is is_problem


def test_what_is_in_order_is_not_told() -> None:
    needs = Needs(10 * GIB, 20 * GIB)
    assert told(node(slots=1, skew=0.5), node("b", memlock=-1, open_files=-1), needs=needs) == []
    assert told(node(memlock=1 << 20)) == []  # without InfiniBand
    assert told(node(skew=1.5, trip=2.0)) == []  # it may be 0.5 s


def test_the_minority_differs_and_is_marked() -> None:
    machines = [node("a", torch="2.8.0"), node("b"), node("c", disk_write=GIB / 2), Node("d", error="gone")]
    (host, text, is_problem), gone, (slow, speed, is_slow_problem) = told(*machines)
    assert (host, text.partition(";")[0], is_problem) == ("a", "torch: 2.8.0, elsewhere 2.9.1", True)
    assert gone == ("d", "gone", True)
    assert (slow, is_slow_problem) == ("c", False)
    assert re.search("512 MiB/s, .*2 GiB/s", speed)
    lines = list(report_lines(machines, [], None, width=80))
    marked = {line.split()[0]: "*" in line for line in lines if line[:3] in ("a  ", "b  ", "c  ", "d  ")}
    assert marked == {"a": True, "b": False, "c": False, "d": False}
    # Where no majority is, the first machine's counts; what is broken is told once.
    [(host, text, _)] = told(node("a", python="3.11"), node("b", python="3.12"))
    assert (host, text.partition(";")[0]) == ("b", "python: 3.12, elsewhere 3.11")
    assert [host for host, *_ in told(node("a", torch_error="no libcudart"), node("b"))] == ["a"]
    # A package that one machine lacks.
    assert told(node("a"), node("b"), node("c", peft="0.18"))[0][1].startswith("peft: 0.18, elsewhere -")
    assert [clock(node(skew=skew)) for skew in (None, 0.0001, -0.0001, 0.0124, -90.0)] == [
        "-", "0 ms", "0 ms", "+12 ms", "-90.0 s",
    ]  # fmt: skip


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = disk_facts(tmp_path / "not" / "yet", 3)
    assert found["disk_path"] == str(tmp_path)
    assert min(found["disk_write"], found["disk_read"]) > 0
    assert list(tmp_path.iterdir()) == []
    assert "disk_write" not in disk_facts(tmp_path, 0)
    assert "too full" in disk_facts(tmp_path, 1 << 40)["disk_error"]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=GIB, total=GIB))
    assert disk_facts(Path("/proc"), 1)["disk_error"].startswith("/proc ")


def test_an_nvidia_smi_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetrainers.utils.nvidia_smi._TIMEOUT_S", 0.5)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    smi = tmp_path / "nvidia-smi"
    for script, said in (
        (
            "echo; echo Failed to initialize NVML: Driver/library version mismatch; exit 18",
            "exit code 18: Failed to init",
        ),
        ("exec sleep 60", "not answer in 0.5 s"),
    ):
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
        assert said in gpu_facts()["gpu_error"]
    smi.write_text("not a program")
    assert "Exec format error" in gpu_facts()["gpu_error"]
    smi.unlink()
    monkeypatch.setattr("finetrainers.utils.nvidia_smi.has_nvidia_driver", lambda: True)
    assert "installed" in gpu_facts()["gpu_error"]
