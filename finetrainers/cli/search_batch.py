"""`finetrainers search-batch`: the batch size of each bucket, by the estimate first, then measured."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.arguments import ArgumentParser
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.utils import exit_codes
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.files import write_json_atomic
from finetrainers.utils.gpus import read_gpu
from finetrainers.utils.launch import launched_rank, print_refusal
from finetrainers.utils.process_state import environment_restored, planning

from .demo import positive_integer
from .estimate import checked_sizes, gpu, planned_environment, planned_for

if TYPE_CHECKING:
    from finetrainers.plan.preflight import Preflight
    from finetrainers.tools.batch_search.report import Searched
    from finetrainers.tools.batch_search.request import BucketSearch

_EPILOG = """All options of `finetrainers train` are valid too. The config file may come first.
First the estimate says how many clips of each bucket fit. Then, where there is a GPU,
the model is loaded once, and training steps are taken at sizes around that, until the
largest that fits is known, and at halves of it. Weights do not change, and nothing is
written to the run's directory. Progress is on stderr, the table on stdout.

examples:
  finetrainers search-batch run.toml
  finetrainers search-batch run.toml --estimate_only --gpu 24GB
  finetrainers search-batch run.toml --margin 10 --output batch_sizes.json

exit codes:
  0   success
  1   some bucket fits no clip, or measuring has failed
  2   invalid configuration, or the model's config files are not on this disk
  65  the data cannot be trained on
"""


def add_search_batch(commands: Any) -> None:
    """The parser of `finetrainers search-batch`, for the list of commands; `search_batch_command` is what runs it."""
    commands.add_parser(
        "search-batch",
        help="find the batch size of each bucket: the fastest that fits the GPU",
        parents=[_own_options()],
        add_help=False,
    )


def _own_options() -> ArgumentParser:
    parser = ArgumentParser(
        prog="finetrainers search-batch",
        description="Find the batch size of each bucket: the fastest of those that fit the GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpu", type=gpu, metavar="24GB", help="memory to fit [that of this machine's GPU; on a CPU, host memory]"
    )
    parser.add_argument("--estimate_only", action="store_true", help="measure nothing, and load no weights")
    parser.add_argument(
        "--measure_on_cpu", action="store_true", help="measure without a GPU: times, and the process's host memory"
    )
    parser.add_argument(
        "--margin", type=_percent, default=5.0, metavar="PERCENT", help="share of the memory that stays free [5]"
    )
    parser.add_argument("--max_batch_size", type=positive_integer, default=128, help="the largest size to try [128]")
    parser.add_argument(
        "--timed_steps", type=positive_integer, default=3, metavar="N", help="steps to time for each size [3]"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything that was found as JSON, too")
    parser.add_argument(
        "--num_processes", type=positive_integer, help="processes to estimate for [1, or as the file says]"
    )
    parser.add_argument("--num_machines", type=positive_integer, help="machines [1, or as the file says]")
    parser.add_argument("--accelerate_config", type=Path, metavar="FILE", help="the file of `accelerate launch`")
    return parser


def _percent(text: str) -> float:
    """A share of at least 0 and less than 90 %.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 90:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of percent from 0 to 89, got {text!r}")


def search_batch_command(argv: Sequence[str]) -> int:
    """Search as the flags say; an exit code (`utils.exit_codes`)."""
    from finetrainers.config.flags import parse_flags

    parser = _own_options()
    try:
        own, rest = parser.parse_known_args(argv)
        found = parser.problems([])
        # A command that plans tells PyTorch that nothing will be compiled, and a run that is measured may compile.
        with planning() if own.estimate_only else environment_restored():
            try:
                os.environ.update(planned_environment(own))
            except ConfigError as error:
                found += error.problems
            wrong = {problem.where for problem in found}
            found += [problem for problem in _own_problems(own) if problem.where not in wrong]
            config, _ = parse_flags(rest, prog=parser.prog, own=parser.flags, own_problems=found)
            if config is None:
                raise ConfigError([Problem("--list_models", "is an option of `finetrainers train`")])
            return _search(config, own)
    except KeyboardInterrupt:
        if launched_rank() == 0:
            print("stopped", file=sys.stderr)
        return exit_codes.killed_by(signal.SIGINT)
    except ConfigError as error:
        print_refusal(f"error: {error}")
        return exit_codes.refused([problem.where for problem in error.problems])


def _search(config: TrainConfig, own: argparse.Namespace) -> int:
    checked, reason = _checked(config, own)
    if config.dataloader.bucket_batch_sizes and launched_rank() == 0:
        print("note: bucket_batch_sizes of the configuration are not used: they are what is searched", file=sys.stderr)
    found = _found(checked, own, reason)
    if launched_rank() != 0:
        return exit_codes.DONE
    from finetrainers.tools.batch_search.report import as_json, report_lines

    for line in report_lines(found):
        print(line)
    if own.output is not None:
        write_json_atomic(own.output, as_json(found))
        print(f"written to {own.output}")
    return exit_codes.FAILED if found.unfit else exit_codes.DONE


