"""Two machines for a test: network namespaces of this one, joined by a cable, which share its disk.

Each has an address, an interface and a loopback of its own, and no way to the other one but the cable. The host's name
is the same on both, and resolves to a loopback address, as on many clusters: what tells them apart is
`GLOO_SOCKET_IFNAME`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29500"
#: What each machine calls its end of the cable.
INTERFACE = "cable"


class Machines:
    """What runs on them, by the machine's index."""

    def __init__(self, logs: Path) -> None:
        self.names = tuple(f"finetrainers-{os.getpid()}-{machine}" for machine in range(2))
        self.logs = logs
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, machine: int, *command: str, log: str, **environment: str) -> subprocess.Popen[bytes]:
        """A command on a machine; its output is in `LOGS/LOG-MACHINE`."""
        with (self.logs / f"{log}-{machine}").open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[machine], *command],
                cwd=ROOT,
                env={
                    **os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": INTERFACE, **environment,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._started.append(process)
        return process

    def node(self, machine: int, *flags: str, processes: int = 1, **environment: str) -> subprocess.Popen[bytes]:
        """The recipe for machines without a scheduler, with flags of `train.py`."""
        return self.start(
            machine,
            *("bash", "examples/cluster/node.sh", *flags),
            **{
                "NUM_MACHINES": "2", "MACHINE_RANK": str(machine), "MAIN_PROCESS_IP": ADDRESSES[0],
                "MAIN_PROCESS_PORT": PORT,
                "GPUS_PER_MACHINE": str(processes), "ACCELERATE_USE_CPU": "true", **environment,
            },
        )  # fmt: skip

    def said(self, log: str, machine: int) -> str:
        """The output so far."""
        return (self.logs / f"{log}-{machine}").read_text(errors="replace")

    def kill(self, machine: int) -> None:
        """End all processes of a machine at once, launcher and workers, without a chance to say anything."""
        pids = _ip("netns", "pids", self.names[machine]).split()
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unplug(self, machine: int) -> None:
        """Pull a machine's end of the cable: nothing arrives any more, not even that a connection has ended."""
        _ip("-n", self.names[machine], "link", "set", INTERFACE, "down")

    def plug(self, machine: int) -> None:
        """Put it back."""
        _ip("-n", self.names[machine], "link", "set", INTERFACE, "up")

    def close(self) -> None:
        """End what runs, and remove the machines."""
        for machine, name in enumerate(self.names):
            with suppress(subprocess.CalledProcessError):
                self.kill(machine)
                _ip("netns", "del", name)
        for process in self._started:
            process.wait(timeout=10)


def why_none() -> str | None:
    """Why this machine makes no others: a reason to skip."""
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    name = f"finetrainers-{os.getpid()}-trial"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"
    try:
        _ip("-n", name, "link", "add", INTERFACE, "type", "veth")
    except subprocess.CalledProcessError as error:
        return f"pairs of virtual interfaces are not permitted: {error.stderr.strip()}"
    finally:
        _ip("netns", "del", name)
    return None


@contextmanager
def two_machines(logs: Path) -> Iterator[Machines]:
    """Two machines, gone after the block with all that runs on them."""
    machines = Machines(logs)
    try:
        for name in machines.names:
            _ip("netns", "add", name)
        first, second = machines.names
        _ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for name, address in zip(machines.names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", interface, "up")
        yield machines
    finally:
        machines.close()


def wait_for(process: subprocess.Popen[bytes], timeout: float) -> tuple[int, float]:
    """Its exit code, and after how many seconds.

    Raises:
        subprocess.TimeoutExpired: it still runs.
    """
    started = time.monotonic()
    return process.wait(timeout), time.monotonic() - started


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
