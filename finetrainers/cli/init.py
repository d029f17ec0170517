"""`finetrainers init`: a commented config file for a directory of clips."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.arguments import ArgumentType, path_argument
from finetrainers.config.errors import Problem
from finetrainers.utils import exit_codes
from finetrainers.utils.files import folder_problem, write_text_atomic
from finetrainers.utils.gpus import read_gib
from finetrainers.utils.logs import quiet_progress_bars
from finetrainers.utils.progress import Stages, working
from finetrainers.utils.text import plural, printable

from .overview import described

if TYPE_CHECKING:
    from finetrainers.tools.init.choose import Proposal

_MORE = """Asks for what no flag answers, or takes defaults with --yes and where the input is not a terminal. Reads the
clips as `check` does, chooses memory options by the estimate, and validates the result as a dry run does. Rank,
learning rate, steps and sizes are chosen by each run, so the file has them as comments. Loads no weights, and
overwrites no file."""
_MAX_NAMES = 5


def add_init(commands: Any) -> None:
    """Add the subcommand to the parser."""
    about = "write a commented config file for a directory of clips"
    examples = (
        "init",
        "init clips --kind style --trigger_word MYSTYLE --yes",
        "init clips --card 16GB --output run16.toml",
    )
    init = commands.add_parser("init", **described(about, *examples, more=" ".join(_MORE.split())))
    init.add_argument("data_root", nargs="?", metavar="DIR", help="directory of clips or images, with captions [clips]")
    init.add_argument("--model", metavar="NAME", help="a Hub ID, a directory, or a demo model [by the card]")
    init.add_argument("--card", metavar="16GB", help="GPU by size or name; this, or cpu [this GPU, else cpu]")
    init.add_argument(
        "--host", type=ArgumentType(read_gib), metavar="64GB", help="host memory to plan for [this machine's]"
    )
    init.add_argument("--kind", metavar="KIND", help="character, style, motion or general [style]")
    init.add_argument("--trigger_word", metavar="WORD", help="calls up what the LoRA learned; none [by kind]")
    init.add_argument("--other_clips", metavar="DIR", help="clips without the new concept, against leakage [none]")
    init.add_argument("--output_dir", metavar="DIR", help="directory of the run [runs/WORD]")
    init.add_argument(
        "--output", type=path_argument, default=Path("run.toml"), metavar="FILE", help="the file [run.toml]"
    )
    init.add_argument("--yes", action="store_true", help="take defaults instead of asking")
    init.set_defaults(run=_init, check=_read_flags)


def _read_flags(arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems of the arguments, and replace them by their values."""
    from finetrainers.tools.init.answers import QUESTIONS

    problems = []
    outputs = (arguments.output, _dataset_path(arguments.output))  # a question may ask for the second
    if existing := [path for path in outputs if path.exists() or path.is_symlink()]:
        problems.append(Problem("--output", f"{existing[0]} exists; give another file", "occupied"))
    elif (problem := folder_problem(arguments.output.parent)) is not None:
        problems.append(Problem("--output", problem))
    for name, question in QUESTIONS.items():
        text = getattr(arguments, name)
        try:
            if text is not None:
                setattr(arguments, name, question.read(text))
        except ValueError as error:
            problems.append(Problem.from_error(question.flag, error))
    return problems


def _init(arguments: argparse.Namespace) -> int:
    from finetrainers.tools.init.answers import QUESTIONS, complete

    quiet_progress_bars()
    asks = not arguments.yes and sys.stdin is not None and sys.stdin.isatty()
    flags = {name: value for name in QUESTIONS if (value := getattr(arguments, name)) is not None}
    flags |= {} if arguments.host is None else {"host_gib": arguments.host}
    try:
        answers = complete(flags, ask=input if asks else None)
    except (KeyboardInterrupt, EOFError):
        print("\nstopped; no file is written", file=sys.stderr)
        return exit_codes.killed_by(signal.SIGINT)
    return _write(answers, arguments.output)


def _dataset_path(output: Path) -> Path:
    """Return the path of the file of two datasets, which has no other use than the config file `output`."""
    return output.with_name(f"{output.stem}-data.toml")


def _write(answers: dict[str, Any], output: Path) -> int:
    """Write the files, or none, and print what they are made from and what comes next."""
    from finetrainers.tools.init.choose import propose
    from finetrainers.tools.init.file import next_commands, write_dataset, write_file

    with contextlib.ExitStack() as written:
        dataset = _dataset_path(output) if answers["other_clips"] else None
        if dataset is not None:  # planning reads it
            dataset.parent.mkdir(parents=True, exist_ok=True)
            written.callback(dataset.unlink, missing_ok=True)
            write_text_atomic(dataset, write_dataset(dataset, answers))
        with working("planning the run"), Stages() as progress:
            proposal = propose(answers, progress=progress, dataset=dataset)
        _print_data(proposal, answers)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(output, write_file(output, proposal, answers))
        written.pop_all()
    print(f"wrote {' and '.join(str(path) for path in (output, dataset) if path)}; the dry run passes. Next:")
    for command in next_commands(output):
        print(f"  {command}")
    return exit_codes.DONE


def _print_data(proposal: Proposal, answers: dict[str, Any]) -> None:
    """Print what the run is made from."""
    if proposal.rejected:
        roots = " and ".join(str(answers[name]) for name in ("data_root", "other_clips") if answers[name])
        print(f"{plural(len(proposal.rejected), 'file')} of {roots} cannot be used:")
    for item in proposal.rejected[:_MAX_NAMES]:
        print(f"  {printable(item['name'] + ': ' + item['reason'])}")
    sizes = ", ".join(f"{row[1]} of {row[0]}" for row in proposal.checked.plan.table()[1:])
    print(f"model: {answers['model']}")
    blank = f", {proposal.blank} without a caption" if proposal.blank else ""
    print(f"data: {proposal.usable}{blank}; trained on: {sizes}")
    if proposal.short:
        count = plural(proposal.short, "clip")
        print(f"warning: {count} shorter than the model's shortest clip train as images; use longer ones")
    if proposal.memory:
        print(proposal.memory)
