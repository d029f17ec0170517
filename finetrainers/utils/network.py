"""Network traffic of this machine: bytes sent and received by Ethernet interfaces and InfiniBand ports. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Directions of a machine's traffic.
DIRECTIONS = ("ethernet_sent", "ethernet_received", "infiniband_sent", "infiniband_received")
_SYS = Path("/sys/class")
#: Linux's numbers of interface types (`if_arp.h`).
_INFINIBAND, _LOOPBACK = "32", "772"
#: Bytes of a word, the unit of an InfiniBand port's counters.
_WORD = 4
_COUNTERS = {"infiniband_sent": "port_xmit_data", "infiniband_received": "port_rcv_data"}


@dataclass(frozen=True)
class Traffic:
    """Bytes since the machine was started.

    Attributes:
        counted: by direction (see `DIRECTIONS`) and interface or port.
        problem: why some counters cannot be read; empty if all can.
    """

    counted: Mapping[tuple[str, str], int]
    problem: str = ""


def read_traffic(sys: Path = _SYS) -> Traffic:
    """Return the traffic until now, of the whole machine, whichever program sends and receives.

    Args:
        sys: where `net` and `infiniband` are.
    """
    counted: dict[tuple[str, str], int] = {}
    ports, missing = sorted(sys.glob("infiniband/*/ports/*")), []
    for port in ports:
        name = f"{port.parts[-3]}:{port.name}"
        for direction, counter in _COUNTERS.items():
            try:
                words = int((port / "counters" / counter).read_text(encoding="ascii"))
            except (OSError, ValueError):
                missing.append(name)
                continue
            counted[direction, name] = _WORD * words
    interfaces = psutil.net_io_counters(pernic=True)
    for name in ethernet(interfaces, sys):
        counted["ethernet_sent", name] = interfaces[name].bytes_sent
        counted["ethernet_received", name] = interfaces[name].bytes_recv
    problem = f"counters of InfiniBand ports cannot be read: {', '.join(dict.fromkeys(missing))}" if missing else ""
    return Traffic(counted, problem)


def ethernet(names: Iterable[str], sys: Path = _SYS) -> list[str]:
    """Return the hardware interfaces, so that traffic over a bridge or a bond counts once.

    In a container no interface may be hardware; then all count. Loopback is excluded, and so is IP over InfiniBand,
    which the port counts.
    """
    external = [
        name
        for name in names
        if (kind := _kind(name, sys)) not in (_INFINIBAND, _LOOPBACK) and (kind or not name.lower().startswith("lo"))
    ]
    return [name for name in external if (sys / "net" / name / "device").exists()] or external


def bytes_per_s(before: Traffic, now: Traffic, seconds: float) -> dict[str, float]:
    """Return bytes a second, by direction, for the counters that both readings have.

    Args:
        before: the earlier reading. A counter that has been reset since counts nothing.
        now: the later reading.
        seconds: between the two.
    """
    rates: dict[str, float] = {}
    for key, count in now.counted.items():
        if key in before.counted:
            rates[key[0]] = rates.get(key[0], 0.0) + max(0, count - before.counted[key]) / seconds
    return rates


def _kind(name: str, sys: Path) -> str:
    try:
        return (sys / "net" / name / "type").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # not Linux
