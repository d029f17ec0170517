"""Automatic options of a run (`auto`), chosen by the free GPU memory when all but the trained network is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import MEMORY, TrainConfig
from finetrainers.config.target import TargetDevice, target_device
from finetrainers.memory.activation_auto import ASSUMED_FLOPS, ASSUMED_LINK, HOST_SHARE, UTILIZATION, with_choice
from finetrainers.memory.activation_plan import LAUNCH_S, Machine
from finetrainers.memory.automatic import AutoSettings, with_blocks_to_swap, with_samples
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import fits, with_reserve, without_reserve
from finetrainers.methods.registry import method_spec
from finetrainers.models.spec import ModelSpec
from finetrainers.parallel.strategy import Strategy
from finetrainers.utils.host_memory import read_host_memory
from finetrainers.utils.launch import launched_rank, local_world_size
from finetrainers.utils.phases import label
from finetrainers.utils.process_state import free_memory
from finetrainers.utils.text import file_size

from .chosen import is_open
from .memory_lines import advice_lines
from .memory_plan import RunMemory, run_memory, with_open_options
from .once_per_node import once_per_node
from .preflight import ResolvedRun, plan_work_once, preflight
from .start_report import print_chosen, print_line
from .throughput import peak_flops

#: Bytes of the copies that measure the link.
_PROBE_BYTES = 64 << 20


def within_budget(
    checked: ResolvedRun, check: Callable[[TrainConfig], ResolvedRun] | None = None, *, host_gib: float | None = None
) -> ResolvedRun:
    """Return the run with the cheapest options that fit `memory_budget`, and print them.

    Args:
        checked: the run.
        check: function that checks the run with other options; by default `preflight`, without reading data again.
        host_gib: host memory of the machine; default: of this one.

    Raises:
        ConfigError: nothing fits.
    """
    config, budget = checked.config, checked.config.memory.memory_budget
    if budget is None:
        return checked
    # What a GPU chooses by itself comes after the budget, which knows the price of everything.
    memory, decided = run_memory(checked, host_gib), config.with_values({"fit_gpu": False})
    plan = memory.plan(decided)
    peak = plan.peak
    needed = f"{with_reserve(peak) / GIB:.1f}"
    if fits(peak, GIB * budget):
        print_line(f"memory budget: {needed} of {budget:g} GiB are planned; no option is changed")
        return checked
    advice = memory.advice(budget, device=target_device(config), config=decided)
    if advice is None:
        heading = (
            f"{needed} GiB are planned, more than {budget:g}, and {file_size(memory.host)} of host memory are there"
        )
        lines = advice_lines(None, heading, memory.other_remedies(plan))
        raise ConfigError([Problem("--memory_budget", "\n  ".join(lines), "too_large")])
    for line in advice_lines(advice, f"memory budget: {needed} GiB are planned, more than {budget:g}. Chosen:"):
        print_line(line)
    values = {name: value for applied in advice.switches for name, value in applied.switch.options.items()}
    options, check = config.with_values(values), check or partial(preflight, planner=plan_work_once(checked))
    rechecked = once_per_node(partial(check, options), options, timeout_s=options.run.idle_timeout)
    earlier = [warning for warning in checked.warnings if warning not in rechecked.warnings]
    return replace(
        rechecked,
        config=rechecked.config.with_chosen(values, MEMORY),
        unseen=checked.unseen,
        parts=checked.parts,
        warnings=[*rechecked.warnings, *earlier],
    )


def choose_settings(checked: ResolvedRun, parallel: Strategy) -> tuple[TrainConfig, AutoSettings | None]:
    """Return the configuration with each `auto` replaced by the run's choice, and that choice; every rank must call it.

    The choice is None if the options leave nothing open, or the device is a CPU without a budget, where nothing is
    moved or recomputed.
    """
    config, on_gpu = checked.config, chooses_on(parallel.device)
    config = with_open_options(config) if on_gpu else config
    if config.validation.enable_model_cpu_offload is None and not (on_gpu and parallel.weights_are_movable):
        config = with_samples(config, offloads=False)
    method = method_spec(config)
    leaves_open = (
        "auto" in (config.memory.blocks_to_swap, config.memory.activation_memory),
        config.validation.enable_model_cpu_offload is None and checked.sampled,
        method.samples and None in (config.model.enable_slicing, config.model.enable_tiling),
    )
    if not any(leaves_open):
        return config, None
    if not on_gpu and config.memory.memory_budget is None:
        return _resolve_on_cpu(config), None
    memory = run_memory(checked)
    memory.device = TargetDevice("cuda" if on_gpu else parallel.device.type)
    memory.machine = _machine(config, memory, parallel)
    settings = memory.choose(config)
    print_chosen(record_choices(checked.config, settings), MEMORY)
    if settings.repeats is False:
        print_line("note: the memory options that the run had chosen do not fit here, so they were chosen again")
    proposes = on_gpu and config.memory.fit_gpu and not settings.fits
    _print_settings(settings, warns=not proposes)
    if proposes and launched_rank() == 0:
        _print_proposal(memory, settings)
    return settings.config.model_copy(update={"model": config.model}), settings


def chooses_on(device: torch.device) -> bool:
    """Return whether a run chooses memory options on this device without being asked."""
    return device.type == "cuda"


def record_choices(config: TrainConfig, settings: AutoSettings | None) -> TrainConfig:
    """Return a copy of a run's configuration with its choices for open options that leave results the same."""
    choices = {} if settings is None else settings.exact_choices
    return config.with_chosen({name: value for name, value in choices.items() if is_open(config, name)}, MEMORY)


