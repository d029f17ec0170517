"""Power, temperature and load of GPUs, and traffic, in metrics: by NVML and nvidia-smi, of several processes."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from finetrainers.parallel import hardware
from finetrainers.parallel.hardware import GpuReader, HardwareMonitor, Reading, combine_readings, hardware_monitor
from finetrainers.utils.network import Traffic

NAMES = ["gpu_power_w", "gpu_temperature_c", "gpu_utilization_percent"]
SMI = """#!/bin/sh
test "$3" = --id=GPU-of-1 || { echo "No devices were found: $3"; exit 6; }
echo "5, NVIDIA H100 80GB HBM3, 570.86.15, 81559, 412, 97, 512.34, 700.00, 61, 0, 0, 1980, 1980"
"""
MIB = 2**20


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`smi(text)`: the nvidia-smi of a machine without NVML's package."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def missing(_: int) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    for name in ("power_draw", "temperature", "utilization"):
        monkeypatch.setattr(torch.cuda, name, missing)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"of-{index}"))

    def install(text: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(text)
        path.chmod(0o755)

    return install


def test_a_gpu_by_nvidia_smi(smi: Callable[[str], None]) -> None:
    smi(SMI)
    read = GpuReader(1)
    assert read() == read() == Reading(dict(zip(NAMES, (512.34, 61.0, 97.0), strict=True)))
    assert re.match(r"nvidia-smi .* 6: No devices", GpuReader(2)().problems["gpu_power_w"])
    smi(SMI.replace("512.34", "[N/A]"))
    assert read().problems.keys() == {"gpu_power_w"}
    assert read().values.keys() == {"gpu_temperature_c", "gpu_utilization_percent"}


def test_a_machine_without_either(smi: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = GpuReader(0)()
    assert not found.values
    assert list(found.problems) == NAMES
    assert re.search("PATH.*nvidia-ml-py", found.problems["gpu_power_w"])


def test_a_gpu_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own functions, above a stand-in for NVML's package: a machine with four GPUs, two visible to the run."""

    class NVMLError_DriverNotLoaded(Exception):
        pass

    def utilization(handle: int) -> Any:
        raise RuntimeError("Not Supported") if handle == 3 else None

    nvml = ModuleType("pynvml")
    vars(nvml).update(
        NVMLError_DriverNotLoaded=NVMLError_DriverNotLoaded, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetPowerUsage=lambda handle: 100_000 * handle + 250,
        nvmlDeviceGetTemperature=lambda handle, sensor: 40 + handle, nvmlDeviceGetUtilizationRates=utilization,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "pynvml", nvml, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    reading = GpuReader(1)()
    assert reading.values == pytest.approx({"gpu_power_w": 300.25, "gpu_temperature_c": 43})
    assert reading.problems == {"gpu_utilization_percent": "Not Supported"}


class Group:
    """Processes as threads: `max_on_host` is the greatest of each number, once all have told theirs."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.told = size, threading.Barrier(size), [[0]] * size

    def rank(self, rank: int) -> Any:
        def max_on_host(values: Sequence[int]) -> list[int]:
            assert all(isinstance(value, int) for value in values)
            self.told[rank] = list(values)
            self.barrier.wait(10)
            found = [max(column) for column in zip(*self.told, strict=True)]
            self.barrier.wait(10)
            return found

        return SimpleNamespace(rank=rank, world_size=self.size, max_on_host=max_on_host)


def readings(*values: tuple[float, float, float]) -> Callable[[], Reading]:
    told = iter(values)
    return lambda: Reading(dict(zip(NAMES, next(told), strict=True)))


def traffic(*sent: int) -> Callable[[], Traffic]:
    told = iter(sent)
    return lambda: Traffic({("ethernet_sent", "eno1"): next(told) * MIB})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: now.s)
    return now


def test_one_process_between_two_records(clock: SimpleNamespace) -> None:
    monitor = HardwareMonitor(
        Group(1).rank(0),
        read_gpu=readings((500, 60, 90), (510, 64, 80), (520, 62, 100), (100, 40, 0)),
        read_network=traffic(1000, 1030, 1050, 1054),
    )
    assert monitor.take_record() == {}  # nothing has been read
    for _ in range(3):
        monitor.read_once()
        clock.s += 5
    expected = {"gpu_power_w": 510, "gpu_temperature_c": 64, "gpu_utilization_percent": 90}
    assert monitor.take_record() == expected | {
        "network_mib_per_s/ethernet_sent": 5.0
    }  # 50 MiB between readings 10 s apart
    assert monitor.take_record() == expected | {"network_mib_per_s/ethernet_sent": 5.0}, "no reading is newer"
    clock.s += 1  # 6 s after the third reading
    monitor.read_once()
    expected = {"gpu_power_w": 100, "gpu_temperature_c": 40, "gpu_utilization_percent": 0}
    assert monitor.take_record() == expected | {"network_mib_per_s/ethernet_sent": pytest.approx(4 / 6, abs=1e-3)}


def test_processes_of_two_machines(clock: SimpleNamespace) -> None:
    """Two on each; the first of each reads the traffic."""
    group = Group(4)
    own = [(500.5, 60, 90), (400.25, 70, 80), (600, 80, 100), (300, 50, 10)]
    monitors = [
        HardwareMonitor(
            group.rank(rank), read_gpu=readings(own[rank], own[rank]),
            read_network=traffic(0, 10 + rank) if rank % 2 == 0 else None,
        )
        for rank in range(4)
    ]  # fmt: skip
    for monitor in monitors:
        monitor.read_once()
    clock.s += 1
    for monitor in monitors:
        monitor.read_once()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(HardwareMonitor.take_record, monitors))
    assert found[0] == found[1] == found[2] == found[3]
    each = {f"{name}/rank_{rank}": own[rank][place] for place, name in enumerate(NAMES) for rank in range(4)}
    assert found[0] == each | {
        "gpu_power_w": 450.1875, "gpu_power_w/sum": 1800.75, "gpu_temperature_c": 80, "gpu_utilization_percent": 70,
        "gpu_utilization_percent/min": 10, "network_mib_per_s/ethernet_sent": 11,
        "network_mib_per_s/ethernet_sent_max": 12,
    }  # fmt: skip


def test_what_a_process_does_not_know_is_in_no_sum() -> None:
    found = combine_readings({"gpu_power_w": {0: 500.0, 2: 300.0}, "gpu_temperature_c": {}}, processes=3)
    assert found == {"gpu_power_w": 400, "gpu_power_w/rank_0": 500, "gpu_power_w/rank_2": 300}
    many = combine_readings({"gpu_power_w": dict.fromkeys(range(65), 100.0)}, processes=65)
    assert many == {"gpu_power_w": 100, "gpu_power_w/sum": 6500}


def test_only_cuda_has_a_monitor() -> None:
    assert hardware_monitor(SimpleNamespace(device=torch.device("cpu"))) is None  # type: ignore[arg-type]


def test_which_process_reads_what(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = SimpleNamespace(device=torch.device("cuda", 3))
    for local_rank, read_network in (("0", True), ("3", False)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        monitor = hardware_monitor(ranks)
        assert monitor is not None
        assert (monitor.read_network is not None) == read_network
        assert isinstance(monitor.read_gpu, GpuReader)
        assert monitor.read_gpu.index == 3


def test_a_run_records_what_was_read_and_survives_the_rest(
    options: Callable[..., dict],
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read, states = threading.Event(), iter(("fine", "no power"))

    def gpu() -> Reading:
        state = next(states, "lost")
        if state == "lost":
            read.set()
            raise OSError("lost")
        known = {"gpu_power_w": 512.5} if state == "fine" else {}
        problems = {} if known else {"gpu_power_w": "Not Supported"}
        return Reading({**known, "gpu_temperature_c": 61.0, "gpu_utilization_percent": 97.0}, problems)

    def network() -> Traffic:
        raise PermissionError("/proc/net/dev")

    def monitor(ranks: Any) -> HardwareMonitor:
        made = HardwareMonitor(ranks, read_gpu=gpu, read_network=network)
        made.read_once()  # as if the first reading had come before the first step's end
        record = made.take_record
        made.take_record = lambda: read.wait(60) and record()  # type: ignore[method-assign, return-value]
        return made

    monkeypatch.setattr("finetrainers.training.trainer.hardware_monitor", monitor)
    monkeypatch.setattr(hardware, "_PERIOD_S", 0.0)
    with caplog.at_level(logging.WARNING, logger="finetrainers.parallel.hardware"):
        done = run(**options(train_steps=2))
    assert done.curve(*NAMES) == [(1, 512.5, 61.0, 97.0), (2, 512.5, 61.0, 97.0)]
    assert not any(thread.name == "hardware" for thread in threading.enumerate())
    assert [record.args for record in caplog.records if record.name == "finetrainers.parallel.hardware"] == [
        (0, "network", "PermissionError: /proc/net/dev"),
        (0, "gpu_power_w", "Not Supported"),
        (0, "gpu_temperature_c, gpu_utilization_percent", "OSError: lost"),
    ]
    page = (done.root / "report.html").read_text()
    assert "GPU power" in page
    assert "512 W" in page
    assert "hottest 61 C, utilization 97 %" in page
