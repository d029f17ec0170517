"""`finetrainers` command and its subcommands; torch is imported only by those that need it."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from finetrainers.config.arguments import ArgumentParser, new_directory
from finetrainers.config.errors import CONFIGURATION, ConfigError, Problem
from finetrainers.config.flags import parse_flags
from finetrainers.config.help import PREPARE, TRAIN
from finetrainers.config.root import TrainConfig
from finetrainers.utils import exit_codes
from finetrainers.utils.device import configure_allocator
from finetrainers.utils.exit_in_time import exit_in_time
from finetrainers.utils.failures import InputError, user_message
from finetrainers.utils.launch import launch_problems, launched_rank, print_error, print_refusal
from finetrainers.utils.logs import configure_logging, log_level_problem, quiet_progress_bars, yield_idle_threads
from finetrainers.utils.process_state import gc_paused, planning
from finetrainers.utils.progress import working
from finetrainers.utils.spelling import in_command
from finetrainers.utils.versions import __version__, version_problem

from .cache import add_cache
from .check import check_command
from .check import own_options as check_options
from .ckpt import add_ckpt
from .demo import add_demo, add_demonstration
from .doctor import add_doctor
from .estimate import estimate_command
from .estimate import own_options as estimate_options
from .export import add_export
from .init import add_init
from .overview import CommandParser, described, unknown_command
from .plot import add_plot
from .report import add_report
from .run import own_options as run_options
from .run import run_command
from .sample import own_options as sample_options
from .sample import sample_command
from .search_batch import own_options as search_batch_options
from .search_batch import search_batch_command
from .serve_reward import add_serve_reward
from .sync import add_sync
from .watch import own_options as watch_options
from .watch import watch_command

#: Environment variable: set to anything, every traceback is printed, as with `--verbose`.
_TRACEBACK = "FINETRAINERS_TRACEBACK"
#: Commands whose work is not done when their output ends.
_RUNS = (["train"], ["prepare"], ["run"], ["sample"], ["watch"], ["search-batch"], ["quickstart"], ["demo"])
_SIGPIPE = 13  # which Windows does not have
#: Commands that report outdated libraries themselves.
_DIAGNOSES = ("doctor",)


@in_command()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command; return the exit code. Without `argv`, the process exits soon after it."""
    if argv is None:
        # A run that loses its output ends as if by SIGPIPE; what only prints has done its work.
        is_run = sys.argv[1:2] in _RUNS and not {"-h", "--help"} & set(sys.argv)
        ended = exit_codes.killed_by(_SIGPIPE) if is_run else exit_codes.DONE
        return exit_in_time(lambda: _while_read(lambda: main(sys.argv[1:]), default=ended))
    argv = list(argv)
    configure_logging()
    yield_idle_threads()
    if _refuses_log_level():
        return exit_codes.CONFIGURATION
    with_own_parser: dict[str, Callable[[Sequence[str]], int]] = {
        "train": train_command, "check": check_command, "prepare": prepare_command, "estimate": estimate_command,
        **{name: partial(_run_unparsed, name) for name in _UNPARSED},
    }  # fmt: skip
    if argv and argv[0] in with_own_parser:
        return with_own_parser[argv[0]](argv[1:])
    parser = _parser()
    if argv and not argv[0].startswith("-") and argv[0] not in parser.commands.choices:
        print_error(unknown_command(argv[0], list(parser.commands.choices)))
        return exit_codes.CONFIGURATION
    try:
        arguments = parser.parse_args(argv, checked=True)
        if arguments.command is None:
            parser.print_help()
            return 0
        if arguments.command not in _DIAGNOSES and _cannot_start(joining=False):
            return exit_codes.CONFIGURATION
        return arguments.run(arguments)
    except ConfigError as error:
        command_error = ConfigError(error.problems, of="this command") if error.of == CONFIGURATION else error
        print_error(command_error)
        return exit_codes.refused([problem.where for problem in error.problems])
    except Exception as error:
        if not _say_failure(error):
            raise
        return exit_codes.CONFIGURATION if isinstance(error, InputError) else exit_codes.FAILED


def _while_read(command: Callable[[], int], *, default: int) -> int:
    """Run a command; return its exit code, or `default` if nothing reads its output any more, as with `| head`."""
    try:
        try:
            return command()
        finally:  # also after help, which ends by an exit: a full disk is an error
            sys.stdout.flush()
    except BrokenPipeError:
        if not _output_is_closed():
            raise
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # rich has replaced it by an exit
            raise
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print_error(f"the output cannot be written: {error.strerror}")
        default = exit_codes.FAILED
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for buffered output
    return default


