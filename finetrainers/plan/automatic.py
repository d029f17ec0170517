"""Automatic options of a run (`auto`), chosen by the free GPU memory when all but the trained network is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.target import target_device
from finetrainers.memory.activation_auto import ASSUMED_FLOPS, ASSUMED_LINK, HOST_SHARE, UTILIZATION, with_choice
from finetrainers.memory.activation_plan import Machine
from finetrainers.memory.advice import OTHER_REMEDIES
from finetrainers.memory.automatic import AutoSettings, with_blocks_to_swap, with_samples
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import fits, with_reserve, without_reserve
from finetrainers.methods.registry import method_spec
from finetrainers.models.spec import ModelSpec
from finetrainers.parallel.sharding import expected_split
from finetrainers.parallel.strategy import Strategy
from finetrainers.utils.host_memory import read_host_memory
from finetrainers.utils.launch import launched_processes, local_world_size
from finetrainers.utils.phases import label
from finetrainers.utils.process_state import free_memory
from finetrainers.utils.text import file_size

from .memory_lines import advice_lines
from .memory_plan import RunMemory, planned_gib, run_memory
from .once_per_node import once_per_node
from .preflight import ResolvedRun, plan_work_once, preflight
from .start_report import print_line
from .throughput import peak_flops

#: Bytes of the copies that measure the link.
_PROBE_BYTES = 64 << 20


def within_budget(
    checked: ResolvedRun, check: Callable[[TrainConfig], ResolvedRun] | None = None, *, host_gib: float | None = None
) -> ResolvedRun:
    """Return the run with the cheapest options that fit `memory_budget`, or with `fit_gpu` the GPU, and print them.

    Args:
        checked: the run.
        check: function that checks the run with other options; by default `preflight`, without reading data again.
        host_gib: host memory of the machine; default: of this one.

    Raises:
        ConfigError: nothing fits `memory_budget`.
    """
    config = checked.config
    if config.memory.memory_budget is not None:
        options = _options_for_budget(checked, config.memory.memory_budget, host_gib)
    elif config.memory.fit_gpu and not checked.family.configs_not_here(config.model):
        # One process asks: a CUDA context of each would stay on the first GPU.
        options = once_per_node(lambda: _options_for_gpu(checked, host_gib), config, timeout_s=config.run.idle_timeout)
    else:
        return checked
    if options == config:
        return checked
    check = check or partial(preflight, planner=plan_work_once(checked))
    rechecked = once_per_node(partial(check, options), options, timeout_s=options.run.idle_timeout)
    earlier = [warning for warning in checked.warnings if warning not in rechecked.warnings]
    return replace(rechecked, unseen=checked.unseen, warnings=[*rechecked.warnings, *earlier])


def _options_for_budget(checked: ResolvedRun, budget: float, host_gib: float | None) -> TrainConfig:
    """Return the options that fit a budget in GiB.

    Raises:
        ConfigError: nothing fits.
    """
    memory = run_memory(checked, host_gib)
    peak = memory.plan().peak
    needed_gib = with_reserve(peak) / GIB
    if fits(peak, GIB * budget):
        print_line(f"memory budget: {needed_gib:.1f} of {budget:g} GiB are planned; no option is changed")
        return checked.config
    advice = memory.advice(budget, device=target_device(checked.config))
    if advice is None:
        remedies = "".join(f"\n    * {remedy}" for remedy in OTHER_REMEDIES)
        message = (
            f"{needed_gib:.1f} GiB are planned, more than {budget:g}, and no set of options makes it fit on a machine "
            f"with {file_size(memory.host)} of memory. What does:{remedies}"
        )
        raise ConfigError([Problem("--memory_budget", message, "too_large")])
    for line in advice_lines(advice, f"memory budget: {needed_gib:.1f} GiB are planned, more than {budget:g}. Chosen:"):
        print_line(line)
    return advice.config


def _options_for_gpu(checked: ResolvedRun, host_gib: float | None) -> TrainConfig:
    """Return options that fit the GPU with the same results; the run's own if it fits already, or if nothing fits."""
    config = checked.config
    gib = planned_gib(config)
    if gib is None:
        return config
    if launched_processes() > local_world_size():
        gib = math.floor(gib)  # drivers of several machines report slightly different sizes
    memory = run_memory(checked, host_gib)
    peak = memory.plan().peak
    if fits(peak, GIB * gib):
        return config
    message = f"{file_size(with_reserve(peak))} are planned, and the GPU has {gib:.1f} GiB"
    advice = memory.advice(gib, device=target_device(config), exact=True)
    if advice is None:
        print_line(
            f"warning: {message}: no memory options that leave results the same make the run fit; `finetrainers "
            f"estimate --gpu {gib:.1f}GiB` searches among all options"
        )
        return config
    heading = f"note: {message}. Chosen, with the same results (--no-fit_gpu changes nothing):"
    for line in advice_lines(advice, heading):
        print_line(line)
    return advice.config


