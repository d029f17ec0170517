"""`finetrainers watch`: sample and score the checkpoints of a run as they are published, on a separate device."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from finetrainers.config.arguments import ArgumentParser
from finetrainers.config.base import read_path
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.watch import WatchSection
from finetrainers.utils import exit_codes
from finetrainers.utils.device import configure_allocator
from finetrainers.utils.launch import print_error
from finetrainers.utils.logs import quiet_progress_bars
from finetrainers.utils.process_state import environment_restored, gc_paused
from finetrainers.utils.text import plural

from .options import options_parser, read_arguments

if TYPE_CHECKING:
    from finetrainers.sampling.watch.plan import WatchPlan

_ABOUT = """Sample each checkpoint of a run as soon as it is published, and score its
clips, in a separate process on its own device. Training does not wait. RUN is a
run's --output_dir, or a copy of it by `finetrainers sync`."""
_EPILOG = """It follows the run until you press Ctrl-C, even after training ends. With --once
it samples the existing checkpoints, and exits. A checkpoint is sampled once it
is complete: its manifest and all its digests agree. Nothing is sampled twice,
even after a restart or a kill. Several watches may follow one run with
different presets; one of them may have --best_by. Options of `finetrainers
train` for the model and how it computes are also valid, as for `sample`.

examples:
  finetrainers watch runs/mystyle --device cuda:1
  finetrainers watch runs/mystyle --presets low4s,high4s \\
      --reward videoalign.vq clipscore --best_by videoalign.vq
  finetrainers watch runs/mystyle --preset wide=49x512x1024,steps=30 --once

exit codes:
  0   --once: every complete checkpoint is sampled
  1   --once: some clips could not be sampled; the others are there
  2   invalid options, or another watch has a preset; nothing was loaded
  130 stopped by Ctrl-C (143: by SIGTERM); the same command continues
"""


def own_options() -> ArgumentParser:
    """Return the parser of the command's own options."""
    return options_parser(
        WatchSection, prog="finetrainers watch", usage="finetrainers watch RUN [--presets NAMES] [options]",
        about=_ABOUT, epilog=_EPILOG,
    )  # fmt: skip


def watch_command(argv: Sequence[str]) -> int:
    """Watch as the flags say; return an exit code (`utils.exit_codes`)."""
    with environment_restored():  # --device is of this command
        try:
            plan = _planned(argv)
            for line in _plan_lines(plan):
                print(line, flush=True)
            return exit_codes.DONE if plan.options.dry_run else _watch(plan)
        except ConfigError as error:
            print_error(error)
            return exit_codes.CONFIGURATION
        except KeyboardInterrupt as stop:
            print("\nstopped; the same command samples the missing clips", file=sys.stderr)
            return exit_codes.killed_by(stop.args[0] if stop.args else signal.SIGINT)


def _planned(argv: Sequence[str]) -> WatchPlan:
    """Return the plan.

    Raises:
        ConfigError: all problems, at once.
    """
    arguments = read_arguments(own_options(), WatchSection, argv)
    problems = arguments.problems
    if len(arguments.targets) == 1 and not arguments.unclear:
        from finetrainers.sampling.watch.plan import plan_watch, use_device

        try:
            use_device(arguments.options.device)
            configure_allocator()
            plan = plan_watch(read_path(arguments.targets[0]), arguments.options, arguments.flags)
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(Problem.from_error("RUN", error))
    elif not arguments.unclear:
        message = "requires one run directory: finetrainers watch runs/mystyle"
        problems.append(Problem("RUN", message, "invalid" if arguments.targets else "required"))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), of="this watch")
    return plan


def _plan_lines(plan: WatchPlan) -> Iterator[str]:
    """Yield the lines on the samples of each checkpoint, and the warnings."""
    for name, preset_plan in plan.presets.items():
        sizes = ", ".join("x".join(map(str, size)) for size in preset_plan.sizes)
        steps = plural(preset_plan.config.validation.validation_inference_steps, "denoising step")
        count = plural(len(preset_plan.prompts) * len(preset_plan.seeds), "clip")
        yield f"{name}: {count} of each checkpoint, {sizes}, {steps}, in {preset_plan.output_dir}"
    if plan.labels:
        yield f"rewards: {', '.join(plan.labels)}"
    for tracker in [] if plan.options.no_track else plan.config.run.report_to:
        from finetrainers.sampling.watch.tracked import whose_run

        yield f"tracker: {tracker}, {whose_run(plan.run, plan.config, tracker)}"
    warnings = dict.fromkeys(warning for preset_plan in plan.presets.values() for warning in preset_plan.warnings)
    yield from (f"warning: {warning}" for warning in warnings)


def _stop(number: int, _: Any) -> None:
    """Handle a signal to end as Ctrl-C, so that pending data is sent to trackers.

    Raises:
        KeyboardInterrupt: with the number of the signal.
    """
    raise KeyboardInterrupt(number)


def _watch(plan: WatchPlan) -> int:
    with gc_paused():
        from finetrainers.sampling.watch.server import watch
    quiet_progress_bars()
    gc.freeze()  # as for training: the libraries' objects live to the end
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        failed = watch(plan, lambda line: print(line, flush=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    for preset_plan in plan.presets.values():
        if (page := preset_plan.output_dir / "index.html").is_file():
            print(f"page: {page}")
    return exit_codes.FAILED if failed else exit_codes.DONE
