"""Problems of machines, other remarks about them, and their remedies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median_high

from finetrainers.rundir.health import link_errors
from finetrainers.utils.text import duration, file_size, listed, plural

from .columns import BROKEN, columns, differing
from .facts import UNLIMITED, Facts
from .hosts import Node

_GIB, _MIB = 1 << 30, 1 << 20
#: Data workers pass tensors through open files and shared memory, and each connection of NCCL takes a few.
_FEW_FILES, _MIN_FILES = 4096, 1024
#: Docker's default for a container is 64 MiB.
_MIN_SHM = _GIB
_SKEW_S = 1.0
#: GPU memory that shows another process: a context alone takes about half as much.
_USED_MIB = 1024
_HOT_C = 85
_LONG_SAVE_S = 60.0
#: Factor between the median of disks and a slow one.
_SLOW = 3.0


@dataclass(frozen=True)
class Needs:
    """Bytes that a run writes: each checkpoint, and the minimum that it needs on the disk to end well."""

    checkpoint: int
    least: int


@dataclass(frozen=True)
class Finding:
    """Remark about a machine, with a remedy; a problem makes the command fail."""

    host: str
    text: str
    is_problem: bool = True


def findings(nodes: Sequence[Node], needs: Needs | None) -> list[Finding]:
    """Return all findings: problems first, in the order of the machines."""
    remarks = [finding for node in nodes for finding in _node_findings(node, needs)]
    remarks += _differences(nodes, needs)
    remarks += _slow_disks(nodes)
    order = {node.host: index for index, node in enumerate(nodes)}
    return sorted(remarks, key=lambda finding: (not finding.is_problem, order[finding.host]))


def _node_findings(node: Node, needs: Needs | None) -> Iterator[Finding]:
    if node.facts is None:
        yield Finding(node.host, node.error or "no answer")
        return
    facts = node.facts
    checks = (_versions(facts), _gpus(facts, node.slots), _limits(facts), _links(facts), _disk(facts, needs))
    for text, is_problem in chain(*checks, _clock(node)):
        yield Finding(node.host, text, is_problem)


_Remarks = Iterator[tuple[str, bool]]


def _versions(facts: Facts) -> _Remarks:
    forms = {"torch_error": "torch cannot be imported: {}; install it again"}
    for name in ("version_problem", "torch_error", "torch_problem"):
        if (problem := facts.get(name)) is not None:
            yield forms.get(name, "{}").format(problem), True


def _gpus(facts: Facts, slots: int | None) -> _Remarks:
    if (error := facts.get("gpu_error")) is not None:
        yield f"{error}; install or restart the driver, or reset the GPU, and see `dmesg` for Xid errors", True
    gpus = facts.get("gpus", [])
    if slots is not None and len(gpus) < slots:
        yield f"{plural(len(gpus), 'GPU')}, but the hosts file has slots={slots}; correct one of them", True
    if not gpus and slots is None and error is None:
        yield "no GPU; a run would train on the CPU", False
    usable = facts.get("torch_gpus")
    if gpus and usable is not None and usable != len(gpus) and facts.get("torch_problem") is None:
        yield f"torch sees {usable} of {plural(len(gpus), 'GPU')}; check CUDA_VISIBLE_DEVICES and MIG", False
    for gpu in gpus:
        name = f"GPU {gpu['index']:.0f}"
        if (errors := gpu.get("memory_errors")) is not None and errors > 0:
            yield f"{name} has {errors:.0f} uncorrected memory errors; reset it, or replace it if they come back", True
        if (temperature := gpu.get("temperature_c")) is not None and temperature >= _HOT_C:
            yield f"{name} is at {temperature:.0f} C and may be throttled; check its cooling", False
    busy = [gpu for gpu in gpus if (gpu.get("memory_used_mib") or 0) > _USED_MIB]
    if busy:
        names = listed([f"{gpu['index']:.0f}" for gpu in busy])
        size = file_size(sum(gpu["memory_used_mib"] for gpu in busy) * _MIB)
        yield (
            f"{size} in use on GPU {names}; `nvidia-smi` lists the processes, which may be left from an earlier run",
            False,
        )


def _limits(facts: Facts) -> _Remarks:
    files = facts.get("open_files")
    if files is not None and files != UNLIMITED and files < _FEW_FILES:
        text = f"the limit of open files is {files}; set `ulimit -n 65536`, or nofile in /etc/security/limits.conf"
        yield text, files < _MIN_FILES
    if facts.get("ib_active") and facts.get("memlock", UNLIMITED) != UNLIMITED:
        text = f"{file_size(facts['memlock'])} of locked memory is too little for InfiniBand; set `ulimit -l unlimited`"
        yield f"{text}, or memlock in /etc/security/limits.conf (Docker: --ulimit memlock=-1)", True
    if (shm := facts.get("shm")) is not None and shm < _MIN_SHM:
        yield (
            f"/dev/shm has {file_size(shm)}, which data workers and NCCL share; mount 16 GiB (Docker: --shm-size 16g)",
            True,
        )


def _links(facts: Facts) -> _Remarks:
    errors = link_errors(facts)
    if errors:
        names = listed([f"{port} ({count})" for port, count in errors.items()])
        yield (
            f"errors of InfiniBand links: {names}; check with --every 60 whether they still rise, and check the cable",
            False,
        )


def _disk(facts: Facts, needs: Needs | None) -> _Remarks:
    if (error := facts.get("disk_error")) is not None:
        yield f"{error}; set another --output_dir", True
    free, speed = facts.get("disk_free"), facts.get("disk_write")
    if needs is None:
        return
    if free is not None and free < needs.least:
        path = facts.get("disk_path", "the disk")
        text = f"{path} has {file_size(free)} free, and the run needs {file_size(needs.least)}"
        yield f"{text}; free up space, or set another --output_dir", True
    if speed and needs.checkpoint / speed > _LONG_SAVE_S:
        save_time = duration(needs.checkpoint / speed)
        yield (
            f"a checkpoint of {file_size(needs.checkpoint)} takes {save_time}; --async_checkpointing writes while "
            "training",
            False,
        )


def _clock(node: Node) -> _Remarks:
    skew, trip = node.clock_skew_s, node.round_trip_s or 0.0
    if skew is not None and abs(skew) - trip / 2 > _SKEW_S:
        ahead = "ahead of" if skew > 0 else "behind"
        yield (
            f"its clock is {duration(abs(skew))} {ahead} this machine's; start chrony or systemd-timesyncd on both",
            True,
        )


def _differences(nodes: Sequence[Node], needs: Needs | None) -> Iterator[Finding]:
    for column in columns(needs.checkpoint if needs else None):
        usual, others = differing(column, nodes)
        for node in (other for other in others if column.of(other) != BROKEN):
            text = f"{column.heading}: {column.of(node)}, elsewhere {usual}; {column.fix}"
            yield Finding(node.host, text, column.is_problem)


def _slow_disks(nodes: Sequence[Node]) -> Iterator[Finding]:
    speeds = {node.host: speed for node in nodes if node.facts and (speed := node.facts.get("disk_write"))}
    if len(speeds) < 3:
        return
    median = median_high(speeds.values())
    for host, speed in speeds.items():
        if speed * _SLOW < median:
            text = f"its disk writes {file_size(speed)}/s, and the median is {file_size(median)}/s"
            yield Finding(host, f"{text}; check its mount and other programs that write", False)
