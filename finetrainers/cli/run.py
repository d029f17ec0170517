"""`finetrainers run`: train the stages of a file one after the other, each in a separate process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO, Any

from finetrainers.config.arguments import ArgumentParser, command_argument, path_argument
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.flags import read_flags
from finetrainers.config.stages import Stage, read_stages
from finetrainers.utils import exit_codes
from finetrainers.utils.launch import launched_processes, print_error
from finetrainers.utils.logs import quiet_progress_bars
from finetrainers.utils.progress import working
from finetrainers.utils.text import nearest, plural

from .estimate import planned_environment

#: Takes arguments, and returns an exit code.
_Command = Callable[[Sequence[str]], int]
_EPILOG = """The file has one [[stage]] table for each stage: its name, its options, and the
stage it begins from. Options above the first [[stage]] apply to all stages. Options of
`finetrainers train` may follow as flags; they override those of every stage.

  output_dir = "runs/look"            # each stage has runs/look/NAME
  data_root = "clips"

  [[stage]]
  name = "low"
  video_resolution_buckets = ["49x256x384"]
  train_steps = 1000

  [[stage]]
  name = "high"
  init = { stage = "low" }
  video_resolution_buckets = ["49x512x768"]
  train_steps = 500

All stages are checked before the first one trains. Run the same command again to
skip finished stages and resume an interrupted one.

examples:
  finetrainers run stages.toml --plan
  finetrainers run stages.toml
  finetrainers run stages.toml --from high
  finetrainers run stages.toml --launcher \\
      "accelerate launch --config_file accelerate_configs/ddp.yaml train.py"

exit codes:
  0   all stages are done
  2   a stage of the file cannot be trained; all stages are checked before training
      any other exit code is that of the stage that ended with it
"""


def own_options() -> ArgumentParser:
    """Return the parser of the command's own options."""
    parser = ArgumentParser(
        prog="finetrainers run",
        usage="finetrainers run FILE [--plan] [--from STAGE] [--keep_finished] [--launcher COMMAND] [options of train]",
        description="Train the stages of a stage file in order.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", action="store_true", help="check all stages, print the plan, and exit")
    again_help = "train this stage and all later ones again; earlier results are renamed, not deleted"
    parser.add_argument("--from", dest="again_from", metavar="STAGE", help=again_help)
    keep_help = "keep finished stages even if their options changed"
    parser.add_argument("--keep_finished", action="store_true", help=keep_help)
    launcher_help = (
        "command that starts a stage on several GPUs; it ends with the program, and receives the stage's options"
    )
    parser.add_argument("--launcher", type=command_argument, default=[], metavar="COMMAND", help=launcher_help)
    return parser


def run_command(argv: Sequence[str], train: _Command) -> int:
    """Train the stages of a file; return an exit code (`utils.exit_codes`).

    Args:
        argv: of the command.
        train: the command that trains one stage.
    """
    parser = own_options()
    try:
        arguments, run_flags = parser.parse_known_args(argv)
        stages = _load_stages(parser, arguments, run_flags)
        environment = _launcher_environment(arguments.launcher)
        if arguments.again_from is not None and environment.get("LOCAL_WORLD_SIZE") != environment.get("WORLD_SIZE"):
            message = (
                "is not supported on several machines; rename the directories of the stages yourself, and remove it"
            )
            raise ConfigError([Problem("--from", message, "conflict")])
    except ConfigError as error:
        print_error(error)
        return exit_codes.CONFIGURATION

    def check(warnings_file: IO[str] | None = None) -> int:
        os.environ.update(environment)
        return _plan(stages, arguments, warnings_file)

    if arguments.plan:
        return check()
    # In a separate process: it imports torch and may query the GPU, whose memory is for the stages.
    with tempfile.TemporaryFile("w+") as file:
        code = _in_child(lambda: check(file))
        file.seek(0)
        warnings = file.read()
    return code if code != exit_codes.DONE else _train_all(stages, arguments, train, warnings=warnings)


def _load_stages(parser: ArgumentParser, arguments: argparse.Namespace, run_flags: Sequence[str]) -> list[Stage]:
    """Read the stages of the file.

    Raises:
        ConfigError: it cannot be read, or the arguments are not valid.
    """
    path, flags = read_flags(run_flags, prog=parser.prog, own=parser.flags, own_problems=parser.problems([]))
    if flags is None:
        raise ConfigError([Problem("--list_models", "is an option of `finetrainers train`", "unknown")])
    problems, flags.problems = flags.problems, []
    if launched_processes() > 1:
        message = (
            "this process was started by a launcher; start `finetrainers run` directly, and set its --launcher "
            '"accelerate launch ... train.py"'
        )
        problems.append(Problem("WORLD_SIZE", message, "conflict"))
    if path is None:
        hint = f"{parser.prog} --help shows an example"
        problems.append(Problem("FILE", "is required: a TOML file of stages", "required"))
        raise ConfigError(problems, of="this command", hint=hint)
    try:
        stages = read_stages(path, flags)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    names = [stage.name for stage in stages]
    if arguments.again_from is not None and arguments.again_from not in names:
        message = f"no stage {arguments.again_from!r}{nearest(arguments.again_from, names)}"
        problems.append(Problem("--from", message, "unknown"))
    if problems:
        raise ConfigError(problems, of="this command", hint=f"{parser.prog} --help lists the options")
    return stages


