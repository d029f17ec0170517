"""What a run chooses itself (`auto`), when all but the network that is trained is loaded: by what its GPUs have free then."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.target import target_device
from finetrainers.memory.activation_auto import ASSUMED_FLOPS, ASSUMED_LINK, HOST_SHARE, UTILIZATION, with_choice
from finetrainers.memory.activation_plan import Machine
from finetrainers.memory.advice import OTHER_WAYS
from finetrainers.memory.automatic import Automatic, with_blocks_to_swap, with_samples
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import fits, for_tensors, reserved
from finetrainers.methods.registry import method_spec
from finetrainers.models.spec import ModelSpec
from finetrainers.parallel.sharding import expected_split
from finetrainers.parallel.strategy import Strategy
from finetrainers.utils.host_memory import room
from finetrainers.utils.launch import launched_processes, local_world_size
from finetrainers.utils.phases import label
from finetrainers.utils.process_state import free_memory
from finetrainers.utils.text import file_size

from .memory_lines import advice_lines
from .memory_plan import RunMemory, planned_gib, run_memory
from .once_per_node import once_per_node
from .preflight import Preflight, preflight
from .start_report import print_line, print_warnings
from .throughput import peak_flops

#: Bytes of the copies that measure the link.
_PROBE_BYTES = 64 << 20


def within_budget(checked: Preflight, check: Callable[[TrainConfig], Preflight] = preflight) -> Preflight:
    """Return the run with the cheapest options that fit `memory_budget`, or with `fit_gpu` the GPU; they are printed.

    Args:
        checked: the run.
        check: what checks the run with other options.

    Raises:
        ConfigError: nothing fits `memory_budget`.
    """
    config = checked.config
    if config.memory.memory_budget is not None:
        chosen = _chosen_for_budget(checked, config.memory.memory_budget)
    elif config.memory.fit_gpu and not checked.family.configs_not_here(config.model):
        # One process asks: a CUDA context of each would stay on the first GPU.
        chosen = once_per_node(lambda: _chosen_for_gpu(checked), config, timeout_s=config.run.idle_timeout)
    else:
        return checked
    if chosen == config:
        return checked
    again = once_per_node(lambda: check(chosen), chosen, timeout_s=chosen.run.idle_timeout)
    lost = [warning for warning in checked.warnings if warning not in again.warnings]
    return replace(again, unseen=checked.unseen, warnings=[*again.warnings, *lost])


def _chosen_for_budget(checked: Preflight, budget: float) -> TrainConfig:
    """Return the options that fit a budget in GiB.

    Raises:
        ConfigError: nothing fits.
    """
    memory = run_memory(checked)
    peak = memory.plan().peak
    needed = reserved(peak) / GIB
    if fits(peak, GIB * budget):
        print_line(f"memory budget: {needed:.1f} of {budget:g} GiB are planned; no option is changed")
        return checked.config
    advice = memory.advice(budget, device=target_device(checked.config))
    if advice is None:
        ways = "".join(f"\n    * {way}" for way in OTHER_WAYS)
        message = (
            f"{needed:.1f} GiB are planned, more than {budget:g}, and no set of options makes it fit. What does:{ways}"
        )
        raise ConfigError([Problem("--memory_budget", message)])
    for line in advice_lines(advice, f"memory budget: {needed:.1f} GiB are planned, more than {budget:g}. Chosen:"):
        print_line(line)
    return advice.config


def _chosen_for_gpu(checked: Preflight) -> TrainConfig:
    """Return the options that fit the GPU and leave results the same; those of the run if it fits, or nothing fits."""
    config = checked.config
    gib = planned_gib(config)
    if gib is None:
        return config
    if launched_processes() > local_world_size():
        gib = math.floor(gib)  # drivers of several machines report slightly different sizes
    memory = run_memory(checked)
    peak = memory.plan().peak
    if fits(peak, GIB * gib):
        return config
    needed = f"{file_size(reserved(peak))} are planned, and the GPU has {gib:.1f} GiB"
    advice = memory.advice(gib, device=target_device(config), exact=True)
    if advice is None:
        print_warnings(
            [
                f"{needed}: no memory options that leave results the same make the run fit; `finetrainers estimate --gpu "
                f"{gib:.1f}GiB` searches among all options"
            ]
        )
        return config
    heading = f"note: {needed}. Chosen, with the same results (--no-fit_gpu changes nothing):"
    for line in advice_lines(advice, heading):
        print_line(line)
    return advice.config


def chosen_by_run(checked: Preflight, parallel: Strategy) -> tuple[TrainConfig, Automatic | None]:
    """The configuration with what the run chooses in the place of every `auto`, and the choice; every rank must call it.

    None: the options leave nothing open; or the device is a CPU without a budget, where nothing is moved or recomputed.
    """
    config, on_gpu = checked.config, parallel.device.type == "cuda"
    if config.validation.enable_model_cpu_offload is None and not (on_gpu and parallel.weights_are_plain):
        config = with_samples(config, offloads=False)
    swaps, stores = config.memory.blocks_to_swap == "auto", config.memory.activation_memory == "auto"
    samples = config.validation.enable_model_cpu_offload is None and bool(checked.sampled)
    decodes = method_spec(config).samples and None in (config.model.enable_slicing, config.model.enable_tiling)
    varies = bool(method_spec(config).variants(config, expected_split(config.parallel)))
    if not (swaps or stores or samples or decodes or varies):
        return config, None
    if not on_gpu and config.memory.memory_budget is None:
        config = _on_cpu(config)
        return (_variant_on_cpu(config, checked, parallel) if varies else config), None
    memory = run_memory(checked)
    memory.machine = _machine(config, memory, parallel)
    found = memory.choose(config)
    _print(found)
    return found.config.model_copy(update={"model": config.model}), found


def fit_decoding(found: Automatic | None, spec: ModelSpec, size: tuple[int, int, int]) -> None:
    """Have the VAE decode clips of a size as was chosen; as after an OOM, this process remembers it."""
    for name, sizes in (("enable_slicing", spec.vae_one_by_one), ("enable_tiling", spec.vae_too_large)):
        if found is not None and name in found.decoding:
            sizes.add(size)


def link_bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy between pinned host memory and a CUDA device, in the slower direction."""
    host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    slowest = 0.0
    for target, source in ((there, host), (host, there)):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        target.copy_(source, non_blocking=True)  # the first one may set up the link
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        slowest = max(slowest, start.elapsed_time(end) / 1000)
    return _PROBE_BYTES / slowest


