"""Columns of the report on machines: their facts, and those that have to be equal on all machines of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from finetrainers.rundir.health import link_errors
from finetrainers.utils.text import duration, file_size

from .facts import UNLIMITED, Facts
from .hosts import Node

_MIB = 1 << 20
#: Returns a fact as text; empty if it is unknown.
_Text = Callable[[Facts], str]
#: Text of an unknown fact.
NOTHING = "-"
#: Text of a fact that is unknown until something is repaired, which is a separate problem.
BROKEN = "broken"
_SAME_VERSION = "install the same version on all"
#: Packages other than torch whose version affects results.
_PACKAGES = ("finetrainers", "diffusers", "transformers", "peft", "accelerate", "safetensors", "deepspeed",
             "bitsandbytes", "torchao")  # fmt: skip


@dataclass(frozen=True)
class Column:
    """Fact of each machine.

    Attributes:
        heading: its name.
        text: function that returns it as text, from a machine's facts; empty if it is unknown.
        fix: remedy if it differs between machines, or None if it may.
        is_problem: whether a run with different values may fail or give wrong results.
        measured: whether it changes between measurements, and so is displayed for each machine.
    """

    heading: str
    text: _Text
    fix: str | None = None
    is_problem: bool = False
    measured: bool = False

    def of(self, node: Node) -> str:
        """Return the fact of a machine."""
        return (self.text(node.facts) if node.facts is not None else "") or NOTHING


def columns(checkpoint_bytes: int | None) -> list[Column]:
    """Return all columns, including the duration of writing a checkpoint if its size is known."""

    def save(facts: Facts) -> str:
        if not checkpoint_bytes or not facts.get("disk_write"):
            return ""
        seconds = checkpoint_bytes / facts["disk_write"]
        return duration(seconds) if seconds >= 0.1 else "< 0.1 s"

    def measured(heading: str, text: _Text) -> Column:
        return Column(heading, text, measured=True)

    return [
        Column("GPUs", _gpus, "train on machines with equal GPUs", True),
        measured("load", _gpu_fact("utilization", fmean, "{:.0f}%")),
        measured("GPU memory used", _used_memory),
        measured("power", _power),
        measured("hottest", _gpu_fact("temperature_c", max, "{:.0f} C")),
        measured("slowest clock", _clock),
        measured("ECC errors", _ecc),
        measured("disk write", _size("disk_write", "/s")),
        measured("disk read", _size("disk_read", "/s")),
        measured("disk free", _size("disk_free")),
        *([measured("a save takes", save)] if checkpoint_bytes else []),
        Column("driver", _text_fact("driver"), "install the same driver on all"),
        Column("torch", _torch_fact("torch"), _SAME_VERSION, True),
        Column("CUDA", _torch_fact("cuda"), "install the same build of torch on all", True),
        Column("NCCL", _torch_fact("nccl"), "install the same build of torch on all", True),
        Column("python", _text_fact("python"), _SAME_VERSION),
        *(Column(name, _text_fact(name), _SAME_VERSION, True) for name in _PACKAGES),
        Column("open files", _limit("open_files", str)),
        Column("memlock", _limit("memlock", file_size), "set the same limit on all"),
        Column("/dev/shm", _size("shm")),
        Column("InfiniBand", _ports, "see `ibstat` for ports that are down", True),
        measured("link errors", lambda facts: str(sum(link_errors(facts).values())) if facts.get("ports") else ""),
        Column("CPUs", _text_fact("cpus"), "the slowest machine sets the pace"),
        Column("memory", _size("memory"), "the machine with least memory sets the limit"),
        Column("kernel", _text_fact("kernel"), "boot the same one on all"),
    ]  # fmt: skip


def differing(column: Column, nodes: Sequence[Node]) -> tuple[str, list[Node]]:
    """Return the value of most machines, and the machines that differ; no machines if the fact may differ."""
    alive = [node for node in nodes if node.facts is not None]
    if column.fix is None or len(alive) < 2:
        return "", []
    texts = [text for node in alive if (text := column.of(node)) != BROKEN]
    usual = Counter(texts or [BROKEN]).most_common(1)[0][0]  # of several, the first
    return usual, [node for node in alive if column.of(node) != usual]


def clock(node: Node) -> str:
    """Return the lead of a machine's clock over this machine's, such as `+3 ms`, or `-` if it is unknown."""
    if node.clock_skew_s is None:
        return NOTHING
    skew = node.clock_skew_s
    return f"{skew:+.1f} s" if abs(skew) >= 1 else f"{round(1000 * skew):+d} ms".replace("+0 ", "0 ")


def _text_fact(name: str) -> _Text:
    return lambda facts: "" if facts.get(name) is None else str(facts[name])


def _torch_fact(name: str) -> _Text:
    return lambda facts: BROKEN if "torch_error" in facts else _text_fact(name)(facts)


def _size(name: str, per: str = "") -> _Text:
    return lambda facts: f"{file_size(facts[name])}{per}" if facts.get(name) is not None else ""


def _limit(name: str, format_limit: Callable[[int], str]) -> _Text:
    def limit_text(facts: Facts) -> str:
        limit = facts.get(name)
        return "" if limit is None else "unlimited" if limit == UNLIMITED else format_limit(limit)

    return limit_text


def _ports(facts: Facts) -> str:
    return f"{facts['ib_active']} of {facts['ib_ports']} up" if facts.get("ib_ports") and "ib_active" in facts else ""


def _gpus(facts: Facts) -> str:
    if facts.get("gpu_error"):
        return BROKEN
    counts = Counter(gpu.get("name", "unnamed").removeprefix("NVIDIA ") for gpu in facts.get("gpus", ()))
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def gpu_values(facts: Facts, name: str) -> list[float]:
    """Return a number of each GPU that reports it."""
    return [gpu[name] for gpu in facts.get("gpus", ()) if gpu.get(name) is not None]


def _gpu_fact(name: str, reduce: Callable[[list[float]], float], form: str) -> _Text:
    """Return the function that returns a number of all GPUs, such as their mean, as text in this form."""
    return lambda facts: form.format(reduce(values)) if (values := gpu_values(facts, name)) else ""


def _clock(facts: Facts) -> str:
    """Return the clock of the slowest GPU, and its maximum; an idle GPU has a low clock."""
    gpus = [gpu for gpu in facts.get("gpus", ()) if gpu.get("clock_mhz") is not None]
    if not gpus:
        return ""
    slowest = min(gpus, key=lambda gpu: gpu["clock_mhz"])
    maximum = slowest.get("clock_max_mhz")
    return f"{slowest['clock_mhz']:.0f}{'' if maximum is None else f' of {maximum:.0f}'} MHz"


def _used_memory(facts: Facts) -> str:
    sizes = gpu_values(facts, "memory_used_mib")
    return file_size(sum(sizes) * _MIB) if sizes else ""


def _ecc(facts: Facts) -> str:
    """Return the corrected and uncorrected memory errors since the driver was loaded."""
    corrected, uncorrected = gpu_values(facts, "corrected_errors"), gpu_values(facts, "memory_errors")
    return f"{sum(corrected):.0f} + {sum(uncorrected):.0f}" if corrected or uncorrected else ""


def _power(facts: Facts) -> str:
    drawn, limits = gpu_values(facts, "power_w"), gpu_values(facts, "power_limit_w")
    total = f" of {sum(limits):.0f}" if len(limits) == len(drawn) else ""
    return f"{sum(drawn):.0f}{total} W" if drawn else ""
