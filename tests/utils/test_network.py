"""Which interfaces and ports of a machine count as its traffic, in which units."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from finetrainers.utils.network import bytes_per_s, ethernet, read_traffic

#: Names of interfaces, Linux's number of their kind, and whether they are hardware.
INTERFACES = {
    "lo": (772, False),
    "eno1": (1, True),
    "eno2": (1, True),
    "bond0": (1, False),
    "docker0": (1, False),
    "ib0": (32, True),
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a `/sys/class` with interfaces and two InfiniBand ports.

    Interface k, from 0, has sent 10**k bytes and received twice as many.
    """
    for name, (kind, is_hardware) in INTERFACES.items():
        folder = tmp_path / "net" / name
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
        if is_hardware:
            (folder / "device").mkdir()
    count(tmp_path, "mlx5_0/ports/1", sent=100, received=1000)
    count(tmp_path, "mlx5_1/ports/1", sent=7, received=70)
    counted = {
        name: SimpleNamespace(bytes_sent=10**k, bytes_recv=2 * 10**k) for k, name in enumerate([*INTERFACES, "tun0"])
    }
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: counted if pernic else pytest.fail("by interface"))
    return tmp_path


def count(sys: Path, port: str, *, sent: int, received: int) -> None:
    folder = sys / "infiniband" / port / "counters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "port_xmit_data").write_text(f"{sent}\n")
    (folder / "port_rcv_data").write_text(f"{received}\n")


def test_hardware_counts_once(machine: Path) -> None:
    assert read_traffic(machine).counted == {
        ("ethernet_sent", "eno1"): 10, ("ethernet_received", "eno1"): 20,
        ("ethernet_sent", "eno2"): 100, ("ethernet_received", "eno2"): 200,
        ("infiniband_sent", "mlx5_0:1"): 400, ("infiniband_received", "mlx5_0:1"): 4000,  # words of four bytes
        ("infiniband_sent", "mlx5_1:1"): 28, ("infiniband_received", "mlx5_1:1"): 280,
    }  # fmt: skip


def test_a_container_has_interfaces_without_hardware(tmp_path: Path) -> None:
    (tmp_path / "net" / "eth0").mkdir(parents=True)
    (tmp_path / "net" / "eth0" / "type").write_text("1\n")
    assert ethernet(["lo", "eth0"], tmp_path) == ["eth0"]
    assert ethernet(["lo0", "en0"], tmp_path / "elsewhere") == ["en0"]  # no Linux


def test_rates(machine: Path) -> None:
    before = read_traffic(machine)
    count(machine, "mlx5_0/ports/1", sent=150, received=500)  # the second has been reset
    count(machine, "mlx5_1/ports/1", sent=17, received=90)
    count(machine, "mlx5_2/ports/1", sent=9999, received=9999)  # new
    assert bytes_per_s(before, read_traffic(machine), 2.0) == {
        "ethernet_sent": 0, "ethernet_received": 0, "infiniband_sent": 4 * 60 / 2, "infiniband_received": 4 * 20 / 2,
    }  # fmt: skip


def test_counters_that_are_not_there(machine: Path) -> None:
    (machine / "infiniband/mlx5_1/ports/1/counters/port_xmit_data").unlink()
    (machine / "infiniband/mlx5_1/ports/1/counters/port_rcv_data").write_text("N/A")
    traffic = read_traffic(machine)
    assert traffic.problem.endswith(": mlx5_1:1")
    assert [name for direction, name in traffic.counted if direction == "infiniband_sent"] == ["mlx5_0:1"]


def test_the_counters_of_this_machine() -> None:
    traffic = read_traffic()
    assert not traffic.problem
    everything = psutil.net_io_counters(pernic=False)
    sent = sum(count for (direction, _), count in traffic.counted.items() if direction == "ethernet_sent")
    assert everything is None or 0 <= sent <= everything.bytes_sent