def _machine(config: TrainConfig, memory: RunMemory, parallel: Strategy) -> Machine:
    """The least that any process has, in the estimate's terms: what is loaded counts as it was planned."""
    device, budget, others = parallel.device, config.memory.memory_budget, memory.plan().other_networks
    free_memory()
    left, loaded, flops, link = float("inf"), others, ASSUMED_FLOPS, ASSUMED_LINK
    if device.type == "cuda":
        left, loaded = for_tensors(torch.cuda.mem_get_info(device)[0]), float(torch.cuda.memory_allocated(device))
        if config.memory.activation_memory == "auto":
            peak = peak_flops(device)
            flops = flops if peak is None else UTILIZATION * peak
            link = link_bandwidth(device)
    if budget is not None:
        left = min(left, for_tensors(GIB * budget) - loaded)
    host = HOST_SHARE * room().available / local_world_size()
    shares = parallel.gather_objects([(left, host, flops, link)])
    left, host, flops, link = (min(numbers) for numbers in zip(*shares, strict=True))
    return Machine(left + others, host, flops, link)


def _on_cpu(config: TrainConfig) -> TrainConfig:
    """Everything in its place: a CPU has no device memory to save."""
    memory = config.memory
    if memory.blocks_to_swap == "auto":
        config = with_blocks_to_swap(config, 0)
    if memory.activation_memory == "auto":
        print_line("activation memory: none, since a CPU has no device memory to save")
        config = with_choice(config, None)
    return config


def _variant_on_cpu(config: TrainConfig, checked: Preflight, parallel: Strategy) -> TrainConfig:
    """The variant of the method that fits the memory of the least machine."""
    least = min(parallel.gather_objects([HOST_SHARE * room().available / local_world_size()]))
    found = run_memory(checked).choose(config, machine=Machine(least, least, ASSUMED_FLOPS, ASSUMED_LINK))
    _print_variant(found)
    return config if found.variant is None else found.variant.config


def _print_variant(found: Automatic) -> None:
    """The variant of the method, and whether it fits."""
    machine, variant = found.machine, found.variant
    if machine is None or variant is None:
        return
    planned = f"{file_size(found.plan.peak)} of {file_size(machine.device)}"
    if found.fits:
        print_line(f"{variant.option.replace('_', ' ')}: {variant.what}; the fastest that fits, {planned}")
    else:
        print_warnings(
            [f"--{variant.option} auto: {variant.value} takes the least memory, and does not fit either: {planned}"]
        )


def _print(found: Automatic) -> None:
    """What was chosen, and whether it fits."""
    machine, plan = found.machine, found.plan
    assert machine is not None
    _print_variant(found)
    if found.offloads_samples:
        print_line(
            f"note: samples are drawn with the model's parts in host memory: they would not fit the {file_size(machine.device)} "
            "that tensors may take otherwise (--no-enable_model_cpu_offload)"
        )
    for name in found.decoding:
        print_line(
            f"note: {found.words[name]}: all at once would not fit the {file_size(machine.device)} that tensors may take "
            f"(--no-{name})"
        )
    if (choice := found.activations) is not None:
        say = print_line if choice.fits else lambda text: print_warnings([text])
        say(f"activation memory: {choice.what}: {choice.why(machine)}")
    if found.swapped is not None and not found.fits:
        print_warnings(
            [
                f"--blocks_to_swap auto: with {found.words['blocks_to_swap']} swapped {file_size(plan.peak)} are planned in "
                f"the phase {label(plan.peak_phase)}, and tensors may take {file_size(machine.device)}; see "
                "docs/how-to/memory.md"
            ]
        )
