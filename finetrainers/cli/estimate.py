"""`finetrainers estimate`: memory use of a run in each phase, and options that make it fit a GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from finetrainers.config.arguments import ArgumentParser, ArgumentType, path_argument
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.values import check_gpu
from finetrainers.utils import exit_codes
from finetrainers.utils.gpus import read_gib
from finetrainers.utils.launch import launcher_environment, print_error
from finetrainers.utils.process_state import planning
from finetrainers.utils.progress import working
from finetrainers.utils.text import plural

from .options import positive_integer, read_run_config

if TYPE_CHECKING:
    from finetrainers.plan.preflight import ResolvedRun

_EPILOG = """All options of `finetrainers train` are valid too. The config file may come first.
No weights are read, only configs of the model; those of published models are in the package. The data may be missing.

examples:
  finetrainers estimate --pretrained_model_name_or_path HUB_ID --gpu 16GB
  finetrainers estimate run.toml --gpu 24GB --host 64GB
  finetrainers estimate run.toml --fsdp full --num_processes 8
  finetrainers estimate run.toml --accelerate_config accelerate_configs/deepspeed_zero3.yaml

exit codes:
  0   success, whether it fits or not
  2   invalid configuration, or the model's config files are not on this disk
  65  the data cannot be trained on
"""


def own_options() -> ArgumentParser:
    """Return the parser of the command's own options."""
    parser = ArgumentParser(
        prog="finetrainers estimate",
        description="Estimate the memory of a run in each phase, on the GPU and on the host, and the disk it needs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpu",
        type=ArgumentType(check_gpu),
        metavar="24GB",
        help="GPU to plan for, such as 24GB, h100 or 39.4GiB; prints what makes it fit",
    )
    parser.add_argument(
        "--host",
        type=ArgumentType(read_gib),
        metavar="64GB",
        help="host memory of the machine to plan for [this one]",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    add_launcher_options(parser, "processes on all machines [1, or as the file says]")
    return parser


def add_launcher_options(parser: ArgumentParser, processes: str) -> None:
    """Add the options that `planned_environment` reads; `processes` is the help on their number."""
    parser.add_argument("--num_processes", type=positive_integer, help=processes)
    parser.add_argument("--num_machines", type=positive_integer, help="machines [1, or as the file says]")
    parser.add_argument(
        "--accelerate_config", type=path_argument, metavar="FILE", help="the file of `accelerate launch`"
    )


def estimate_command(argv: Sequence[str]) -> int:
    """Estimate as the flags say; return an exit code (`utils.exit_codes`)."""
    parser = own_options()
    try:
        with planning():  # which restores the environment: it launches nothing
            arguments, run_flags = parser.parse_known_args(argv)
            problems = parser.problems([])
            try:
                os.environ.update(planned_environment(arguments))
            except ConfigError as error:
                problems += error.problems
            config = read_run_config(parser, run_flags, problems)
            with working("planning the memory of the run"):
                return _estimate(config, arguments)
    except ConfigError as error:
        print_error(error)
        return exit_codes.refused([problem.where for problem in error.problems])


def planned_environment(arguments: argparse.Namespace) -> Mapping[str, str]:
    """Return the environment variables that a launcher would set.

    Raises:
        ConfigError: its file cannot be read.
    """
    try:
        environment = {} if arguments.accelerate_config is None else launcher_environment(arguments.accelerate_config)
    except ValueError as error:
        raise ConfigError([Problem.from_error("--accelerate_config", error)]) from None
    processes = arguments.num_processes or int(environment.get("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    machines = arguments.num_machines or int(environment.pop("NUM_MACHINES", "1"))
    if processes % machines:
        message = f"{processes} processes do not divide among {machines} machines; use a multiple"
        raise ConfigError([Problem("--num_processes", message, "conflict")])
    if processes > 1 or environment:
        environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes // machines), "RANK": "0"}
    return environment


def _estimate(config: TrainConfig, arguments: argparse.Namespace) -> int:
    print("planning the memory of the run ...", file=sys.stderr, flush=True)
    from finetrainers.plan.estimate import make_estimate, planned_for

    estimate = make_estimate(planned_for(config, arguments.gpu), host_gib=arguments.host)
    memory, settings, gpu = estimate.memory, estimate.settings, estimate.gpu
    from finetrainers.plan.memory_lines import as_json, fit_lines, memory_lines

    if arguments.json:
        print(json.dumps(as_json(memory, settings, gpu, estimate.advice), indent=2))
        return exit_codes.DONE
    for line in (*_run_lines(estimate.run, no_data=estimate.no_data), *memory_lines(memory, settings)):
        print(line)
    if gpu is not None:
        lines = fit_lines(memory, settings.plan, gpu, estimate.advice)
    else:
        problem = memory.host_problem(settings.plan)
        lines = [] if problem is None else [f"warning: {problem}"]
    for line in lines:
        print(line)
    return exit_codes.DONE


def _run_lines(run: ResolvedRun, *, no_data: bool) -> Iterator[str]:
    """Yield lines about what the estimate is for."""
    from finetrainers.methods.registry import method_spec

    config = run.config
    size, clips = run.plan.heaviest(config)
    rank = f" of rank {config.training.rank}" if config.training.training_type == "lora" else ""
    frames_size = "x".join(map(str, size))
    yield f"{config.training.method} {config.training.training_type}{rank} of {config.model.model_name}"
    yield f"micro-batches of {plural(clips, run.plan.noun)} of {frames_size}"
    if no_data:
        named = method_spec(config).sizes(config) or config.data.resolutions
        source = "sizes are those of the options" if named else "the largest size that a run chooses by itself"
        yield f"the data is not on this machine: {source}; its cache is not counted"
