"""Measured memory: a peak for each phase, the figures of a run, every process counted; what the host has left."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetrainers.memory import recorder as memory_recorder
from finetrainers.memory.recorder import FIGURES, MemoryRecorder, max_peaks
from finetrainers.utils import host_memory
from finetrainers.utils.host_memory import HostMemory, read_host_memory, take_peak_rss, workers_bytes
from finetrainers.utils.phases import CHECKPOINT, LOADING, REWARD, ROLLOUT, TRAINING_STEP, VALIDATION, phase

MIB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux resets the peak of a process")


def take(mib: int) -> None:
    """Take so much memory, and give it back."""
    bytearray(mib * MIB)


@linux
def test_each_phase_has_a_peak_of_its_own() -> None:
    recorder = MemoryRecorder(torch.device("cpu"))
    take(400)  # before the run
    with recorder.running():
        with phase(LOADING):
            take(200)
        with phase(TRAINING_STEP):
            take(20)
            with phase(ROLLOUT), phase(REWARD):
                take(100)
    gib = {name: peak["host"] for name, peak in recorder.peaks.items()}
    assert set(gib) == {LOADING, TRAINING_STEP, REWARD, ROLLOUT}
    assert 170 < 1024 * (gib[LOADING] - gib[TRAINING_STEP]) < 230
    assert 70 < 1024 * (gib[REWARD] - gib[TRAINING_STEP]) < 130
    assert all(set(peak) == {"host"} for peak in recorder.peaks.values())  # nothing is said about a GPU


def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A CUDA device of which the test says what is taken; its peaks are reset."""
    taken = {"allocated": 0, "reserved": 0}

    def stats(_: torch.device) -> dict[str, Any]:
        return {f"{name}_bytes": {"all": {"peak": gib * 2**30}} for name, gib in taken.items()}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: taken.update(allocated=1, reserved=2))
    monkeypatch.setattr(memory_recorder, "take_peak_rss", lambda: 3 * 2**30)
    return taken


def test_records_and_figures_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = device(monkeypatch)
    recorder = MemoryRecorder(torch.device("cuda"))
    assert recorder.highest_peak() is None
    with recorder.running():
        with phase(LOADING):
            taken.update(allocated=10, reserved=12)
            time.sleep(0.03)
        with phase(TRAINING_STEP):
            recorder.begin_training()
            taken.update(allocated=20, reserved=24)
            first = recorder.take_record()
            assert 0.02 < first.pop("phase_s/loading") < 5
            assert first == {  # the seconds of a training step are known already
                "memory/loading/allocated_gib": 10, "memory/loading/reserved_gib": 12, "memory/loading/host_gib": 3,
                "memory/training_step/allocated_gib": 20, "memory/training_step/reserved_gib": 24,
                "memory/training_step/host_gib": 3,
                "memory_before_training/allocated_gib": 10, "memory_before_training/reserved_gib": 12,
                "memory_before_training/host_gib": 3,
            }  # fmt: skip
            assert recorder.take_record()["memory/training_step/allocated_gib"] == 1  # its own peak
            assert recorder.take_validation_record(is_last=False) is None
            with phase(VALIDATION):
                taken.update(allocated=30, reserved=33)
                time.sleep(0.03)
            found = recorder.take_validation_record(is_last=False)
            assert found is not None
            assert found["memory_before_validation/reserved_gib"] == 24
            assert found["memory_after_validation/reserved_gib"] == 33
            assert found["phase_s/validation"] >= 0.03
            with phase(VALIDATION):
                taken.update(allocated=15, reserved=16)
            found = recorder.take_validation_record(is_last=True)
            assert found is not None
            assert found["memory_after_testing/allocated_gib"] == 15
            assert found["memory_after_validation/allocated_gib"] == 30
            with phase(CHECKPOINT):
                taken.update(allocated=21, reserved=40)
    assert recorder.highest_peak() == 30
    assert list(recorder.figures) == list(FIGURES)
    other = {LOADING: {"allocated": 11.0, "reserved": 11.0, "host": 5.0}, ROLLOUT: {"host": 1.0}}
    recorder.gather_peaks(SimpleNamespace(gather_objects=lambda mine: [*mine, other]))  # type: ignore[arg-type]
    assert recorder.all_peaks[LOADING] == {"allocated": 11, "reserved": 12, "host": 5}
    assert list(recorder.all_peaks)[1] == ROLLOUT
    assert recorder.all_peaks[CHECKPOINT]["reserved"] == 40
    assert max_peaks({"host": 1}, {"host": 2, "allocated": 3}) == {"host": 2, "allocated": 3}


