"""Milliseconds of a step whose gradients are averaged during its backward pass, after it, or not at all, by two CPU
processes.

    python benchmarks/gradient_exchange.py                      # over this host's loopback
    python benchmarks/gradient_exchange.py --gigabits 1 4 10    # as root: two network namespaces, a cable of each speed

96 linear layers with 96 MiB of gradients, one thread each, over gloo. The three kinds of steps take turns, so that
another load of the host meets all of them; of each the median counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parallel"))

from machines import ADDRESSES, INTERFACE, two_machines

from finetrainers.parallel.exchange import GradientExchange

ROOT = Path(__file__).parents[1]
HEADINGS = ("network", "no exchange, ms", "after backward, ms", "during backward, ms", "after / during")
WIDTH, LAYERS, ROWS = 512, 96, 128


def worker(rounds: int) -> None:
    """One of both processes; the first prints the medians."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    x, parameters = torch.randn(ROWS, WIDTH), [*network.parameters()]
    kinds = [None, *(GradientExchange(parameters, overlaps=overlaps) for overlaps in (False, True))]
    seconds: list[list[float]] = [[] for _ in kinds]
    for _ in range(rounds + 1):
        for kind, exchange in enumerate(kinds):
            dist.barrier()
            began = time.perf_counter()
            overlaps = exchange is not None and exchange.overlaps
            with exchange.during_backward() if exchange is not None and overlaps else nullcontext():
                network(x).square().mean().backward()
            if exchange is not None:
                exchange.receive()
                exchange.begin()
            seconds[kind].append(time.perf_counter() - began)
            network.zero_grad()
    if dist.get_rank() == 0:
        print(*(1e3 * statistics.median(one[1:]) for one in seconds), flush=True)
    dist.destroy_process_group()


def row(name: str, printed: str) -> str:
    """A line of the table."""
    alone, after, during = map(float, printed.split()[-3:])
    return f"| {name} | {alone:.0f} | {after:.0f} | {during:.0f} | {after / during:.2f} |"


def on_this_host(command: Sequence[str]) -> str:
    """What rank 0 prints; both processes run on this host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--no-python"]
    return subprocess.run([*launcher, *command], check=True, capture_output=True, text=True, env=own()).stdout


def over_a_cable(command: Sequence[str], gigabits: float) -> str:
    """What rank 0 prints; each process is in a network namespace of its own."""
    with tempfile.TemporaryDirectory() as logs, two_machines(Path(logs)) as machines:
        for name in machines.names:
            limit = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", f"{gigabits:g}gbit"]
            subprocess.run(["ip", "netns", "exec", name, *limit, "burst", "1mb", "latency", "50ms"], check=True)
        company = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
        started = [machines.start(rank, *command, log="out", RANK=str(rank), **company) for rank in (0, 1)]
        for process in started:
            assert process.wait() == 0, machines.said("out", started.index(process))
        return machines.said("out", 0)


def own() -> dict[str, str]:
    """The environment, with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabits", type=float, nargs="+", help="speeds of a cable; default: this host's loopback")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.rounds)
        return
    command = [sys.executable, __file__, "--worker", "--rounds", str(options.rounds)]
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    if options.gigabits is None:
        print(row("loopback", on_this_host(command)))
    for gigabits in options.gigabits or ():
        print(row(f"{gigabits:g} Gbit/s", over_a_cable(command, gigabits)), flush=True)


if __name__ == "__main__":
    main()
