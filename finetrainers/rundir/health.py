"""Readings of machines while a run trains: power, clocks, temperatures, ECC and InfiniBand counters. Imports no torch.

A run's `health.jsonl` has one JSON object per machine and reading, see `reading`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from finetrainers.utils.nvidia_smi import gpu_facts
from finetrainers.utils.text import plural

#: The file of a run directory that readings are appended to.
HEALTH = "health.jsonl"
_INFINIBAND = Path("/sys/class/infiniband")
#: Counters of a port that count what should not happen, in `counters` and, as drivers name them, in `hw_counters`.
_ERRORS = frozenset((
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_rcv_constraint_errors", "port_xmit_constraint_errors", "port_xmit_discards",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "VL15_dropped",
    "out_of_buffer", "out_of_sequence", "packet_seq_err", "duplicate_request", "implied_nak_seq_err",
    "local_ack_timeout_err", "rnr_nak_retry_err", "rx_icrc_encapsulated", "req_cqe_error", "resp_cqe_error",
    "roce_slow_restart", "roce_adp_retrans", "roce_adp_retrans_to",
))  # fmt: skip
#: Those of a bad cable, connector or port; the others also count congestion.
_LINK_ERRORS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
_GPU_NUMBERS = ("index", "power_w", "temperature_c", "clock_mhz", "utilization", "memory_errors", "corrected_errors")
_GPU_COUNTERS = {"memory_errors": "uncorrected memory errors", "corrected_errors": "corrected memory errors"}


def port_facts() -> dict[str, dict[str, int]]:
    """Return the error counters of each InfiniBand or RoCE port, and whether it is active, by `mlx5_0/1`."""
    ports: dict[str, dict[str, int]] = {}
    for state in sorted(_INFINIBAND.glob("*/ports/*/state")):
        port = state.parent
        try:
            counters = {"active": int("ACTIVE" in state.read_text(encoding="ascii"))}
        except (OSError, ValueError):  # the adapter was removed or is being reset
            continue
        for path in sorted([*port.glob("counters/*"), *port.glob("hw_counters/*")]):
            if path.name in _ERRORS:
                try:
                    counters[path.name] = int(path.read_text(encoding="ascii"))
                except (OSError, ValueError):  # some counters exist, but are not supported by the port
                    continue
        ports[f"{port.parent.parent.name}/{port.name}"] = counters
    return ports


def health_facts() -> dict[str, Any]:
    """Return the facts that are read of a machine repeatedly: they need no disk, no GPU work and no import of torch."""
    return {**gpu_facts(), "ports": port_facts()}


def link_errors(facts: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of errors of each port that has some, counting only those of a cable, connector or port."""
    sums = {name: sum(port.get(error, 0) for error in _LINK_ERRORS) for name, port in facts.get("ports", {}).items()}
    return {name: count for name, count in sums.items() if count}


def reading(host: str, facts: Mapping[str, Any] | None, when: float, *, error: str | None = None) -> dict[str, Any]:
    """Return the record of a machine: numbers of its GPUs and ports, or `error`, why there are none.

    Values of a type that is not expected are left out: the answer comes from another machine.

    Args:
        host: name of the machine.
        facts: as `health_facts` returns them, or None if there are none.
        when: the time, in seconds since the epoch.
        error: why there are no facts.
    """
    record: dict[str, Any] = {"time": round(when, 3), "host": host}
    if facts is None:
        return {**record, "error": error or "no answer"}
    gpus, ports = facts.get("gpus"), facts.get("ports")
    gpus = (
        [_finite_numbers(gpu, _GPU_NUMBERS) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    )
    ports = ports if isinstance(ports, dict) else {}
    record["gpus"] = [gpu for gpu in gpus if "index" in gpu]
    record["ports"] = {name: _finite_numbers(port, port) for name, port in ports.items() if isinstance(port, dict)}
    if facts.get("gpu_error"):
        record["gpu_error"] = str(facts["gpu_error"])
    return record


def _finite_numbers(values: Mapping[str, Any], names: Any) -> dict[str, float]:
    numbers = {name: values.get(name) for name in names}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float) and isfinite(value)}


def read_counters(record: Mapping[str, Any]) -> dict[str, float]:
    """Return all counters of a record by a readable name; a port that is down counts as one."""
    counters = {}
    for gpu in record.get("gpus", ()):
        for name, label in _GPU_COUNTERS.items():
            if name in gpu:
                counters[f"GPU {gpu['index']:.0f} {label}"] = gpu[name]
    for port, values in record.get("ports", {}).items():
        if "active" in values:
            counters[f"{port} down"] = 1 - values["active"]
        counters |= {f"{port} {name}": value for name, value in values.items() if name in _ERRORS}
    return counters


class Rises:
    """Increases of a machine's counters between readings. A counter that fell was reset, and counts from there."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}

    def of(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return by how much each counter rose since the machine's last answer."""
        host, now = record["host"], read_counters(record)
        before = self._last.get(host, {})
        self._last[host] = {**before, **now}
        return {name: value - before[name] for name, value in now.items() if name in before and value > before[name]}


def round_lines(records: Sequence[Mapping[str, Any]], rises: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield a line about all machines of a reading, and one for each with a risen counter, a failure or no answer."""
    answers = [record for record in records if "error" not in record]
    gpus = [(record["host"], gpu) for record in answers for gpu in record["gpus"]]
    fields = [f"{len(answers)} of {plural(len(records), 'machine')}"]
    if watts := [gpu["power_w"] for _, gpu in gpus if "power_w" in gpu]:
        fields.append(f"{sum(watts):.0f} W")
    for name, choose, form in (("temperature_c", max, "hottest {:.0f} C"), ("clock_mhz", min, "slowest {:.0f} MHz")):
        measured = [(host, gpu) for host, gpu in gpus if name in gpu]
        if measured:
            host, gpu = choose(measured, key=lambda pair: pair[1][name])
            fields.append(f"{form.format(gpu[name])} ({host} GPU {gpu['index']:.0f})")
    yield "  ".join(fields)
    for record, risen in zip(records, rises, strict=True):
        notes = [f"no answer: {record['error']}"] if "error" in record else []
        notes += [record["gpu_error"]] if "gpu_error" in record else []
        notes += [f"{name} +{by:.0f}" for name, by in risen.items()]
        if notes:
            yield f"  {record['host']}: {', '.join(notes)}"
