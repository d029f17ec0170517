"""The page of what `gpu.py` measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memory import NO_GPU

Result = dict[str, Any]
#: Operations of the profile on the page.
_OPERATIONS = 12


def page(machine: Mapping[str, str], results: Mapping[str, tuple[Any, Result]]) -> str:
    """In Markdown; empty cells were not measured.

    Args:
        machine: name of the device, and versions.
        results: each job and what it measured, by name.
    """
    sections = {
        "Ceilings": _ceilings, "Training steps": _steps, "Whole runs": _runs, "Profile": _profile,
        "Tests on the device": _tests, "Not measured": _notes,
    }  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name != "device")
    lines = [f"# Measured on {machine['device']}", "", f"`python benchmarks/gpu.py`; {versions}. Memory in GiB."]
    if machine["device"].startswith("CPU"):
        lines.append("Tiny networks; options that a CPU refuses are replaced or left out.")
    for title, make in sections.items():
        if part := list(make(results)):
            lines += ["", f"## {title}", "", *(part[:-1] if part[-1] == "" else part)]
    minutes = sum(found.get("took_s", 0.0) for _, found in results.values()) / 60
    return "\n".join([*lines, "", f"{len(results)} jobs took {minutes:.1f} minutes."]) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |" for cells in lines]


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ratio(value: float | None, other: float | None) -> str:
    return _number(value / other if value is not None and other else None, 2)


def _of_kind(results: Mapping[str, tuple[Any, Result]], kind: str) -> dict[str, tuple[Any, Result]]:
    return {name: (job, found) for name, (job, found) in results.items() if job.kind == kind}


def _ceilings(results: Mapping[str, tuple[Any, Result]]) -> Iterator[str]:
    for _, found in _of_kind(results, "ceilings").values():
        if "ceilings" not in found:
            continue
        yield from _table(("what", "measured"), [(name, f"{rate:.3g}") for name, rate in found["ceilings"].items()])
        yield from ("", "Attention in TFLOP/s, by shape (clips, heads, tokens, width of a head):", "")
        rows = [
            (row["shape"], row["kernel"], _number(row.get("forward"), 2), _number(row.get("backward"), 2))
            for row in found["attention"]
        ]
        yield from _table(("shape", "kernel", "forward", "backward"), rows)


def _steps(results: Mapping[str, tuple[Any, Result]]) -> Iterator[str]:
    steps = _of_kind(results, "steps")
    if not steps:
        return
    yield "LoRA of rank 128, batch 1 and gradient checkpointing unless the options say otherwise. The relative time is"
    yield "that of a step over the step of the same network with checkpointing alone."
    yield ""
    plain = {
        (job.case.network, found.get("size")): found.get("step_s")
        for name, (job, found) in steps.items()
        if name.endswith("-checkpoint")
    }
    rows = []
    for name, (job, found) in steps.items():
        allocated, reserved, seconds = (found.get(key) for key in ("allocated", "reserved", "step_s"))
        common = ("training_type", "rank", "lora_alpha", "optimizer")
        is_lora = job.case.options["training_type"] == "lora"
        options = [
            f"`{key} {' '.join(value) if isinstance(value, list) else value}`"
            for key, value in job.case.options.items()
            if not (is_lora and key in common)
        ]
        cells = [
            name, ", ".join(options), found.get("size", ""), _number(found.get("planned")), _number(allocated),
            _number(reserved), _ratio(found.get("planned"), allocated), _ratio(reserved, allocated),
            _number(seconds, 3), _ratio(seconds, plain.get((job.case.network, found.get("size")))),
            _number(found.get("mfu"), 3),
        ]  # fmt: skip
        rows.append(cells)
    yield from _table(
        (
            "case", "options", "size", "planned", "allocated", "reserved", "planned / allocated",
            "reserved / allocated", "s/step", "relative", "MFU",
        ),
        rows,
    )  # fmt: skip


def _runs(results: Mapping[str, tuple[Any, Result]]) -> Iterator[str]:
    for name, (_, found) in _of_kind(results, "runs").items():
        if "phases" not in found:
            continue
        rates = [
            f"{label} {found[key]:.3g}"
            for key, label in (
                ("step_s", "s/step"), ("mfu", "MFU"), ("seconds/rollout", "sampling s"),
                ("seconds/decode", "decoding s"), ("seconds/reward", "rewards s"),
            )
            if key in found
        ]  # fmt: skip
        yield f"`{name}`, {found['size']}: {', '.join(rates)}."
        yield ""
        names = [(key, figure) for key in ("allocated", "reserved", "host") for figure in ("planned", "measured")]
        rows = [
            [phase, *(_number(sizes[figure].get(key), 2) for key, figure in names)]
            for phase, sizes in found["phases"].items()
        ]
        yield from (*_table(("phase", *(f"{key}, {figure}" for key, figure in names)), rows), "")


def _profile(results: Mapping[str, tuple[Any, Result]]) -> Iterator[str]:
    for _, found in _of_kind(results, "runs").values():
        if "profile" not in found:
            continue
        # Columns are apart by two spaces or more; lines of dashes are above and below the headings.
        lines = [re.split(r" {2,}", line.strip()) for line in found["profile"].splitlines() if line.strip(" -")]
        headings, *rows = lines
        names = [
            name
            for name in ("Name", "Self CUDA", "Self CUDA %", "Self CPU", "Self CPU %", "# of Calls")
            if name in headings
        ]
        operations = [dict(zip(headings, row, strict=True)) for row in rows if len(row) == len(headings)]
        yield "The operations that take most time by themselves in the profiled steps:"
        yield ""
        yield from _table(names, [[operation[name] for name in names] for operation in operations[:_OPERATIONS]])


def _tests(results: Mapping[str, tuple[Any, Result]]) -> Iterator[str]:
    for _, found in _of_kind(results, "tests").values():
        yield from (f"* {line}" for line in (*found.get("summaries", ()), *found.get("failed", ())))


def _notes(results: Mapping[str, tuple[Any, Result]]) -> Iterator[str]:
    notes = {name: found["note"] for name, (_, found) in results.items() if found.get("note", NO_GPU) != NO_GPU}
    yield from (f"* `{name}`: {note}" for name, note in notes.items())
