"""Power, temperature and load of the GPU of each process, and the network traffic of each machine, for metrics."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from finetrainers.utils.launch import launched_local_rank
from finetrainers.utils.network import DIRECTIONS, Traffic, bytes_per_s, read_traffic
from finetrainers.utils.nvidia_smi import gpu_facts

from .ranks import DistributedContext

logger = logging.getLogger(__name__)

POWER, TEMPERATURE, LOAD = "gpu_power_w", "gpu_temperature_c", "gpu_utilization_percent"
_NETWORK_METRICS = {direction: f"network_mib_per_s/{direction}" for direction in DIRECTIONS}
#: All metrics of one process, in the order in which the processes exchange them.
_METRICS = (POWER, TEMPERATURE, LOAD, *_NETWORK_METRICS.values())
#: torch's functions for these metrics, by NVML, and the unit of each; and nvidia-smi's names (`utils.nvidia_smi`).
_NVML = {POWER: ("power_draw", 1e-3), TEMPERATURE: ("temperature", 1.0), LOAD: ("utilization", 1.0)}
_SMI = {POWER: "power_w", TEMPERATURE: "temperature_c", LOAD: "utilization"}
_MIB = 2**20
#: Minimum seconds between readings, and minimum multiple of the time of a reading: nvidia-smi takes a second of a CPU.
_PERIOD_S, _PERIOD_FACTOR = 1.0, 50
#: Seconds that the end of training waits for a reading. A GPU that has fallen off the bus does not answer.
_JOIN_TIMEOUT_S = 2.0
#: Maximum number of processes whose metrics are also recorded one by one.
_MAX_LOGGED_RANKS = 64
#: Processes exchange integers: thousandths, and this for unknown values.
_UNKNOWN = -1


@dataclass
class Reading:
    """Current readings of a GPU.

    Attributes:
        values: by name: watts, degrees Celsius, percent.
        problems: the reason for each missing name.
    """

    values: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


@dataclass
class GpuReader:
    """Reader of a GPU, by NVML if its package is installed (nvidia-ml-py), else by nvidia-smi.

    Neither waits for the GPU's work.

    Attributes:
        index: of the GPU, as torch counts.
    """

    index: int
    _has_nvml = torch.version.hip is None

    def __call__(self) -> Reading:
        """Read the GPU."""
        if self._has_nvml:
            try:
                return self._read_nvml()
            except ModuleNotFoundError:
                self._has_nvml = False
        # nvidia-smi also counts GPUs that CUDA_VISIBLE_DEVICES hides.
        facts = gpu_facts(only=f"GPU-{torch.cuda.get_device_properties(self.index).uuid}")
        if not facts["gpus"]:
            reason = facts.get("gpu_error", "nvidia-smi is not installed, or not in PATH")
            return Reading(problems=dict.fromkeys(_SMI, f"{reason}. `pip install nvidia-ml-py` works without it"))
        values = {name: facts["gpus"][0][column] for name, column in _SMI.items()}
        return Reading(
            {name: value for name, value in values.items() if value is not None},
            {name: "nvidia-smi does not report it" for name, value in values.items() if value is None},
        )

    def _read_nvml(self) -> Reading:
        reading = Reading()
        for name, (function, unit) in _NVML.items():
            try:
                reading.values[name] = unit * getattr(torch.cuda, function)(self.index)
            except ModuleNotFoundError:
                raise
            except Exception as error:  # NVML's own cannot be named without its package
                reading.problems[name] = str(error) or type(error).__name__
        return reading


@dataclass
class HardwareMonitor:
    """Monitor that reads once a second in a thread, so that no step waits; `take_record` returns the newest readings.

    Attributes:
        ranks: the processes; each has a monitor.
        read_gpu: reads the GPU of this process.
        read_network: reads this machine's traffic; None for all but one process of each machine.
    """

    ranks: DistributedContext
    read_gpu: Callable[[], Reading]
    read_network: Callable[[], Traffic] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # Readings since the last record, or those of the last record if there are none.
        self._gpu_readings: dict[str, list[float]] = {}
        self._is_recorded = False
        self._logged_traffic: tuple[float, Traffic] | None = None  # at the last record, with its time
        self._traffic: tuple[float, Traffic] | None = None
        self._rates: dict[str, float] = {}
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Read within the block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="hardware", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_JOIN_TIMEOUT_S)

    def _watch(self, ended: threading.Event) -> None:
        took_s = 0.0
        while True:
            started = time.perf_counter()
            self.read_once()
            took_s = time.perf_counter() - started
            if ended.wait(max(_PERIOD_S, _PERIOD_FACTOR * took_s)):
                return

    def read_once(self) -> None:
        """Read once. A value that cannot be read is logged once, and training goes on."""
        try:
            reading = self.read_gpu()
        except Exception as error:  # whatever a driver may do
            reading = Reading(problems=dict.fromkeys(_SMI, f"{type(error).__name__}: {error}"))
        problems = dict(reading.problems)
        with self._lock:
            if self._is_recorded and reading.values:
                self._gpu_readings, self._is_recorded = {}, False
            for name, value in reading.values.items():
                self._gpu_readings.setdefault(name, []).append(value)
        if self.read_network is not None:
            try:
                traffic = self.read_network()
            except Exception as error:
                traffic = Traffic({}, f"{type(error).__name__}: {error}")
            if traffic.problem:
                problems["network"] = traffic.problem
            with self._lock:
                self._traffic = time.perf_counter(), traffic
                self._logged_traffic = self._logged_traffic or self._traffic
        self._warn(problems)

    def _warn(self, problems: Mapping[str, str]) -> None:
        new = {name: reason for name, reason in problems.items() if name not in self._warned}
        self._warned |= new.keys()
        for reason in dict.fromkeys(new.values()):
            names = ", ".join(name for name in new if new[name] == reason)
            logger.warning("rank %d: no metrics of %s: %s", self.ranks.rank, names, reason)

    def take_record(self) -> dict[str, float]:
        """Return the metrics of all processes since the last record; every process must call it.

        They are empty before the first reading. If nothing was read since the last record, its metrics are repeated.

        Returns:
            `gpu_power_w` (mean of the processes), `gpu_temperature_c` (greatest), `gpu_utilization_percent` (mean) and
            `network_mib_per_s/...` (mean of the machines); of several processes more, see `combine_readings`.
        """
        with self._lock:
            local = self._take_local()
        size, start = len(_METRICS), self.ranks.rank * len(_METRICS)
        thousandths = [_UNKNOWN] * size * self.ranks.world_size
        thousandths[start : start + size] = [
            round(1000 * local[name]) if name in local else _UNKNOWN for name in _METRICS
        ]
        thousandths = self.ranks.max_on_host(thousandths)
        return combine_readings(
            {
                name: {rank: value / 1000 for rank, value in enumerate(thousandths[index::size]) if value != _UNKNOWN}
                for index, name in enumerate(_METRICS)
            },
            processes=self.ranks.world_size,
        )

    def _take_local(self) -> dict[str, float]:
        """Return this process's numbers: means of the readings, the highest temperature, and rates of traffic."""
        if self._traffic is not None and self._logged_traffic is not None:
            (then, logged), (now, traffic) = self._logged_traffic, self._traffic
            if now > then:
                rates = bytes_per_s(logged, traffic, now - then)
                self._rates = {_NETWORK_METRICS[direction]: rate / _MIB for direction, rate in rates.items()}
                self._logged_traffic = self._traffic
        self._is_recorded = True
        gpu = {
            name: max(values) if name == TEMPERATURE else math.fsum(values) / len(values)
            for name, values in self._gpu_readings.items()
        }
        return gpu | self._rates


