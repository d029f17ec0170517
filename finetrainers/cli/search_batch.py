"""`finetrainers search-batch`: find the batch size of each bucket, by the estimate first, then measured."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetrainers.config.arguments import ArgumentParser, ArgumentType, path_argument
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.values import check_gpu
from finetrainers.utils import exit_codes
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.files import folder_problem, write_json_atomic
from finetrainers.utils.gpus import read_gpu
from finetrainers.utils.launch import launched_rank, print_refusal
from finetrainers.utils.logs import quiet_progress_bars
from finetrainers.utils.process_state import environment_restored, planning

from .estimate import add_launcher_options, planned_environment
from .options import positive_integer, read_run_config

if TYPE_CHECKING:
    from finetrainers.plan.preflight import ResolvedRun
    from finetrainers.tools.batch_search.report import SearchResult
    from finetrainers.tools.batch_search.request import BucketSearch

_EPILOG = """All options of `finetrainers train` are also valid. The config file may come first.
It first estimates how many clips of each bucket fit. On a GPU, it then loads the model
once and runs training steps at sizes around the estimate, until the largest that fits
is known, and at halves of it. Weights do not change, and nothing is written to the run
directory. Progress is on stderr, the table on stdout.

examples:
  finetrainers search-batch run.toml
  finetrainers search-batch run.toml --estimate_only --gpu 24GB
  finetrainers search-batch run.toml --margin 10 --output batch_sizes.json

exit codes:
  0   success
  1   not even one clip of some bucket fits, or measuring failed
  2   invalid configuration, or the model's config files are not on this disk
  65  the data cannot be trained on
"""


def own_options() -> ArgumentParser:
    """Return the parser of the command's own options."""
    parser = ArgumentParser(
        prog="finetrainers search-batch",
        description="Find the batch size of each bucket: the fastest that fits the GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpu",
        type=ArgumentType(check_gpu),
        metavar="24GB",
        help="memory to fit [that of this machine's GPU; on a CPU, host memory]",
    )
    parser.add_argument("--estimate_only", action="store_true", help="only estimate, without loading weights")
    parser.add_argument(
        "--measure_on_cpu", action="store_true", help="measure without a GPU: times, and the process's host memory"
    )
    parser.add_argument(
        "--margin",
        type=_parse_percent,
        default=5.0,
        metavar="PERCENT",
        help="percentage of the memory to keep free [5]",
    )
    parser.add_argument("--max_batch_size", type=positive_integer, default=128, help="largest size to try [128]")
    parser.add_argument(
        "--timed_steps", type=positive_integer, default=3, metavar="N", help="steps to time for each size [3]"
    )
    parser.add_argument("--output", type=path_argument, metavar="FILE", help="also write all results as JSON")
    add_launcher_options(parser, "processes to estimate for [1, or the file's number]")
    return parser


def _parse_percent(text: str) -> float:
    """Return a share of at least 0 and less than 90 percent.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 90:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a percentage from 0 to 89, got {text!r}")


def search_batch_command(argv: Sequence[str]) -> int:
    """Search as the flags say; return an exit code (`utils.exit_codes`)."""
    parser = own_options()
    try:
        arguments, run_flags = parser.parse_known_args(argv)
        problems = parser.problems([])
        # A command that plans disables compiling in PyTorch, and a run that is measured may compile.
        with planning() if arguments.estimate_only else environment_restored():
            try:
                os.environ.update(planned_environment(arguments))
            except ConfigError as error:
                problems += error.problems
            refused = {problem.where for problem in problems}
            problems += [problem for problem in _option_problems(arguments) if problem.where not in refused]
            return _search(read_run_config(parser, run_flags, problems), arguments)
    except KeyboardInterrupt:
        if launched_rank() == 0:
            print("stopped", file=sys.stderr)
        return exit_codes.killed_by(signal.SIGINT)
    except ConfigError as error:
        print_refusal(error)
        return exit_codes.refused([problem.where for problem in error.problems])


def _search(config: TrainConfig, arguments: argparse.Namespace) -> int:
    resolved_run, reason = _check_run(config, arguments)
    if config.dataloader.bucket_batch_sizes and launched_rank() == 0:
        print("ignoring bucket_batch_sizes from the config; this command searches for them", file=sys.stderr)
    searched = _run_search(resolved_run, arguments, reason)
    if launched_rank() != 0:
        return exit_codes.DONE
    from finetrainers.tools.batch_search.report import as_json, report_lines

    for line in report_lines(searched):
        print(line)
    if arguments.output is not None:
        write_json_atomic(arguments.output, as_json(searched))
        print(f"written to {arguments.output}")
    return exit_codes.FAILED if searched.unfit else exit_codes.DONE


def _check_run(config: TrainConfig, arguments: argparse.Namespace) -> tuple[ResolvedRun, str | None]:
    """Return the validated run and the reason why nothing is measured, to begin a sentence, or None if it is measured.

    Raises:
        ConfigError: all problems, at once.
    """
    from finetrainers.methods.registry import is_method, method_spec
    from finetrainers.plan.estimate import checked_sizes, planned_for
    from finetrainers.tools.batch_search.request import search_problems, searched_config, why_not_measured

    problems = search_problems(config)
    config = searched_config(config)
    reason = _skip_reason(arguments)
    if reason is not None and arguments.gpu is not None:
        config = planned_for(config, arguments.gpu)
    is_known = is_method(config.training.method)
    no_data = is_known and method_spec(config).without_data(config) is not None
    try:
        reason = reason or why_not_measured(config, no_data=no_data)
        if reason is None and not problems:
            from finetrainers.plan.ready import preflight_by_model

            resolved_run = preflight_by_model(config, preparing=True)
        else:
            resolved_run, _ = checked_sizes(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return resolved_run, reason


def _option_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield the problems with the options of this command on this machine."""
    from finetrainers.plan.ownership import json_problem

    on_gpu = likely_device_type() == "cuda"
    if arguments.measure_on_cpu and arguments.estimate_only:
        yield Problem(
            "--measure_on_cpu",
            "cannot be combined with --estimate_only, which does not measure; remove one of them",
            "conflict",
        )
    elif arguments.measure_on_cpu and on_gpu:
        yield Problem(
            "--measure_on_cpu", "has no effect on this machine, whose GPU is measured; remove it", "unsupported"
        )
    if not on_gpu and arguments.gpu is None and not arguments.measure_on_cpu:
        message = "this machine has no GPU; set the memory to fit, such as 24GB, or measure with --measure_on_cpu"
        yield Problem("--gpu", message, "required")
    output: Path | None = arguments.output
    if output is None:
        return
    if output.is_dir():
        yield Problem("--output", f"{output} is a directory; use a file name")
    elif not output.absolute().parent.is_dir():
        yield Problem("--output", f"directory not found: {output.absolute().parent}", "not_found")
    elif (problem := folder_problem(output.parent)) is not None:
        yield Problem("--output", problem, "unavailable")
    elif (other := json_problem(output, "bucket_batch_sizes", "buckets")) is not None:
        yield Problem("--output", other, "occupied")


