"""The memory estimate in words and as JSON: phases, what is chosen for `auto`, whether it fits, and what makes it fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetrainers.config.root import TrainConfig
from finetrainers.memory.advice import OTHER_WAYS, Advice, Chosen
from finetrainers.memory.automatic import Automatic
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import RESERVE, fits, reserved
from finetrainers.memory.phases import RunPlan
from finetrainers.parallel.sharding import with_launcher
from finetrainers.utils.gpus import Gpu
from finetrainers.utils.launch import launched_processes
from finetrainers.utils.phases import label
from finetrainers.utils.text import aligned, file_size, plural

from .start_report import part_name

if TYPE_CHECKING:
    from .memory_plan import RunMemory


def memory_lines(memory: RunMemory, found: Automatic) -> list[str]:
    """The estimate as a table of phases, what the peak consists of, host memory, what was chosen, and disk."""
    plan, lines = found.plan, _phase_lines(found.plan)
    machine = plural(plan.local_processes, "process", "processes")
    lines.append(f"host memory of a machine, {machine}: {file_size(plan.machine_bytes)}")
    options = with_launcher(memory.checked.config.parallel)
    if launched_processes() == 1 and ((options.fsdp is not None and not options.fsdp_cpu_offload) or options.deepspeed):
        lines.append("planned for 1 process; finetrainers estimate --num_processes N plans for N")
    lines += automatic_lines(memory.checked.config, found)
    lines += plan.step.swap.lines()
    if plan.unknown:
        lines.append(f"not in it, since not on this disk: {', '.join(map(part_name, plan.unknown))}")
    if memory.checked.config.memory.compile != "none":
        lines.append("compiled blocks store less than this; how much is not known without a GPU")
    needs = memory.disk()
    disk = [f"{needs.num_checkpoints} x {file_size(needs.checkpoint)} of checkpoints"] if needs.num_checkpoints else []
    cache = memory.cache_bytes()
    disk += [f"cache {file_size(cache)}"] if cache else []
    return [*lines, f"disk: {', '.join([*disk, f'result {file_size(needs.result)}'])}"]


def _phase_lines(plan: RunPlan) -> list[str]:
    """The phases, and what the peak consists of."""
    peak = plan.peak_phase
    rows = [["memory of a process, estimated", "GPU", "host", ""]]
    for phase, size in plan.peaks.items():
        mark = "< peak" if phase == peak else ""
        rows.append([f"  {label(phase)}", file_size(size), file_size(plan.host[phase]), mark])
    lines = [*(line.rstrip() for line in aligned(rows)), f"of the peak ({label(peak)}):"]
    parts = sorted(plan.phases[peak].items(), key=lambda part: -part[1])
    lines += aligned([[f"  {part_name(name)}", file_size(size)] for name, size in parts if size >= 0.005 * plan.peak])
    lines.append(
        f"allocated {file_size(plan.peak)}; reserved, with {100 * RESERVE:.0f} % for CUDA and fragmentation: "
        f"{file_size(reserved(plan.peak))}"
    )
    return lines


def automatic_lines(config: TrainConfig, found: Automatic) -> list[str]:
    """What is chosen for options that leave it open, and for what machine."""
    memory, machine, variant = config.memory, found.machine, found.variant
    lines = (
        [] if variant is None else [f"--{variant.option} auto{'' if machine else ', where all fits'}: {variant.what}"]
    )
    if machine is None:
        ask = "--gpu 24GB prints what is chosen for that GPU"
        if memory.blocks_to_swap == "auto":
            lines += [
                f"--blocks_to_swap auto: no GPU is known, all {found.num_blocks} blocks count as swapped;",
                f"  {ask}",
            ]
        if memory.activation_memory == "auto":
            lines += ["--activation_memory auto: no GPU is known, all activations count as stored;", f"  {ask}"]
        return lines
    if found.offloads_samples:
        lines.append(found.words["enable_model_cpu_offload"])
    lines += [found.words[name] for name in found.decoding]
    if found.swapped is not None:
        lines.append(f"--blocks_to_swap auto: {found.words['blocks_to_swap']}")
    if found.activations is not None:
        speed = f"{machine.flops / 1e12:.0f} TFLOP/s, {machine.link / 1e9:.0f} GB/s"
        lines += [
            f"--activation_memory auto, assuming {speed}, {machine.host / GIB:.1f} GiB of host memory:",
            f"  {found.activations.what}",
            f"  {found.activations.why(machine)}",
        ]
    return lines


def fit_lines(plan: RunPlan, gpu: Gpu, advice: Advice | None) -> list[str]:
    """Return whether the run fits a GPU, and the options that make it fit."""
    needed = file_size(reserved(plan.peak))
    if fits(plan.peak, GIB * gpu.gib):
        return [f"it fits {gpu}: {needed} are needed"]
    lines = [f"it does not fit {gpu}: {needed} are needed"]
    if advice is None:
        lines.append("no set of options makes it fit. What does:")
        return [*lines, *(f"  * {way}" for way in OTHER_WAYS)]
    return [*lines, *advice_lines(advice, "it fits with")]


def advice_lines(advice: Advice, heading: str) -> list[str]:
    """The switches of an advice, each with what it saves and costs; and what is chosen for `auto`."""
    chosen = dict(advice.outcome.chosen)
    lines = [f"{heading} {reserved(advice.outcome.peak) / GIB:.1f} GiB:"]
    for one in advice.switches:
        lines.append(f"  {one.switch.flags}")
        lines.append(f"      saves {file_size(max(0.0, one.saves))}; {_time(one)}; {one.switch.cost}")
        lines += [f"      chosen: {chosen.pop(name)}" for name in one.switch.options if name in chosen]
    return [*lines, *(f"  also chosen: {what}" for what in chosen.values())]


def _time(one: Chosen) -> str:
    """How much longer a step takes with a switch than without."""
    slowdown = one.switch.slowdown
    known = round(one.slower + (slowdown or 0.0))
    if slowdown is None:
        return f"{known:+d} % time, rest not measured" if known else "slowdown not measured"
    return f"{known:+d} % time" if known else "training as fast"


def as_json(memory: RunMemory, chosen: Automatic, gpu: Gpu | None, advice: Advice | None) -> dict[str, Any]:
    """The estimate for programs; sizes in bytes."""
    needs, plan = memory.disk(), chosen.plan
    found: dict[str, Any] = {
        "phases": {
            phase: {"gpu": round(size), "host": round(plan.host[phase]), "parts": {k: round(v) for k, v in parts.items()}}
            for (phase, size), parts in zip(plan.peaks.items(), plan.phases.values(), strict=True)
        },
        "peak": {"phase": plan.peak_phase, "allocated": round(plan.peak), "reserved": round(reserved(plan.peak))},
        "processes": launched_processes(),
        "machine_host": round(plan.machine_bytes),
        "disk": {
            "checkpoint": needs.checkpoint, "num_checkpoints": needs.num_checkpoints, "result": needs.result,
            "samples": needs.samples, "cache": round(memory.cache_bytes()),
        },
        "unknown": list(plan.unknown),
        **_chosen_json(chosen),
    }  # fmt: skip
    if gpu is not None:
        found["gpu"], found["gpu_gib"] = gpu.name, gpu.gib
        found["fits"] = fits(plan.peak, GIB * gpu.gib)
        if not found["fits"]:
            found["advice"] = None if advice is None else _advice_json(advice)
    return found


def _chosen_json(chosen: Automatic) -> dict[str, Any]:
    """What is chosen for `auto`; `for_gpu` is false where no GPU is known."""
    found: dict[str, Any] = {}
    if chosen.swapped is not None:
        known = chosen.machine is not None
        found["blocks_to_swap"] = {"blocks": chosen.swapped, "of": chosen.num_blocks, "for_gpu": known}
    if chosen.decoding:
        found["decoding"] = list(chosen.decoding)
    if (variant := chosen.variant) is not None:
        found[variant.option] = {
            "value": variant.value, "forward": variant.forward, "backward": variant.backward, "fits": chosen.fits,
        }  # fmt: skip
    if chosen.activations is not None:
        choice = chosen.activations
        found["activation_memory"] = {
            "setting": choice.stored, "blocks": choice.number, "of": choice.total, "host": round(choice.host),
            "slowdown_percent": round(100 * choice.slower, 1), "fits": choice.fits,
        }  # fmt: skip
    return found


def _advice_json(advice: Advice) -> dict[str, Any]:
    return {
        "reserved": round(reserved(advice.outcome.peak)),
        "slowdown": advice.slowdown,
        "chosen": dict(advice.outcome.chosen),
        "switches": [
            {
                "options": dict(one.switch.options), "saves": round(one.saves),
                "planned_slowdown_percent": round(one.slower, 1), "slowdown_percent": one.switch.slowdown,
                "cost": one.switch.cost,
            }
            for one in advice.switches
        ],
    }  # fmt: skip
