"""The memory estimate as text and JSON: phases, choices for `auto`, whether it fits, and options that make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tomli_w

from finetrainers.config.root import TrainConfig
from finetrainers.config.target import planned_gpu
from finetrainers.memory.advice import Advice, Chosen
from finetrainers.memory.automatic import AutoSettings
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import RESERVE, fits, with_reserve
from finetrainers.memory.phases import RunPlan
from finetrainers.methods.registry import method_spec
from finetrainers.parallel.sharding import with_launcher
from finetrainers.utils.gpus import Gpu
from finetrainers.utils.launch import launched_processes
from finetrainers.utils.phases import label
from finetrainers.utils.text import aligned, duration, file_size, plural

from .start_report import part_name

if TYPE_CHECKING:
    from .memory_plan import RunMemory

#: Longest run on a CPU, in seconds, without advice to use smaller clips.
_LONG_ON_CPU_S = 1800


def memory_lines(memory: RunMemory, settings: AutoSettings) -> list[str]:
    """Return the estimate as lines: a table of phases, contents of the peak, host memory, choices for `auto`, disk."""
    plan, lines = settings.plan, _phase_lines(settings.plan)
    machine = plural(plan.local_processes, "process", "processes")
    lines.append(f"host memory of a machine, {machine}: {file_size(plan.machine_bytes)} of {file_size(memory.host)}")
    options = with_launcher(memory.checked.config.parallel)
    if launched_processes() == 1 and ((options.fsdp is not None and not options.fsdp_cpu_offload) or options.deepspeed):
        lines.append("planned for 1 process; finetrainers estimate --num_processes N plans for N")
    lines += automatic_lines(memory.checked.config, settings)
    lines += plan.step.swap.lines()
    if plan.unknown:
        lines.append(f"not in it, since not on this disk: {', '.join(map(part_name, plan.unknown))}")
    if not memory.checked.spec.vae_pixel_bytes:
        lines.append(f"not in it: activations of the VAE, which {memory.checked.spec.name} does not declare")
    if memory.checked.config.memory.compile != "none":
        lines.append("compiled blocks store less than this; how much is not known without a GPU")
    lines += time_lines(memory)
    needs = memory.disk()
    disk = [f"{needs.num_checkpoints} x {file_size(needs.checkpoint)} of checkpoints"] if needs.num_checkpoints else []
    cache = memory.cache_bytes()
    disk += [f"cache {file_size(cache)}"] if cache else []
    return [*lines, f"disk: {', '.join([*disk, f'result {file_size(needs.result)}'])}"]


def time_lines(memory: RunMemory) -> list[str]:
    """Return the planned time of a run that trains on clips, without samples; only a run measures its steps."""
    from .throughput import planned_flops

    config = memory.checked.config
    if not method_spec(config).learns_clips:
        return []
    rate, steps = planned_flops(planned_gpu(config), memory.device.type), config.training.train_steps
    seconds = memory.step_flops() / rate
    total = "" if steps is None else f"about {duration(steps * seconds)} for {plural(steps, 'step')} of "
    is_long = memory.device.type == "cpu" and (steps or 0) * seconds > _LONG_ON_CPU_S
    remedy = ["  smaller clips are faster on this CPU (resolutions, frame_buckets)"] if is_long else []
    each = f"{seconds:.2g}" if seconds < 100 else f"{seconds:.0f}"
    return [f"time, planned at {rate / 1e12:.2g} TFLOP/s: {total}{each} s", *remedy]


def _phase_lines(plan: RunPlan) -> list[str]:
    """Return a table of the phases, and of the contents of the peak."""
    peak = plan.peak_phase
    rows = [["memory of a process, estimated", "GPU", "host", ""]]
    for phase, size in plan.peaks.items():
        mark = "< peak" if phase == peak else ""
        rows.append([f"  {label(phase)}", file_size(size), file_size(plan.host[phase]), mark])
    lines = [*(line.rstrip() for line in aligned(rows)), f"of the peak ({label(peak)}):"]
    parts = sorted(plan.phases[peak].items(), key=lambda part: -part[1])
    lines += aligned([[f"  {part_name(name)}", file_size(size)] for name, size in parts if size >= 0.005 * plan.peak])
    lines.append(
        f"allocated {file_size(plan.peak)}; reserved, with {100 * RESERVE:.0f}% for CUDA and fragmentation: "
        f"{file_size(with_reserve(plan.peak))}"
    )
    return lines


def automatic_lines(config: TrainConfig, settings: AutoSettings) -> list[str]:
    """Return the choices for options set to `auto`, and the machine that they are for."""
    memory, machine, lines = config.memory, settings.machine, list[str]()
    if machine is None:
        hint = "--gpu 24GB prints what is chosen for that GPU"
        if memory.blocks_to_swap == "auto":
            lines += [
                f"--blocks_to_swap auto: no GPU is known, all {settings.num_blocks} blocks count as swapped;",
                f"  {hint}",
            ]
        if memory.activation_memory == "auto":
            lines += ["--activation_memory auto: no GPU is known, all activations count as stored;", f"  {hint}"]
        return lines
    if settings.offloads_samples:
        lines.append(settings.words["enable_model_cpu_offload"])
    lines += [settings.words[name] for name in settings.decoding]
    swap_label, activation_label = (
        f"--{name} auto" if config.get(name) == "auto" else f"{name.replace('_', ' ')}, chosen"
        for name in ("blocks_to_swap", "activation_memory")
    )
    if settings.swapped is not None and (settings.swapped or memory.blocks_to_swap == "auto"):
        lines.append(f"{swap_label}: {settings.words['blocks_to_swap']}")
    if settings.activations is not None:
        speed = f"a GPU of {machine.flops / 1e12:.0f} TFLOP/s, copies of {machine.link / 1e9:.0f} GB/s"
        lines += [
            f"{activation_label}, assuming {speed},",
            f"  {machine.host / GIB:.1f} GiB of host memory:",
            f"  {settings.activations.what}",
            f"  {settings.activations.why(machine)}",
        ]
    return lines


def fit_lines(memory: RunMemory, plan: RunPlan, gpu: Gpu, advice: Advice | None) -> list[str]:
    """Return whether a run fits a GPU and the machine, and the options that make it fit, with lines to paste."""
    size, warning = file_size(with_reserve(plan.peak)), memory.host_problem(plan)
    is_small = fits(plan.peak, GIB * gpu.gib)
    lines = [f"it {'fits' if is_small else 'does not fit'} {gpu}: {size} are needed"]
    if is_small and warning is None:
        return lines
    lines += [] if warning is None else [f"it does not fit the host memory: {warning}"]
    if advice is None and is_small:
        more = "`finetrainers estimate --host SIZE` plans for a machine with more host memory"
        return [*lines, f"no set of options fits both the GPU and the host memory; {more}"]
    if advice is None:
        return [*lines[:-1], *advice_lines(None, lines[-1], memory.other_remedies(plan))]
    budget = gpu.name.replace(" G", "G").replace(" ", "-")
    lines += advice_lines(advice, "it fits with")
    return [*lines, f"or let the run choose such options: --memory_budget {budget}"]


def advice_lines(advice: Advice | None, heading: str, remedies: Sequence[str] = ()) -> list[str]:
    """Return the options of an advice, each with its saving and cost, and lines to paste; or the other remedies."""
    if advice is None:
        return [heading, "no set of options makes it fit. Use one of:", *(f"  * {remedy}" for remedy in remedies)]
    choices = dict(advice.outcome.chosen)
    lines = [f"{heading} {with_reserve(advice.outcome.peak) / GIB:.1f} GiB:"]
    for applied in advice.switches:
        saving = f"{_describe_saving(applied)}; {_describe_slowdown(applied)}; {applied.switch.cost}"
        chosen = [f"      chosen: {choices.pop(name)}" for name in applied.switch.options if name in choices]
        lines += [f"  {applied.switch.flags}", f"      {saving}", *chosen]
    lines += [f"  also chosen: {name}, {choice}" for name, choice in choices.items()]
    values = {name: value for applied in advice.switches for name, value in applied.switch.options.items()}
    lines += ["as flags:", f"  {' '.join(applied.switch.flags for applied in advice.switches)}"]
    return [*lines, "in the config file:", *(f"  {line}" for line in tomli_w.dumps(values).splitlines())]


def _describe_saving(applied: Chosen) -> str:
    """Return the memory that a switch saves, as text: of the GPU, or else of the host."""
    if applied.saves <= 0 < applied.saves_host:
        return f"saves {file_size(applied.saves_host)} of host memory"
    return f"saves {file_size(max(0.0, applied.saves))}"


def _describe_slowdown(applied: Chosen) -> str:
    """Return the increase of step time by a switch, as text."""
    slowdown = applied.switch.slowdown
    increase = round(applied.slower + (slowdown or 0.0))
    if slowdown is None:
        return f"{increase:+d} % time, rest not measured" if increase else "slowdown not measured"
    return f"{increase:+d} % time" if increase else "training as fast"


def as_json(memory: RunMemory, settings: AutoSettings, gpu: Gpu | None, advice: Advice | None) -> dict[str, Any]:
    """Return the estimate for programs; sizes in bytes."""
    needs, plan = memory.disk(), settings.plan
    estimate: dict[str, Any] = {
        "phases": {
            phase: {
                "gpu": round(size), "host": round(plan.host[phase]),
                "parts": {part: round(value) for part, value in plan.phases[phase].items()},
            }
            for phase, size in plan.peaks.items()
        },
        "peak": {"phase": plan.peak_phase, "allocated": round(plan.peak), "reserved": round(with_reserve(plan.peak))},
        "processes": launched_processes(),
        "machine_host": round(plan.machine_bytes),
        "fits_host": memory.host_problem(plan) is None,
        "disk": {
            "checkpoint": needs.checkpoint, "num_checkpoints": needs.num_checkpoints, "result": needs.result,
            "samples": needs.samples, "cache": round(memory.cache_bytes()),
        },
        "unknown": list(plan.unknown),
        **_settings_json(settings),
    }  # fmt: skip
    if gpu is not None:
        estimate["gpu"], estimate["gpu_gib"] = gpu.name, gpu.gib
        estimate["fits"] = fits(plan.peak, GIB * gpu.gib)
        if not memory.fits(plan, gpu.gib):
            estimate["advice"] = None if advice is None else _advice_json(advice)
    return estimate


def _settings_json(settings: AutoSettings) -> dict[str, Any]:
    """Return the choices for `auto`; `for_gpu` is false if no GPU is known."""
    record: dict[str, Any] = {}
    if settings.swapped is not None:
        has_gpu = settings.machine is not None
        record["blocks_to_swap"] = {"blocks": settings.swapped, "of": settings.num_blocks, "for_gpu": has_gpu}
    if settings.decoding:
        record["decoding"] = list(settings.decoding)
    if settings.activations is not None:
        choice = settings.activations
        record["activation_memory"] = {
            "setting": choice.stored, "blocks": choice.number, "of": choice.total, "host": round(choice.host),
            "slowdown_percent": round(100 * choice.slower, 1), "fits": choice.fits,
        }  # fmt: skip
    return record


def _advice_json(advice: Advice) -> dict[str, Any]:
    return {
        "reserved": round(with_reserve(advice.outcome.peak)),
        "slowdown": advice.slowdown,
        "chosen": dict(advice.outcome.chosen),
        "switches": [
            {
                "options": dict(applied.switch.options), "saves": round(applied.saves),
                "saves_host": round(applied.saves_host),
                "planned_slowdown_percent": round(applied.slower, 1), "slowdown_percent": applied.switch.slowdown,
                "cost": applied.switch.cost,
            }
            for applied in advice.switches
        ],
    }  # fmt: skip
