"""Memory estimate of a configuration, on a machine that may have neither its data nor its weights."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import Source, load_config
from finetrainers.config.root import TrainConfig
from finetrainers.config.target import planned_gpu, target_device
from finetrainers.methods.registry import is_method, method_spec, plan_work
from finetrainers.utils.gpus import Gpu, read_gib
from finetrainers.utils.process_state import planning, restored

from .preflight import ResolvedRun, preflight
from .sizes_plan import plan_sizes

if TYPE_CHECKING:
    from finetrainers.memory.advice import Advice
    from finetrainers.memory.automatic import AutoSettings

    from .memory_plan import RunMemory


@dataclass(frozen=True)
class Estimate:
    """Memory estimate of a run.

    Attributes:
        run: the run, with the options of its memory budget.
        no_data: whether its data is not on this machine.
        gpu: the GPU that it is planned for, or None for this machine.
        memory: the estimator.
        settings: the choices for `auto`, with the plan.
        advice: options that make the run fit `gpu`, or None if it fits or nothing makes it fit.
    """

    run: ResolvedRun
    no_data: bool
    gpu: Gpu | None
    memory: RunMemory
    settings: AutoSettings
    advice: Advice | None


def estimate(config: Source, *, gpu: str | None = None, host: str | None = None) -> dict[str, Any]:
    """Estimate the memory of a run in each phase, and the disk space it needs, without weights, data or a GPU.

        memory = estimate(load_config("run.toml"), gpu="24GB")
        print(memory["fits"], memory["peak"]["allocated"] / 2**30)

    Args:
        config: from `load_config`, or a source that it takes.
        gpu: GPU to plan for, such as `h100` or `24GB`; the estimate then has `fits`, and `advice` if it does not fit.
        host: host memory of the machine, such as `64GB`; default: of this one.

    Returns:
        The estimate that `finetrainers estimate --json` writes, sizes in bytes: `phases`, `peak`, `disk` and more.

    Raises:
        ConfigError: the configuration cannot run, or the model's config files are not on this disk.
    """
    from .memory_lines import as_json

    try:
        host_gib = None if host is None else read_gib(host)
    except ValueError as error:
        raise ConfigError([Problem.from_error("host", error)]) from None
    config = load_config(config, dry_run=True) if gpu is None else load_config(config, dry_run=True, gpu=gpu)
    with planning(), restored():
        made = make_estimate(config, host_gib=host_gib)
        return as_json(made.memory, made.settings, made.gpu, made.advice)


def make_estimate(config: TrainConfig, *, host_gib: float | None = None) -> Estimate:
    """Return the estimate of a run that `planned_for` has returned; print its warnings to stderr.

    Raises:
        ConfigError: see `estimate`.
    """
    run, no_data = checked_sizes(config)
    gpu, advice = planned_gpu(run.config), None
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print when they are imported
        from .automatic import within_budget
        from .init_distributed import check_strategy
        from .memory_plan import RunMemory
        from .ready import check_network
        from .start_report import print_warnings

        print_warnings(run.warnings)
        check_strategy(run.config)
        check_network(run, plan_known=not no_data)
        run = within_budget(run, partial(_check, has_data=not no_data), host_gib=host_gib)
        memory = RunMemory(run, host_gib=host_gib)
        settings = memory.choose()
        if gpu is not None and not memory.fits(settings.plan, gpu.gib):
            print(f"searching for options that make it fit {gpu} ...", file=sys.stderr, flush=True)  # noqa: T201
            advice = memory.advice(gpu.gib, device=target_device(run.config))
    return Estimate(run, no_data, gpu, memory, settings, advice)


def planned_for(config: TrainConfig, gpu: str | None) -> TrainConfig:
    """Return the configuration of a dry run, planned for a GPU if one is given on the command line or in the file."""
    run_options = {"dry_run": True} if gpu is None else {"dry_run": True, "gpu": gpu}
    return config.model_copy(update={"run": config.run.model_copy(update=run_options)})


def checked_sizes(config: TrainConfig) -> tuple[ResolvedRun, bool]:
    """Return a run that is checked as far as its sizes need it, and whether its data is not on this machine.

    Raises:
        ConfigError: it cannot be run, or the model's config files are not here.
    """
    config = config.model_copy(update={"model": config.model.for_estimate()})
    without_data = method_spec(config).without_data(config) if is_method(config.training.method) else None
    resolved_run = _check(without_data or config, has_data=without_data is None)
    missing = resolved_run.family.configs_not_here(resolved_run.config.model)
    if missing:
        message = (
            f"{missing[0][1]} is not on this disk; fetch the config files with: hf download "
            f"{resolved_run.config.model.pretrained_model_name_or_path} --include '*.json'"
        )
        raise ConfigError([Problem("--pretrained_model_name_or_path", message, "not_found")])
    return resolved_run, without_data is not None


def _check(config: TrainConfig, *, has_data: bool) -> ResolvedRun:
    return preflight(config, preparing=True, weights=False, planner=plan_work if has_data else plan_sizes)