def combine_readings(values: Mapping[str, Mapping[int, float]], *, processes: int) -> dict[str, float]:
    """Return the numbers of all processes for a record.

    Args:
        values: by name and rank, of the ranks that know them.
        processes: how many there are.

    Returns:
        The mean of each name, or of temperatures the greatest. With several processes also the sum of the power, if all
        know theirs, the least utilization, and the number of each process (`/rank_N`). With several machines also the
        traffic of the busiest (`_max`).
    """
    record: dict[str, float] = {}
    for name, by_rank in values.items():
        numbers = list(by_rank.values())
        if not numbers:
            continue
        record[name] = max(numbers) if name == TEMPERATURE else math.fsum(numbers) / len(numbers)
        if name in _NETWORK_METRICS.values():
            record |= {f"{name}_max": max(numbers)} if len(numbers) > 1 else {}
        elif processes > 1:
            if name == POWER and len(numbers) == processes:
                record[f"{name}/sum"] = math.fsum(numbers)
            if name == LOAD:
                record[f"{name}/min"] = min(numbers)
            if processes <= _MAX_LOGGED_RANKS:
                record |= {f"{name}/rank_{rank}": value for rank, value in by_rank.items()}
    return {name: round(value, 4) for name, value in record.items()}


def hardware_monitor(ranks: DistributedContext) -> HardwareMonitor | None:
    """Return the monitor of a process that trains on CUDA, or None elsewhere."""
    if ranks.device.type != "cuda":
        return None
    index = torch.cuda.current_device() if ranks.device.index is None else ranks.device.index
    read_network = read_traffic if launched_local_rank() <= 0 else None
    return HardwareMonitor(ranks, read_gpu=GpuReader(index), read_network=read_network)
