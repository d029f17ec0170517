"""What a GPU tells of its power, temperature and load: by NVML, by nvidia-smi, and in the records of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_devices import Run

from finetrainers.parallel.hardware import GpuReader, HardwareMonitor, hardware_monitor
from finetrainers.utils.nvidia_smi import gpu_facts
from finetrainers.utils.reading import read_jsonl

NAMES = {"gpu_power_w", "gpu_temperature_c", "gpu_utilization_percent"}
#: Of what a GPU can draw, sensors tell a little more now and then.
MOST_W, MOST_C = 1.1, 110

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None and find_spec("pynvml") is None, reason="nvidia-smi or nvidia-ml-py"
    ),
]


def monitor() -> HardwareMonitor:
    ranks: Any = SimpleNamespace(device=torch.device("cuda"), rank=0, world_size=1, max_on_host=list)
    found = hardware_monitor(ranks)
    assert found is not None
    return found


def test_readings_are_those_of_a_gpu() -> None:
    made = monitor()
    assert isinstance(made.read_gpu, GpuReader)
    ways = [made.read_gpu()]
    if shutil.which("nvidia-smi") is not None:
        made.read_gpu._has_nvml = False
        ways.append(made.read_gpu())
        [gpu] = gpu_facts(only=f"GPU-{torch.cuda.get_device_properties(0).uuid}")["gpus"]
        assert torch.cuda.get_device_name() == gpu["name"]
        limit_w = gpu["power_limit_w"] or 2000
        assert all(0 < reading.values["gpu_power_w"] < MOST_W * limit_w for reading in ways)
        assert abs(ways[0].values["gpu_temperature_c"] - ways[-1].values["gpu_temperature_c"]) < 15
    for reading in ways:
        assert reading.values.keys() == NAMES, reading.problems
        assert 0 < reading.values["gpu_temperature_c"] < MOST_C
        assert 0 <= reading.values["gpu_utilization_percent"] <= 100


def test_reading_does_not_wait_for_the_gpu() -> None:
    made = monitor()
    made.read_once()  # starts NVML
    done = torch.cuda.Event()
    torch.cuda._sleep(10_000_000_000)  # cycles: about five seconds, more than nvidia-smi takes
    done.record()
    made.read_once()
    assert made.take_record().keys() >= NAMES
    assert not done.query(), "the GPU is still at work"
    torch.cuda.synchronize()


def test_a_run_records_them(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def read_at_once(ranks: Any) -> HardwareMonitor | None:
        found = hardware_monitor(ranks)
        assert found is not None
        found.read_once()  # three small steps may end before the thread has read
        return found

    monkeypatch.setattr("finetrainers.training.trainer.hardware_monitor", read_at_once)
    done = start("cuda")
    records = [record for record in read_jsonl(done.root / "metrics.jsonl")[0] if "loss" in record]
    assert records
    assert all(record.keys() >= NAMES for record in records)
