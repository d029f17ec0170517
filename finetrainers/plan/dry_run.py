"""The dry run: the training data and the memory of a run, determined without weights."""

from __future__ import annotations

from dataclasses import replace

import tomli_w
from torch import nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import dump_toml
from finetrainers.config.root import MEMORY, TrainConfig, changed_options
from finetrainers.config.target import planned_gpu, target_device
from finetrainers.utils.addresses import resolve
from finetrainers.utils.text import plural

from .automatic import record_choices
from .capabilities import capability_problems, run_needs
from .init_distributed import check_device, check_strategy
from .memory_lines import fit_lines, memory_lines
from .memory_plan import RunMemory
from .preflight import ResolvedRun, collecting_problems
from .ready import check_classes, examine_weights, missing_rewards
from .room import check_trainable, room_warnings
from .start_report import (
    print_chosen,
    print_data,
    print_first_line,
    print_line,
    print_origin,
    print_remarks,
    sizes_on_disk,
)
from .trainable import network_without_weights, num_quantizable, trainable_dtype, trainable_parameters

#: Options of this invocation, not of the run.
_COMMAND_OPTIONS = ("dry_run", "gpu", "verbose")


def dry_run_report(checked: ResolvedRun) -> None:
    """Build what can be built without weights; print the plan, the options, and last whether all was checked.

    Raises:
        ConfigError: the model's parts do not fit the options (a LoRA target that matches nothing, say).
    """
    config, unseen = checked.config, unseen_reason(checked)
    checked, transformer = build_without_weights(checked)
    packaged = None if unseen is None else with_packaged_configs(checked)
    print_first_line(checked, before="dry run: ")
    print_data(checked)
    steps = config.training.train_steps
    print_line(
        f"{plural(steps, 'step') if steps else plural(config.training.train_epochs, 'epoch')} of "
        f"{checked.plan.step_of(config)}; output in {config.run.output_dir}"
    )
    print_origin(checked)
    if unseen is None:
        checked = _print_memory(checked, transformer)
        config = checked.config
    elif packaged is not None:
        _print_memory(packaged, network_without_weights(packaged))
    print_remarks(checked)
    _print_options(config)
    print_line(_conclude(checked, unseen, is_planned=packaged is not None))


def build_without_weights(checked: ResolvedRun) -> tuple[ResolvedRun, nn.Module]:
    """Build the network of a run without weights, trainable parts attached; return the run and the network.

    The returned run also has warnings about the files that it would read and write.

    Raises:
        ConfigError: the model's parts do not fit the options.
    """
    unseen = unseen_reason(checked)
    problems: list[Problem] = []
    with collecting_problems(problems):
        is_here = not target_device(checked.config).is_elsewhere
        if is_here:
            check_device()
        parallel = check_strategy(checked.config, checked.start)
        if unseen is None and is_here:
            checked.spec.check_attention(parallel.device, parallel.compute_dtype(trainable_dtype(checked.config)))
    with collecting_problems(problems):
        if unseen is None:
            checked = examine_weights(checked)
        else:
            check_classes(checked)
            family = checked.family
            problems += capability_problems(run_needs(checked), resolve(family.spec), name=family.name)
    with collecting_problems(problems):
        transformer = network_without_weights(checked, stand_in=unseen is not None)
        if unseen is None:
            check_trainable(checked, transformer)
    if problems:
        raise ConfigError(problems)
    if unseen is not None:
        return checked, transformer
    return replace(checked, warnings=[*checked.warnings, *room_warnings(checked, transformer)]), transformer


def unseen_reason(checked: ResolvedRun) -> str | None:
    """Return the reason why the model itself is unknown, or None if its configs are on this disk."""
    missing = checked.family.configs_not_here(checked.config.model)
    if checked.unseen is None and missing:
        return f"{missing[0][1]} is not on this disk"
    return checked.unseen


def _print_memory(checked: ResolvedRun, transformer: nn.Module) -> ResolvedRun:
    """Print sizes, memory and disk of a run; return it with the memory options that it chooses, and a warning.

    The warning is about a machine with too little host memory.
    """
    trained = sum(p.numel() for p in trainable_parameters(transformer).values())
    total = sum(p.numel() for p in transformer.parameters())
    print_line(f"transformer: {total / 1000000.0:.4g}M parameters, {trained / 1000000.0:.4g}M trainable")
    config = checked.config
    if config.memory.quantize_frozen != "none":
        weights = num_quantizable(transformer, config, checked.spec)
        print_line(f"  {weights / 1000000.0:.4g}M of them quantized to {config.memory.quantize_frozen}")
    memory, gpu = RunMemory(checked, transformer), planned_gpu(config)
    settings = memory.choose()
    lines = memory_lines(memory, settings)
    if gpu is not None:
        fits = memory.fits(settings.plan, gpu.gib)
        advice = None if fits else memory.advice(gpu.gib, device=target_device(config))
        lines += fit_lines(memory, settings.plan, gpu, advice)
    for line in lines:
        print_line(line)
    problem = memory.host_problem(settings.plan) if gpu is None else None
    if problem is not None:
        checked = replace(checked, warnings=[*checked.warnings, problem])
    if memory.device.type != "cuda":
        return checked
    config = record_choices(config, settings)
    print_chosen(config, MEMORY)
    return replace(checked, config=config)


def _print_options(config: TrainConfig) -> None:
    if config.run.verbose:
        print_line("\nall options:\n" + dump_toml(config))
        return
    changed = changed_options(config).items()
    options = {name: value for name, value in changed if name not in (*_COMMAND_OPTIONS, *config.chosen)}
    print_line("\noptions that differ from their defaults (all: --dry_run --verbose):")
    print_line(tomli_w.dumps({name: value for name, value in options.items() if value is not None}))


def with_packaged_configs(checked: ResolvedRun) -> ResolvedRun | None:
    """Return the run with the configs of its published model that are packaged, or None if there are none."""
    model = checked.config.model.for_estimate()
    if checked.family.configs_not_here(model):
        return None
    return replace(checked, config=checked.config.model_copy(update={"model": model}))


def _conclude(checked: ResolvedRun, unseen: str | None, *, is_planned: bool) -> str:
    """Return the last line; it claims nothing about unchecked parts."""
    if unseen is not None:
        memory = "Memory is estimated by packaged configs" if is_planned else "Memory cannot be estimated"
        return (
            f"model config unavailable: {unseen}; options checked against the published "
            f"{checked.config.model.model_name} configs, LoRA targets against a tiny model. {memory}"
        )
    missing = [name for name, size in sizes_on_disk(checked).items() if size is None]
    missing += missing_rewards(checked)
    if missing:
        return f"everything checks out, by the model's configs; weights not on this disk yet: {', '.join(missing)}"
    return "everything checks out" + (f", with {plural(len(checked.warnings), 'warning')}" if checked.warnings else "")