def test_the_device_is_asked_for_nothing_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {})
    recorder = MemoryRecorder(torch.device("cuda"))
    with recorder.running(), phase(LOADING):
        pass
    assert set(recorder.peaks[LOADING]) == {"host"}


def test_workers_count_and_a_full_machine_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_recorder, "_PERIOD_S", 0.001)
    monkeypatch.setattr(memory_recorder, "workers_bytes", lambda: 2 * 2**30)
    monkeypatch.setattr(memory_recorder, "take_peak_rss", lambda: 2**30)
    left = [HostMemory(100, 50), HostMemory(100, 4), HostMemory(100, 3), HostMemory(100, 50), HostMemory(100, 2)]
    monkeypatch.setattr(memory_recorder, "read_host_memory", lambda: left.pop(0) if len(left) > 1 else left[0])
    told: list[HostMemory] = []
    recorder = MemoryRecorder(torch.device("cpu"))
    recorder.on_low_memory = told.append
    with recorder.running(), phase(LOADING):
        for _ in range(500):
            if len(told) == 2:
                break
            time.sleep(0.01)
    assert told == [HostMemory(100, 4), HostMemory(100, 2)]
    assert recorder.peaks[LOADING]["host"] == 3


@linux
def test_memory_of_this_process_and_of_its_children() -> None:
    take_peak_rss()
    before = take_peak_rss()
    take(100)
    assert 80 * MIB < take_peak_rss() - before < 130 * MIB
    assert take_peak_rss() - before < 20 * MIB
    code = "import sys; held = bytearray(50 * 2**20); print(flush=True); sys.stdin.read()"
    started = workers_bytes()
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 50 * MIB < workers_bytes() - started < 80 * MIB
        child.communicate()


_PEAKS = """
import os, sys
from finetrainers.utils.host_memory import take_peak_rss
MIB = 2**20
def mib(): return take_peak_rss() // MIB
def take(count): bytearray(count * MIB)
first = mib()
take(200)
read, write = os.pipe()
child = os.fork()
if not child:
    mib()
    take(100)
    os.write(write, str(mib()).encode())
    os._exit(0)
os.waitpid(child, 0)
print(first, mib(), mib(), int(os.read(read, 64)))
"""


@linux
def test_the_peak_is_of_this_process_alone() -> None:
    """Not of the one that started it, whose peak `getrusage` goes on saying, and not of one that it was forked from."""
    take(300)
    printed = subprocess.run([sys.executable, "-c", _PEAKS], capture_output=True, text=True, check=True).stdout
    first, taken, left, forked = map(int, printed.split())
    assert first < 200
    assert 150 < taken - first < 250
    assert abs(left - first) < 50
    assert 80 < forked - left < 130


@pytest.mark.parametrize(
    ("groups", "files", "total", "available"),
    [
        ("0::/job\n", {"job/memory.max": "1000", "job/memory.current": "700",
          "job/memory.stat": "inactive_file 200\n"}, 1000, 500),
        ("0::/job\n", {"job/memory.max": "max", "job/memory.current": "700", "job/memory.stat": ""}, None, None),
        # The limit of a group above this one; one of version 1; in a container, whose own group is the root.
        ("0::/a/b\n", {"a/memory.max": "900", "a/memory.current": "100", "a/memory.stat": "anon 3\n"}, 900, 800),
        ("4:cpu,memory:/x\n3:cpu:/\n", {"memory/x/memory.limit_in_bytes": "800",
          "memory/x/memory.usage_in_bytes": "900", "memory/x/memory.stat": "total_inactive_file 50\n"}, 800, 0),
        ("4:memory:/docker/1f\n", {"memory/memory.limit_in_bytes": "800", "memory/memory.usage_in_bytes": "300",
          "memory/memory.stat": "cache 1\n"}, 800, 500),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "300",
          "memory/memory.stat": ""}, None, None),
    ],
)  # fmt: skip
def test_what_the_container_has_left(
    groups: str, files: dict[str, str], total: int | None, available: int | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = read_host_memory(tmp_path)
    if total is None:
        assert (found.total, found.limited_by) == (host_memory.psutil.virtual_memory().total, "machine")
    else:
        assert found == HostMemory(total, available or 0, "container")
    assert read_host_memory(tmp_path / "nothing").limited_by == "machine"
