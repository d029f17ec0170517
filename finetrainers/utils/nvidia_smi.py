"""GPUs of this machine from nvidia-smi: names, memory, load, power, temperature, memory errors. Imports no torch."""

from __future__ import annotations

import csv
import shutil
import subprocess
from typing import Any

from finetrainers.utils.device import has_nvidia_driver

#: Columns of nvidia-smi by the names of this package. Every driver of the last years has them; one missing column makes
#: the query fail.
_QUERY = {
    "index": "index",
    "name": "name",
    "driver": "driver_version",
    "memory_total_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "utilization": "utilization.gpu",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "memory_errors": "ecc.errors.uncorrected.volatile.total",
    "corrected_errors": "ecc.errors.corrected.volatile.total",
    "clock_mhz": "clocks.sm",
    "clock_max_mhz": "clocks.max.sm",
}
_TEXTS = {"name", "driver"}
#: Seconds; a GPU that has fallen off the bus makes nvidia-smi hang for minutes.
_TIMEOUT_S = 30


def gpu_facts(only: str | None = None) -> dict[str, Any]:
    """Return `gpus`, a list of facts of each, and `driver`; or `gpu_error`, why they are unknown; empty without a GPU.

    Args:
        only: UUID of a single GPU to query.
    """
    if shutil.which("nvidia-smi") is None:
        reason = "the NVIDIA driver is loaded, but nvidia-smi is not installed, or not in PATH"
        return {"gpus": [], **({"gpu_error": reason} if has_nvidia_driver() else {})}
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY.values())}", "--format=csv,noheader,nounits"]
    command += [] if only is None else [f"--id={only}"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"gpus": [], "gpu_error": f"nvidia-smi did not answer in {_TIMEOUT_S} s"}
    except OSError as error:
        return {"gpus": [], "gpu_error": f"nvidia-smi cannot be run: {error.strerror}"}
    if process.returncode:
        lines = (process.stdout + process.stderr).split("\n")
        reason = next((line.strip() for line in lines if line.strip()), "no reason was printed")
        return {"gpus": [], "gpu_error": f"nvidia-smi failed with exit code {process.returncode}: {reason}"}
    gpus = read_gpus(process.stdout)
    return {"gpus": gpus, **({"driver": gpus[0]["driver"]} if gpus else {})}


def read_gpus(text: str) -> list[dict[str, Any]]:
    """Return GPUs of nvidia-smi's table, one a line; values that a card does not report (`[N/A]`) are None.

    For example, consumer cards do not report memory errors.
    """
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [
        {name: value if name in _TEXTS else _parse_number(value) for name, value in zip(_QUERY, row, strict=True)}
        for row in rows
        if len(row) == len(_QUERY)
    ]


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