def _launcher_environment(launcher: Sequence[str]) -> dict[str, str]:
    """Return the variables that a launcher will set, as far as its command shows.

    Stages are checked for its number of processes.

    Raises:
        ConfigError: its file cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config_file", dest="accelerate_config", type=path_argument)
    parser.add_argument("--num_processes", "--num-processes", type=_number)
    parser.add_argument("--num_machines", "--nnodes", type=_number)
    parser.add_argument("--nproc_per_node", "--nproc-per-node", "--num_gpus", type=_number)
    try:
        sizes, _ = parser.parse_known_args(launcher)
    except argparse.ArgumentError as error:
        raise ConfigError([Problem("--launcher", str(error))]) from None
    if sizes.num_processes is None and sizes.nproc_per_node is not None:
        sizes.num_processes = sizes.nproc_per_node * (sizes.num_machines or 1)
    return dict(planned_environment(sizes)) if launcher else {}


def _number(text: str) -> int | None:
    """Return a count of processes, or None for one that only the machine knows, such as `auto`."""
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _plan(stages: Sequence[Stage], arguments: argparse.Namespace, warnings_file: IO[str] | None) -> int:
    """Check all stages, and print their plan, with its warnings as JSON to a file; return an exit code."""
    quiet_progress_bars()
    try:
        with working("checking the stages"):
            from finetrainers.runs.stages_plan import plan_stages

            warnings = plan_stages(
                stages,
                again_from=arguments.again_from,
                keep_finished=arguments.keep_finished,
                trains=not arguments.plan,
            )
    except ConfigError as error:
        print_error(error)
        return exit_codes.CONFIGURATION
    if warnings_file is not None:
        json.dump(warnings, warnings_file)
        warnings_file.flush()
    return exit_codes.DONE


def _train_all(stages: Sequence[Stage], arguments: argparse.Namespace, train: _Command, *, warnings: str) -> int:
    """Train the unfinished stages, which do not repeat the warnings (JSON) of the plan; return an exit code."""
    from finetrainers.runs.stages import look_at, set_aside, start_flags

    for was, now in set_aside(look_at(stages, again_from=arguments.again_from)):
        print(f"renamed {was} to {now}")
    count = len(stages)
    for number, stage in enumerate(stages):
        status = look_at(stages)[number]  # with the results of earlier stages
        head = f"stage {stage.name} ({number + 1} of {count})"
        if status.is_done:
            print(f"{head}: done already, in {status.root}")
            continue
        print(f"{head}: {f'from step {status.step}, ' if status.step else ''}in {status.root}", flush=True)
        run = status.config.run
        flags = [*start_flags(status), *(["--verbose"] if run.verbose else [])]
        code = _start(flags, arguments.launcher, run.hub_token, train, warnings=warnings)
        if code != exit_codes.DONE:
            advice = (
                "the same command resumes it"
                if code == exit_codes.STOPPED
                else "fix the problem, and the same command continues"
            )
            print(f"{head} ended with exit code {code}; {advice}", file=sys.stderr)
            return code
    print(f"done: {plural(count, 'stage')}; the result is in {look_at(stages)[-1].root}")
    return exit_codes.DONE


def _start(flags: list[str], launcher: Sequence[str], token: Any, train: _Command, *, warnings: str) -> int:
    """Train one stage in a separate process, or in those of the launcher; return the exit code."""
    from finetrainers.plan.start_report import SKIPPED_WARNINGS

    def work() -> int:
        os.environ[SKIPPED_WARNINGS] = warnings
        if token is not None:  # no file has it
            os.environ["HF_TOKEN"] = token.get_secret_value()
        if not launcher:
            return train(flags)
        try:
            os.execvp(launcher[0], [*launcher, *flags])
        except OSError as error:
            print_error(f"--launcher: {launcher[0]}: {error.strerror}")
            return exit_codes.CONFIGURATION

    return _in_child(work)


def _in_child(work: Callable[[], int]) -> int:
    """Run a function in a forked process, which gets the signals of this one; return its exit code.

    Signals wait while it is started, so that none is lost. The child has its own copy of those that a terminal sends.
    """
    from_terminal = sys.stdin is not None and sys.stdin.isatty()
    numbers = [signal.SIGTERM, signal.SIGUSR1, *([] if from_terminal else [signal.SIGINT])]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*numbers, signal.SIGINT])
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            sys.exit(work())
        except KeyboardInterrupt:
            sys.exit(exit_codes.killed_by(signal.SIGINT))

    def pass_on(number: int, _: FrameType | None) -> None:
        if number in numbers:
            os.kill(child, number)

    handlers = {number: signal.signal(number, pass_on) for number in {*numbers, signal.SIGINT}}
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _, status = os.waitpid(child, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else exit_codes.killed_by(-code)