def _checked(config: TrainConfig, own: argparse.Namespace) -> tuple[Preflight, str | None]:
    """The run, and why nothing is measured, as the beginning of a sentence; None: it is.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    from finetrainers.methods.registry import method_names, method_spec
    from finetrainers.tools.batch_search.request import search_problems, searched_config, why_not_measured

    problems = search_problems(config)
    config = searched_config(config)
    reason = _why_not_here(own)
    if reason is not None and own.gpu is not None:
        config = planned_for(config, own.gpu)
    is_known = config.training.method in method_names()
    no_data = is_known and method_spec(config).without_data(config) is not None
    try:
        reason = reason or why_not_measured(config, no_data=no_data)
        if reason is None and not problems:
            from finetrainers.plan.ready import preflight_by_model

            checked = preflight_by_model(config, preparing=True)
        else:
            checked, _ = checked_sizes(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return checked, reason


def _own_problems(own: argparse.Namespace) -> Iterator[Problem]:
    """What is wrong with the options of this command on this machine."""
    from finetrainers.plan.ownership import json_problem

    on_gpu = likely_device_type() == "cuda"
    if own.measure_on_cpu and own.estimate_only:
        yield Problem("--measure_on_cpu", "measures, and --estimate_only does not; drop one of them")
    elif own.measure_on_cpu and on_gpu:
        yield Problem("--measure_on_cpu", "this machine has a GPU, which is measured; leave it out")
    if not on_gpu and own.gpu is None and not own.measure_on_cpu:
        message = (
            "there is no GPU on this machine; say the memory to fit, such as 24GB, or measure with --measure_on_cpu"
        )
        yield Problem("--gpu", message)
    if own.output is not None and own.output.is_dir():
        yield Problem("--output", f"{own.output} is a directory; give a file")
    elif own.output is not None and not own.output.absolute().parent.is_dir():
        yield Problem("--output", f"no such directory: {own.output.absolute().parent}")
    elif own.output is not None and (other := json_problem(own.output, "bucket_batch_sizes", "buckets")) is not None:
        yield Problem("--output", other)


def _why_not_here(own: argparse.Namespace) -> str | None:
    """Why nothing is measured, whatever the run is."""
    if own.estimate_only:
        return "--estimate_only"
    if likely_device_type() != "cuda" and not own.measure_on_cpu:
        return "there is no GPU on this machine"
    return None


def _found(checked: Preflight, own: argparse.Namespace, reason: str | None) -> Searched:
    """The search; progress goes to stderr, where libraries speak, too."""
    from finetrainers.memory.estimate import GIB
    from finetrainers.plan.memory_plan import gib_of_this_gpu
    from finetrainers.plan.start_report import print_line, print_warnings
    from finetrainers.tools.batch_search.estimate import estimate_sizes
    from finetrainers.tools.batch_search.report import Searched, estimate_line
    from finetrainers.tools.batch_search.request import buckets_of, tokens_of, without_clips
    from finetrainers.utils.host_memory import room
    from finetrainers.utils.logs import quiet_progress_bars

    quiet_progress_bars()
    with contextlib.redirect_stdout(sys.stderr):
        print_warnings(checked.warnings)
        noun, margin = checked.plan.noun, own.margin / 100
        here = gib_of_this_gpu()
        on_cpu = here is None and (own.measure_on_cpu or own.gpu is None)
        size = here or room().available / GIB if own.gpu is None else read_gpu(own.gpu).gib
        searches, planned = buckets_of(checked.plan, most=own.max_batch_size), (1 - margin) * size
        estimate_sizes(
            checked, searches, limit=planned, on_cpu=on_cpu, say=lambda one: print_line(estimate_line(one, noun=noun))
        )
        device, limit = (None, None) if reason is not None else _measure(checked, searches, own, size=size)
    tokens = [tokens_of(checked, one.bucket) for one in searches]
    return Searched(
        searches, noun, tokens, size, margin, (planned, limit), device=device, unmeasured=reason, on_gpu=not on_cpu,
        empty=without_clips(checked.config, searches),
    )  # fmt: skip


def _measure(
    checked: Preflight, searches: Sequence[BucketSearch], own: argparse.Namespace, *, size: float
) -> tuple[str, float]:
    """Measure each bucket to fit so many GiB; on which device, and how many of them could be taken."""
    import torch

    from finetrainers.plan.ready import examine_weights
    from finetrainers.plan.start_report import print_line
    from finetrainers.tools.batch_search.measure import loaded_bench, measure_sizes
    from finetrainers.tools.batch_search.report import trial_line

    noun = checked.plan.noun
    with loaded_bench(examine_weights(checked)) as bench:
        limit = bench.limit(size, margin=own.margin / 100)
        for one in searches:
            measure_sizes(
                bench, one, steps=own.timed_steps, limit=limit,
                say=lambda bucket, trial: print_line(trial_line(bucket, trial, noun=noun)),
            )  # fmt: skip
        return torch.cuda.get_device_name(bench.device) if bench.on_gpu else "the CPU", limit