def _output_is_closed() -> bool:
    """Return whether standard output is a pipe without a reader; False where the system cannot tell."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        output = select.poll()
        output.register(sys.stdout, select.POLLOUT)
        return any(state & select.POLLERR for _, state in output.poll(0))
    return False


@in_command()
def train_command(argv: Sequence[str], *, prog: str = "finetrainers train") -> int:
    """Train with these flags; return an exit code (`utils.exit_codes`). Unexpected errors are raised."""
    interrupted = (
        "stopped before the first step, without a new checkpoint; cached encodings are kept, and the same command "
        "continues"
    )
    with _RunOptions(argv, prog, interrupted) as command:
        config = command.parse()
        if config is None:
            return command.code
        from finetrainers.plan.ready import get_ready

        checked = get_ready(config)
        with gc_paused(), working("importing torch and diffusers"):
            from finetrainers.runs.run import run
            from finetrainers.training.guards.hacking import HACKING_GUARD

            checked.family.load(checked.config.model)  # imports the networks' classes

        quiet_progress_bars()
        gc.freeze()  # the libraries' objects live to the end; collections between loading phases need not walk them
        state = run(checked, handle_signals=True)
        if state is not None and state.stopped_by is not None:
            command.code = exit_codes.GUARDED if state.stopped_by == HACKING_GUARD else exit_codes.STOPPED
    return command.code


#: Commands that parse their arguments themselves; all but `run` join the processes of a launcher.
_UNPARSED: dict[str, Callable[[Sequence[str]], int]] = {
    "sample": sample_command,
    "watch": watch_command,
    "search-batch": search_batch_command,
    "run": lambda argv: run_command(argv, train_command),
}
#: Commands of `_UNPARSED` that allocate on the GPU at once; a watch chooses its device first.
_ON_A_GPU = ("sample", "search-batch")


def _run_unparsed(command: str, argv: Sequence[str]) -> int:
    """Run a command of `_UNPARSED`; return an exit code."""
    if command in _ON_A_GPU:
        configure_allocator()
    if _cannot_start(joining=command != "run"):
        return exit_codes.CONFIGURATION
    try:
        return _UNPARSED[command](argv)
    except Exception as error:
        if not _say_failure(error):
            raise
        return exit_codes.CONFIGURATION if isinstance(error, InputError) else exit_codes.FAILED


def prepare_command(argv: Sequence[str]) -> int:
    """Encode the data that a training run with these flags would encode before its first step; return an exit code."""
    interrupted = "stopped; the same command encodes the remaining entries"
    with _RunOptions(argv, "finetrainers prepare", interrupted, preparing=True) as command:
        config = command.parse()
        if config is None:
            return command.code
        from finetrainers.plan.preflight import for_preparing
        from finetrainers.plan.ready import get_ready

        checked = get_ready(for_preparing(config), preparing=True)
        with gc_paused(), working("importing torch and diffusers"):
            from finetrainers.runs.prepare import prepare

        quiet_progress_bars()
        prepare(checked)
    return command.code


@dataclass
class _RunOptions(contextlib.AbstractContextManager["_RunOptions"]):
    """A command that takes the options of a run; expected errors of the block are printed and become its exit code.

    Attributes:
        argv: flags of a run.
        prog: the command.
        interrupted: the message if the user interrupts it.
        preparing: whether nothing is trained.
        config: the parsed configuration.
        code: the exit code.
    """

    argv: Sequence[str]
    prog: str
    interrupted: str
    preparing: bool = False
    config: TrainConfig | None = None
    code: int = exit_codes.DONE
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def parse(self) -> TrainConfig | None:
        """Return the configuration, or None if there is nothing to run and `code` says why."""
        configure_logging()
        yield_idle_threads()
        configure_allocator()
        if _cannot_start():
            self.code = exit_codes.CONFIGURATION
            return None
        self.config, _ = parse_flags(self.argv, prog=self.prog, guide=PREPARE if self.preparing else TRAIN)
        if self.config is None:
            self.code = _models(None)
        elif self.config.run.dry_run:
            self._stack.enter_context(planning())
        return self.config

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        """Print an expected error and set the exit code; any other error is raised."""
        self._stack.close()
        if isinstance(error, KeyboardInterrupt):  # while loading; in a step it is a signal
            if launched_rank() == 0:
                end_of_echo = "\n" if sys.stderr.isatty() else ""  # after `^C`
                print(f"{end_of_echo}{self.interrupted}", file=sys.stderr)
            self.code = exit_codes.killed_by(signal.SIGINT)
        elif isinstance(error, ConfigError):
            message = str(_with_the_rest(error, preparing=self.preparing))
            if not self.argv and not self.preparing:
                message += f"\n{self.prog} --help lists the options. New here? finetrainers quickstart needs none."
            print_refusal(message)
            self.code = exit_codes.refused([problem.where for problem in error.problems])
        elif isinstance(error, Exception):
            directory = None if self.preparing or self.config is None else self.config.run.output_dir
            if self.config is None or not _say_failure(error, directory, self.config.run.verbose):
                return False
            self.code = exit_codes.FAILED
        return error is None or isinstance(error, (KeyboardInterrupt, Exception))


def _say_failure(error: Exception, directory: Path | None = None, verbose: bool = False) -> bool:
    """Print an expected error in one sentence; return False, to raise it, if it is unexpected or needs a traceback.

    Args:
        error: the error.
        directory: of the run, which keeps the traceback.
        verbose: whether the terminal shows the traceback.
    """
    sentence = user_message(error)
    if isinstance(error, BrokenPipeError) and _output_is_closed():
        return False
    if sentence is None or verbose or os.environ.get(_TRACEBACK):
        return False
    where = f"set {_TRACEBACK}=1 to print it"
    if directory is not None and directory.is_dir():
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{''.join(traceback.format_exception(error))}\n"
        with contextlib.suppress(OSError):  # the disk may have failed
            with open(directory / "traceback.txt", "a", encoding="utf-8") as file:
                file.write(text)
            where = str(directory / "traceback.txt")
    print_error(f"{sentence}\n(traceback: {where})")
    return True


def _cannot_start(*, joining: bool = True) -> bool:
    """Return whether libraries are too old or the launcher's variables are wrong, and print the problems.

    Args:
        joining: whether the command joins the processes that a launcher has started.
    """
    outdated = version_problem()
    problems = [Problem("", outdated, "not_installed")] if outdated is not None else []
    problems += [Problem(*problem) for problem in launch_problems()] if joining else []
    if problems:
        print_error(ConfigError(problems, of="this environment"))
    return bool(problems) or _refuses_log_level()


def _refuses_log_level() -> bool:
    """Return whether the level of the log is invalid, and print that."""
    if (problem := log_level_problem()) is not None:
        print_error(ConfigError([Problem(*problem)], of="this environment"))
    return problem is not None


def _with_the_rest(error: ConfigError, *, preparing: bool = False) -> ConfigError:
    """Return the error, together with the problems between the options that are valid by themselves."""
    if error.rest is None:
        return error
    from finetrainers.plan.preflight import preflight

    try:
        preflight(error.rest, preparing=preparing)
    except ConfigError as more:
        # A problem that names a wrong option may be a consequence of it.
        new = [p for p in more.problems if not any(name in str(p) for name in error.wrong)]
        return ConfigError([*error.problems, *new])
    return error


def _list_command(commands: Any, name: str, about: str, options: ArgumentParser) -> None:
    """List a command that parses its flags itself."""
    commands.add_parser(name, help=about, parents=[options], add_help=False)


def _parser() -> CommandParser:
    parser = CommandParser(prog="finetrainers", description="Train LoRAs or fully finetune video diffusion models.")
    parser.add_argument("--version", action="version", version=f"finetrainers {__version__}")
    commands: Any = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=ArgumentParser)
    parser.commands = commands

    commands.add_parser("train", help="train a model", add_help=False)
    commands.add_parser("prepare", help="encode clips and captions into the cache that `train` reads", add_help=False)

    add_init(commands)
    about = "train the stages of a stage file in order"
    _list_command(commands, "run", about, run_options())
    _list_command(commands, "check", "check every item of a dataset, without model weights", check_options())
    _list_command(commands, "estimate", "estimate memory use and suggest options that fit a GPU", estimate_options())
    about = "find the fastest batch size of each bucket that fits the GPU"
    _list_command(commands, "search-batch", about, search_batch_options())
    add_doctor(commands)

    about = "train a LoRA of a new look on the demo model, on any CPU, in minutes"
    quickstart = commands.add_parser("quickstart", **described(about, "quickstart"))
    place: dict[str, Any] = {"nargs": "?", "default": Path("quickstart"), "help": "output directory [quickstart]"}
    add_demonstration(quickstart, "quickstart:quickstart", steps=150, **place)

    _add_models(commands)
    add_export(commands)
    _list_command(commands, "sample", "sample clips of a run, a checkpoint, a LoRA or a model", sample_options())
    add_report(commands)
    about = "sample and score a run's checkpoints as they appear, on another device"
    _list_command(commands, "watch", about, watch_options())
    add_plot(commands)
    add_cache(commands)
    add_ckpt(commands)
    add_demo(commands)
    add_serve_reward(commands)
    add_sync(commands)

    schema = commands.add_parser("schema", help="print the JSON schema of config files, for editors")
    schema.set_defaults(run=_schema)

    docs = commands.add_parser("docs", help="print docs/reference/configuration.md, generated from the options")
    docs.add_argument("--types", action="store_true", help="print finetrainers/config/options.py instead")
    docs.set_defaults(run=_docs)
    return parser


def _add_models(commands: Any) -> None:
    """Add the subcommands on model families to the parser."""
    about = "list the model families, their sizes and frame rates, and the additions of installed packages"
    models = commands.add_parser("models", **described(about, "models"))
    models.set_defaults(run=_models)

    about = "write a tiny random model of a family, for trials without downloads"
    training = "train --pretrained_model_name_or_path tiny-model \\\n      --data_root clips"
    tiny = commands.add_parser("tiny", **described(about, "tiny FAMILY tiny-model", training))
    tiny.add_argument("family", help="name from `finetrainers models`")
    tiny.add_argument(
        "directory", type=new_directory, help="new or empty directory, where the model is written in diffusers layout"
    )
    tiny.add_argument("--version", help="kind of checkpoint, such as i2v or 2.3; an unknown one lists all [the first]")
    tiny.add_argument("--seed", type=int, default=0, help="seed; equal seeds give equal weights [0]")
    tiny.set_defaults(run=_tiny, check=_tiny_problems)


def _models(_: argparse.Namespace | None) -> int:
    from finetrainers.config.methods import METHODS
    from finetrainers.models.registry import FAMILIES, families
    from finetrainers.rewards.registry import REWARDS

    width = 2 + max(map(len, families()))
    print(f"{'name':<{width}}{'frames':<10}{'size multiple':<15}{'fps':<6}{'process':<16}conditioning frames")
    for name, family in families().items():
        facts, g = family.facts, family.facts.geometry
        process = "flow matching" if facts.is_flow else "v-prediction"
        frames = "any" if facts.any_frame else "none" if facts.first_frame == "none" else "the first"
        if facts.first_frame == "unknown":
            frames = f"up to {frames}, with I2V weights" if facts.any_frame else f"{frames}, with I2V weights"
        print(f"{name:<{width}}{f'{g.temporal}k+1':<10}{g.size_multiple:<15}{g.fps:<6g}{process:<16}{frames}")
    registries = (FAMILIES, METHODS, REWARDS)
    for registry in registries:
        registry.all()
    offers = [(r.noun, name, package) for r in registries for name, package in r.packages.items()]
    if offers:
        print("\nfrom installed packages:")
    for noun, name, package in offers:
        print(f"  {noun:<14}{name:<24}{package}")
    broken = [reason for registry in registries for reason in registry.broken]
    if broken:
        print("\nnot usable:")
    for reason in broken:
        print(f"  {reason}")
    return 0


def _tiny_problems(arguments: argparse.Namespace) -> list[Problem]:
    """Return the problem with the family of a tiny model, or else with its version."""
    from finetrainers.models.registry import tiny_builder

    place = "family"
    try:
        tiny_builder(arguments.family)
        place = "--version"
        tiny_builder(arguments.family, arguments.version)
    except KeyError as error:
        return [Problem(place, str(error.args[0]), "unknown")]
    return []


def _tiny(arguments: argparse.Namespace) -> int:
    from finetrainers.models.registry import build_tiny

    quiet_progress_bars()
    print(f"making a tiny random {arguments.family} in {arguments.directory}", flush=True)
    with working("writing its weights"):
        build_tiny(arguments.family, arguments.directory, seed=arguments.seed, version=arguments.version)
    print(f"wrote a tiny random {arguments.family} to {arguments.directory}")
    return 0


def _schema(_: argparse.Namespace) -> int:
    import json

    from finetrainers.config.document import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _docs(arguments: argparse.Namespace) -> int:
    from finetrainers.config.document import configuration_page, options_module

    print(options_module() if arguments.types else configuration_page(), end="")
    return 0
