"""`finetrainers sync`: copy a run's published checkpoints to another machine, again and again."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from finetrainers.config.arguments import command_text, path_argument
from finetrainers.utils import exit_codes
from finetrainers.utils.launch import print_error
from finetrainers.utils.text import duration, quoted

from .overview import described

if TYPE_CHECKING:
    from finetrainers.tools.sync import Sync

_MORE = """It copies published checkpoints, without optimizer state, and the weights before the manifest, so that
`finetrainers watch` on the other machine never reads an incomplete checkpoint. The run's settings, metrics and events
are also copied. The target must be new, empty or a copy of this run. Nothing is deleted there without --prune. It runs
until you press Ctrl-C. ssh must work without a password. Failed transfers are retried."""
#: Seconds before the first retry; each further one waits twice as long.
_FIRST_RETRY_S = 5
_LAST_RETRY_S = 300
_TRIES_ONCE = 4


def add_sync(commands: Any) -> None:
    """Add the subcommand to the parser."""
    examples = (
        "sync runs/mystyle me@gpu-box:runs/mystyle --every 100",
        'sync runs/mystyle gpu-box:runs/mystyle --once --rsh "ssh -p 2222"',
    )
    about = "copy a run's checkpoints to another machine with rsync, for `watch`"
    sync = commands.add_parser("sync", **described(about, *examples, more=_MORE))
    sync.add_argument("run_directory", type=path_argument, metavar="RUN", help="a run's --output_dir")
    sync.add_argument("target", metavar="TARGET", help="user@host:directory, or a directory")
    sync.add_argument(
        "--every", type=seconds, default=100.0, metavar="SECONDS", help="seconds between checks for checkpoints [100]"
    )
    sync.add_argument("--once", action="store_true", help="copy existing checkpoints, and exit")
    sync.add_argument(
        "--prune",
        action="store_true",
        help="delete checkpoints at the target that the run has deleted, except the best",
    )
    sync.add_argument(
        "--rsh",
        type=command_text,
        metavar="COMMAND",
        help="command that rsync connects with [ssh -o BatchMode=yes ...]",
    )
    sync.set_defaults(run=_sync, check=lambda arguments: _build_sync(arguments).problems())


def seconds(text: str) -> float:
    """Return the seconds of a pause or a limit.

    Raises:
        argparse.ArgumentTypeError: it is not a number above 0.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e7:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {quoted(text)}")
    return number


def _build_sync(arguments: argparse.Namespace) -> Sync:
    from finetrainers.tools.sync import Sync

    return Sync(arguments.run_directory, arguments.target, arguments.rsh, arguments.prune)


def _sync(arguments: argparse.Namespace) -> int:
    try:
        return _copy_on(_build_sync(arguments), every=arguments.every, once=arguments.once)
    except KeyboardInterrupt:
        print("stopped; the same command copies the rest", file=sys.stderr)
        return exit_codes.killed_by(signal.SIGINT)


def _copy_on(sync: Sync, *, every: float, once: bool) -> int:
    """Copy repeatedly; a failure is reported, and retried after a pause that grows."""
    from finetrainers.tools.sync import TransferError, told

    failures = 0
    if not once:
        print(f"copying {sync.run} to {sync.target} every {every:g} s; Ctrl-C stops", flush=True)
    while True:
        try:
            arrived = sync.transfer()
        except TransferError as error:
            failures += 1
            pause = min(_FIRST_RETRY_S * 2 ** (failures - 1), _LAST_RETRY_S)
            if once and failures == _TRIES_ONCE:
                print_error(error)
                return exit_codes.FAILED
            print(f"{error}; retry {failures} in {duration(pause)}", file=sys.stderr, flush=True)
        else:
            failures, pause = 0, every
            for checkpoint in arrived:
                print(told(checkpoint, sync.target), flush=True)
            if once:
                if not arrived and sync.has_checkpoints:
                    print(f"{sync.target} has every published checkpoint")
                elif not arrived:
                    print(f"{sync.run} has no checkpoint yet; its settings and records are at {sync.target}")
                return exit_codes.DONE
        time.sleep(pause)
