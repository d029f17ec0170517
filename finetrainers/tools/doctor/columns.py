"""What the report shows of a machine, fact by fact, and which facts have to be equal on all machines of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetrainers.rundir.health import link_errors
from finetrainers.utils.text import duration, file_size

from .facts import UNLIMITED
from .hosts import Node

_MIB = 1 << 20
#: Where a fact is not known.
NOTHING = "-"
#: Where it cannot be known until something is mended, which is a problem of its own.
BROKEN = "broken"
_SAME_VERSION = "install the same version on all"
#: Packages whose version decides over results, beside torch.
_PACKAGES = ("finetrainers", "diffusers", "transformers", "peft", "accelerate", "safetensors", "deepspeed", "bitsandbytes",
             "torchao")  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A fact of each machine.

    Attributes:
        heading: what it is called.
        text: it, by the facts of a machine; empty where it is not known.
        fix: what to do if it differs between machines; None: it may.
        is_problem: whether a run with different ones may fail or give wrong results.
        measured: whether it is another one at each look, and so is shown of each machine.
    """

    heading: str
    text: Callable[[Mapping[str, Any]], str]
    fix: str | None = None
    is_problem: bool = False
    measured: bool = False

    def of(self, node: Node) -> str:
        """The fact of a machine."""
        return (self.text(node.facts) if node.facts is not None else "") or NOTHING


def columns(checkpoint_bytes: int | None) -> list[Column]:
    """All columns; how long a checkpoint takes to write is one, if its size is known."""

    def save(facts: Mapping[str, Any]) -> str:
        if not checkpoint_bytes or not facts.get("disk_write"):
            return ""
        seconds = checkpoint_bytes / facts["disk_write"]
        return duration(seconds) if seconds >= 0.1 else "< 0.1 s"

    def measured(heading: str, text: Callable[[Mapping[str, Any]], str]) -> Column:
        return Column(heading, text, measured=True)

    return [
        Column("GPUs", _gpus, "train on machines with equal GPUs", True),
        measured("load", lambda facts: _mean(facts, "utilization", "{:.0f} %")),
        measured("GPU memory used", _used),
        measured("power", _power),
        measured("hottest", lambda facts: _most(facts, "temperature_c", "{:.0f} C")),
        measured("slowest clock", _clock),
        measured("ECC errors", _ecc),
        measured("disk write", lambda facts: _speed(facts, "disk_write")),
        measured("disk read", lambda facts: _speed(facts, "disk_read")),
        measured("disk free", lambda facts: _size(facts, "disk_free")),
        *([measured("a save takes", save)] if checkpoint_bytes else []),
        Column("driver", _plain("driver"), "install the same driver on all"),
        Column("torch", _of_torch("torch"), _SAME_VERSION, True),
        Column("CUDA", _of_torch("cuda"), "install the same build of torch on all", True),
        Column("NCCL", _of_torch("nccl"), "install the same build of torch on all", True),
        Column("python", _plain("python"), _SAME_VERSION),
        *(Column(name, _plain(name), _SAME_VERSION, True) for name in _PACKAGES),
        Column("open files", lambda facts: _limit(facts, "open_files", str)),
        Column("memlock", lambda facts: _limit(facts, "memlock", file_size), "set the same limit on all"),
        Column("/dev/shm", lambda facts: _size(facts, "shm")),
        Column("InfiniBand", _ports, "see `ibstat` for ports that are down", True),
        measured("link errors", lambda facts: str(sum(link_errors(facts).values())) if facts.get("ports") else ""),
        Column("CPUs", _plain("cpus"), "the slowest machine sets the pace"),
        Column("memory", lambda facts: _size(facts, "memory"), "the machine with least memory sets the limit"),
        Column("kernel", _plain("kernel"), "boot the same one on all"),
    ]  # fmt: skip