def choose_settings(checked: ResolvedRun, parallel: Strategy) -> tuple[TrainConfig, AutoSettings | None]:
    """Return the configuration with each `auto` replaced by the run's choice, and that choice; every rank must call it.

    The choice is None if the options leave nothing open, or the device is a CPU without a budget, where nothing is
    moved or recomputed.
    """
    config, on_gpu = checked.config, parallel.device.type == "cuda"
    if config.validation.enable_model_cpu_offload is None and not (on_gpu and parallel.weights_are_movable):
        config = with_samples(config, offloads=False)
    method = method_spec(config)
    has_variants = bool(method.variants(config, expected_split(config.parallel)))
    is_open = (
        has_variants,
        "auto" in (config.memory.blocks_to_swap, config.memory.activation_memory),
        config.validation.enable_model_cpu_offload is None and checked.sampled,
        method.samples and None in (config.model.enable_slicing, config.model.enable_tiling),
    )
    if not any(is_open):
        return config, None
    if not on_gpu and config.memory.memory_budget is None:
        return _resolve_on_cpu(config, checked, parallel, has_variants=has_variants), None
    memory = run_memory(checked)
    memory.machine = _machine(config, memory, parallel)
    settings = memory.choose(config)
    _print_settings(settings)
    return settings.config.model_copy(update={"model": config.model}), settings


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
    return Machine(free + other_bytes, host, flops, link)


def _resolve_on_cpu(
    config: TrainConfig, checked: ResolvedRun, parallel: Strategy, *, has_variants: bool
) -> TrainConfig:
    """Return the configuration with nothing moved, and the method's variant that fits the smallest machine's memory.

    A CPU has no device memory to save.
    """
    memory = config.memory
    if memory.blocks_to_swap == "auto":
        config = with_blocks_to_swap(config, 0)
    if memory.activation_memory == "auto":
        print_line("activation memory: none, since a CPU has no device memory to save")
        config = with_choice(config, None)
    if not has_variants:
        return config
    host_bytes = min(parallel.gather_objects([HOST_SHARE * read_host_memory().available / local_world_size()]))
    settings = run_memory(checked).choose(config, machine=Machine(host_bytes, host_bytes, ASSUMED_FLOPS, ASSUMED_LINK))
    _print_variant(settings)
    return config if settings.variant is None else settings.variant.config


def _print_variant(settings: AutoSettings) -> None:
    """Print the variant of the method, and whether it fits."""
    machine, variant = settings.machine, settings.variant
    if machine is None or variant is None:
        return
    share = f"{file_size(settings.plan.peak)} of {file_size(machine.device)}"
    if settings.fits:
        print_line(f"{variant.option.replace('_', ' ')}: {variant.what}; the fastest that fits, {share}")
    else:
        print_line(
            f"warning: --{variant.option} auto: {variant.value} takes the least memory, and does not fit either: "
            f"{share}"
        )


def _print_settings(settings: AutoSettings) -> None:
    """Print the chosen settings, and whether they fit."""
    machine, plan = settings.machine, settings.plan
    assert machine is not None
    _print_variant(settings)
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
        mark = "" if choice.fits else "warning: "
        print_line(f"{mark}activation memory: {choice.what}: {choice.why(machine)}")
    if settings.swapped is not None and not settings.fits:
        print_line(
            f"warning: --blocks_to_swap auto: with {settings.words['blocks_to_swap']} swapped {file_size(plan.peak)} "
            f"are planned in the phase {label(plan.peak_phase)}, and tensors may take {file_size(machine.device)}; see "
            "docs/how-to/memory.md"
        )
