"""`finetrainers estimate`: the memory that a run needs in each phase, and what makes it fit a GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.arguments import ArgumentParser
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.values import gpu_memory
from finetrainers.utils import exit_codes
from finetrainers.utils.launch import launcher_environment
from finetrainers.utils.process_state import planning

from .demo import positive_integer

if TYPE_CHECKING:
    from finetrainers.engine.preflight import Preflight

_EPILOG = """All options of `finetrainers train` are valid too. The config file may come first.
No weights are read: config files of the model are enough.

examples:
  finetrainers estimate run.toml --gpu 24GB
  finetrainers estimate run.toml --fsdp full --num_processes 8
  finetrainers estimate run.toml --accelerate_config accelerate_configs/deepspeed_zero3.yaml

exit codes:
  0   success, whether it fits or not
  2   invalid configuration, or the model's config files are not on this disk
  65  the data cannot be trained on
"""


def add_estimate(commands: Any) -> None:
    """The parser of `finetrainers estimate`, for the list of commands; `estimate_command` is what runs it."""
    commands.add_parser(
        "estimate",
        help="memory that a run needs, and what makes it fit a GPU",
        parents=[_own_options()],
        add_help=False,
    )


def _own_options() -> ArgumentParser:
    parser = ArgumentParser(
        prog="finetrainers estimate",
        description="Estimate the memory of a run in each phase, on the GPU and on the host, and the disk it needs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpu", type=gib, metavar="24GB", help="say whether it fits this GPU, and if not, what makes it fit"
    )
    parser.add_argument("--host", type=gib, metavar="64GB", help="host memory of the machine to plan for [this one]")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.add_argument(
        "--num_processes", type=positive_integer, help="processes on all machines [1, or as the file says]"
    )
    parser.add_argument("--num_machines", type=positive_integer, help="machines [1, or as the file says]")
    parser.add_argument("--accelerate_config", type=Path, metavar="FILE", help="the file of `accelerate launch`")
    return parser


def estimate_command(argv: Sequence[str]) -> int:
    """Estimate as the flags say; an exit code (`utils.exit_codes`)."""
    from finetrainers.config.flags import parse_flags

    parser = _own_options()
    try:
        with planning():  # which restores the environment: it launches nothing
            own, rest = parser.parse_known_args(argv)
            found = parser.problems([])
            try:
                os.environ.update(planned_environment(own))
            except ConfigError as error:
                found += error.problems
            config, _ = parse_flags(rest, prog=parser.prog, own=parser.flags, found=found)
            if config is None:
                raise ConfigError([Problem("--list_models", "is an option of `finetrainers train`")])
            return _estimate(config, own)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.refused([problem.where for problem in error.problems])


def planned_environment(own: argparse.Namespace) -> Mapping[str, str]:
    """What a launcher would set.

    Raises:
        ConfigError: its file cannot be read.
    """
    try:
        found = {} if own.accelerate_config is None else launcher_environment(own.accelerate_config)
    except ValueError as error:
        raise ConfigError([Problem("--accelerate_config", str(error))]) from None
    processes = own.num_processes or int(found.get("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    machines = own.num_machines or int(found.pop("NUM_MACHINES", "1"))
    if processes % machines:
        message = f"{processes} processes do not divide among {machines} machines; use a multiple"
        raise ConfigError([Problem("--num_processes", message)])
    if processes > 1 or found:
        found |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes // machines), "RANK": "0"}
    return found


def gib(text: str) -> float:
    """GiB.

    Raises:
        argparse.ArgumentTypeError: it says no size.
    """
    try:
        return float(gpu_memory(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def checked_sizes(config: TrainConfig) -> tuple[Preflight, bool]:
    """A run that is checked as far as its sizes need it, and whether its data is not on this machine.

    Raises:
        ConfigError: it cannot be run, or the model's config files are not here.
    """
    from finetrainers.engine.preflight import preflight
    from finetrainers.engine.sizes_plan import plan_sizes
    from finetrainers.methods.registry import method_names, method_spec, plan_work

    without_data = method_spec(config).without_data(config) if config.training.method in method_names() else None
    planner = plan_work if without_data is None else plan_sizes
    checked = preflight(without_data or config, preparing=True, weights=False, planner=planner)
    missing = checked.family.configs_not_here(checked.config.model)
    if missing:
        message = (
            f"{missing[0][1]} is not on this disk; fetch the config files with: hf download "
            f"{checked.config.model.pretrained_model_name_or_path} --include '*.json'"
        )
        raise ConfigError([Problem("--pretrained_model_name_or_path", message)])
    return checked, without_data is not None


def _estimate(config: TrainConfig, own: argparse.Namespace) -> int:
    gpu: float | None = own.gpu
    checked, no_data = checked_sizes(config)
    from finetrainers.engine.init_distributed import check_strategy
    from finetrainers.engine.memory_lines import as_json, fit_lines, memory_lines
    from finetrainers.engine.memory_plan import RunMemory
    from finetrainers.engine.ready import check_network
    from finetrainers.memory.estimate import GIB
    from finetrainers.memory.fit import fits

    with contextlib.redirect_stdout(sys.stderr):  # libraries may speak when they are imported
        check_strategy(checked.config)
        check_network(checked, plan_known=not no_data)
        memory = RunMemory(checked, gpu_gib=gpu, host_gib=own.host)
        found = memory.choose()
        advice = None if gpu is None or fits(found.plan.peak, GIB * gpu) else memory.advice(gpu)
    if own.json:
        print(json.dumps(as_json(memory, found, gpu, advice), indent=2))
        return exit_codes.DONE
    for line in memory_lines(memory, found):
        print(line)
    if no_data:
        print("the data is not on this machine: sizes are those of the options, and its cache is not counted")
    if gpu is not None:
        for line in fit_lines(found.plan, gpu, advice):
            print(line)
    return exit_codes.DONE