def _skip_reason(arguments: argparse.Namespace) -> str | None:
    """Return the reason why nothing is measured for any run, or None if there is none."""
    if arguments.estimate_only:
        return "--estimate_only"
    if likely_device_type() != "cuda" and not arguments.measure_on_cpu:
        return "this machine has no GPU"
    return None


def _run_search(resolved_run: ResolvedRun, arguments: argparse.Namespace, reason: str | None) -> SearchResult:
    """Search; progress goes to stderr, where libraries also print."""
    from finetrainers.memory.estimate import GIB
    from finetrainers.plan.memory_plan import gib_of_this_gpu
    from finetrainers.plan.start_report import print_line, print_warnings
    from finetrainers.tools.batch_search.estimate import estimate_sizes
    from finetrainers.tools.batch_search.report import SearchResult, estimate_line
    from finetrainers.tools.batch_search.request import buckets_of, count_tokens, without_clips
    from finetrainers.utils.host_memory import read_host_memory

    quiet_progress_bars()
    with contextlib.redirect_stdout(sys.stderr):
        print_warnings(resolved_run.warnings)
        noun, margin = resolved_run.plan.noun, arguments.margin / 100
        gpu_gib = gib_of_this_gpu()
        on_cpu = gpu_gib is None and (arguments.measure_on_cpu or arguments.gpu is None)
        size_gib = (
            gpu_gib or read_host_memory().available / GIB if arguments.gpu is None else read_gpu(arguments.gpu).gib
        )
        searches, planned_gib = buckets_of(resolved_run.plan, most=arguments.max_batch_size), (1 - margin) * size_gib
        estimate_sizes(
            resolved_run,
            searches,
            limit=planned_gib,
            on_cpu=on_cpu,
            say=lambda search: print_line(estimate_line(search, noun=noun)),
        )
        device, limit = (
            (None, None) if reason is not None else _measure(resolved_run, searches, arguments, size=size_gib)
        )
    tokens = [count_tokens(resolved_run, search.bucket) for search in searches]
    return SearchResult(
        searches, noun, tokens, size_gib, margin, (planned_gib, limit), device=device, unmeasured=reason,
        on_gpu=not on_cpu, empty=without_clips(resolved_run.config, searches),
    )  # fmt: skip


def _measure(
    resolved_run: ResolvedRun, searches: Sequence[BucketSearch], arguments: argparse.Namespace, *, size: float
) -> tuple[str, float]:
    """Measure each bucket to fit `size` GiB; return the device, and how many GiB of them could be used."""
    import torch

    from finetrainers.plan.ready import examine_weights
    from finetrainers.plan.start_report import print_line
    from finetrainers.tools.batch_search.measure import load_timer, measure_sizes
    from finetrainers.tools.batch_search.report import trial_line

    noun = resolved_run.plan.noun
    with load_timer(examine_weights(resolved_run)) as bench:
        limit = bench.limit(size, margin=arguments.margin / 100)
        for search in searches:
            measure_sizes(
                bench, search, steps=arguments.timed_steps, limit=limit,
                say=lambda bucket, trial: print_line(trial_line(bucket, trial, noun=noun)),
            )  # fmt: skip
        return torch.cuda.get_device_name(bench.device) if bench.on_gpu else "the CPU", limit