def apply_decoding_settings(settings: AutoSettings | None, spec: ModelSpec, size: tuple[int, int, int]) -> None:
    """Have the VAE decode clips of a size as the settings say; as after an OOM, this process remembers it."""
    for name, sizes in (("enable_slicing", spec.vae_one_by_one), ("enable_tiling", spec.vae_too_large)):
        if settings is not None and name in settings.decoding:
            sizes.add(size)


def link_bandwidth(device: torch.device) -> float:
    """Return bytes per second of copies between pinned host memory and a CUDA device, in the slower direction."""
    host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    remote = torch.empty_like(host, device=device)
    slowest = 0.0
    for target, source in ((remote, host), (host, remote)):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        target.copy_(source, non_blocking=True)  # the first one may set up the link
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        slowest = max(slowest, start.elapsed_time(end) / 1000)
    return _PROBE_BYTES / slowest


def _machine(config: TrainConfig, memory: RunMemory, parallel: Strategy) -> Machine:
    """Return the minimum over all processes, in the estimate's terms: loaded networks count as planned."""
    device, budget, other_bytes = parallel.device, config.memory.memory_budget, memory.plan().other_networks
    free_memory()
    free, loaded_bytes, flops, link = float("inf"), other_bytes, ASSUMED_FLOPS, ASSUMED_LINK
    if device.type == "cuda":
        free = without_reserve(torch.cuda.mem_get_info(device)[0])
        loaded_bytes = float(torch.cuda.memory_allocated(device))
        if config.memory.activation_memory == "auto":
            peak = peak_flops(device)
            flops = flops if peak is None else UTILIZATION * peak
            link = link_bandwidth(device)
    if budget is not None:
        free = min(free, without_reserve(GIB * budget) - loaded_bytes)
    host = HOST_SHARE * read_host_memory().available / local_world_size()
    shares = parallel.gather_objects([(free, host, flops, link)])
    free, host, flops, link = map(min, zip(*shares, strict=True))
    return Machine(free + other_bytes, host, flops, link, LAUNCH_S if device.type == "cuda" else 0.0)


def _resolve_on_cpu(config: TrainConfig) -> TrainConfig:
    """Return the configuration with nothing moved: a CPU has no device memory to save."""
    memory = config.memory
    if memory.blocks_to_swap == "auto":
        config = with_blocks_to_swap(config, 0)
    if memory.activation_memory == "auto":
        print_line("activation memory: none, since a CPU has no device memory to save")
        config = with_choice(config, None)
    return config


def _print_proposal(memory: RunMemory, settings: AutoSettings) -> None:
    """Print that the run does not fit with the same results, and what makes it fit."""
    assert settings.machine is not None
    limit = settings.machine.device
    heading = (
        f"warning: {file_size(settings.plan.peak)} are planned in the phase {label(settings.plan.peak_phase)}, and "
        f"tensors may take {file_size(limit)}"
    )
    advice = memory.advice(with_reserve(limit) / GIB, device=memory.device)
    heading = heading if advice is None else f"{heading}. It fits with"
    for line in advice_lines(advice, heading, memory.other_remedies(settings.plan)):
        print_line(line)


def _print_settings(settings: AutoSettings, *, warns: bool) -> None:
    """Print the chosen settings and, if `warns`, those that do not fit."""
    machine, plan = settings.machine, settings.plan
    assert machine is not None
    if settings.offloads_samples:
        print_line(
            "note: samples are drawn with the model's parts in host memory: they would not fit the "
            f"{file_size(machine.device)} that tensors may take otherwise (--no-enable_model_cpu_offload)"
        )
    for name in settings.decoding:
        print_line(
            f"note: {settings.words[name]}: all at once would not fit the {file_size(machine.device)} that tensors may "
            f"take (--no-{name})"
        )
    if (choice := settings.activations) is not None:
        mark = "" if choice.fits or not warns else "warning: "
        print_line(f"{mark}activation memory: {choice.what}: {choice.why(machine)}")
    if warns and settings.swapped is not None and not settings.fits:
        print_line(
            f"warning: --blocks_to_swap auto: with {settings.words['blocks_to_swap']} swapped {file_size(plan.peak)} "
            f"are planned in the phase {label(plan.peak_phase)}, and tensors may take {file_size(machine.device)}; see "
            "docs/how-to/memory.md"
        )