def majority(texts: Sequence[str]) -> str:
    """The most frequent one; of several, that which comes first."""
    return Counter(texts).most_common(1)[0][0]


def differing(column: Column, nodes: Sequence[Node]) -> tuple[str, list[Node]]:
    """What most machines have, and the machines that have something else; none where the fact may differ."""
    alive = [node for node in nodes if node.facts is not None]
    if column.fix is None or len(alive) < 2:
        return "", []
    usual = majority([text for node in alive if (text := column.of(node)) != BROKEN] or [BROKEN])
    return usual, [node for node in alive if column.of(node) != usual]


def clock(node: Node) -> str:
    """`+3 ms`: how far a clock is ahead of this machine's, or `-` where it was not asked."""
    if node.clock_skew_s is None:
        return NOTHING
    skew = node.clock_skew_s
    return f"{skew:+.1f} s" if abs(skew) >= 1 else f"{round(1000 * skew):+d} ms".replace("+0 ", "0 ")


def _plain(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda facts: "" if facts.get(name) is None else str(facts[name])


def _of_torch(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda facts: BROKEN if "torch_error" in facts else _plain(name)(facts)


def _size(facts: Mapping[str, Any], name: str) -> str:
    return file_size(facts[name]) if facts.get(name) is not None else ""


def _speed(facts: Mapping[str, Any], name: str) -> str:
    return f"{file_size(facts[name])}/s" if facts.get(name) is not None else ""


def _limit(facts: Mapping[str, Any], name: str, said: Callable[[int], str]) -> str:
    limit = facts.get(name)
    return "" if limit is None else "unlimited" if limit == UNLIMITED else said(limit)


def _ports(facts: Mapping[str, Any]) -> str:
    return f"{facts['ib_active']} of {facts['ib_ports']} up" if facts.get("ib_ports") else ""


def _gpus(facts: Mapping[str, Any]) -> str:
    if facts.get("gpu_error"):
        return BROKEN
    counts = Counter(gpu["name"].removeprefix("NVIDIA ") for gpu in facts.get("gpus", ()))
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def known(facts: Mapping[str, Any], name: str) -> list[float]:
    """A number of each GPU that tells it."""
    return [gpu[name] for gpu in facts.get("gpus", ()) if gpu.get(name) is not None]


def _mean(facts: Mapping[str, Any], name: str, form: str) -> str:
    found = known(facts, name)
    return form.format(sum(found) / len(found)) if found else ""


def _most(facts: Mapping[str, Any], name: str, form: str) -> str:
    found = known(facts, name)
    return form.format(max(found)) if found else ""


def _used(facts: Mapping[str, Any]) -> str:
    found = known(facts, "memory_used_mib")
    return file_size(sum(found) * _MIB) if found else ""


def _clock(facts: Mapping[str, Any]) -> str:
    """Clock of the GPU that is slowest, of what it may have; one without work has a low one."""
    clocks = [(gpu["clock_mhz"], gpu.get("clock_max_mhz")) for gpu in facts.get("gpus", ()) if gpu.get("clock_mhz") is not None]  # fmt: skip
    now, most = min(clocks, default=(None, None), key=lambda clock: clock[0])
    return "" if now is None else f"{now:.0f} MHz" if most is None else f"{now:.0f} of {most:.0f} MHz"


def _ecc(facts: Mapping[str, Any]) -> str:
    """Memory errors since the driver was loaded: those that were corrected, and those that were not."""
    corrected, uncorrected = known(facts, "corrected_errors"), known(facts, "memory_errors")
    return f"{sum(corrected):.0f} + {sum(uncorrected):.0f}" if corrected or uncorrected else ""


def _power(facts: Mapping[str, Any]) -> str:
    drawn, limits = known(facts, "power_w"), known(facts, "power_limit_w")
    of = f" of {sum(limits):.0f}" if len(limits) == len(drawn) else ""
    return f"{sum(drawn):.0f}{of} W" if drawn else ""
