"""Copying of a run's published checkpoints with rsync, without optimizer state. Imports no torch.

Weights are copied before manifests: readers of the copy compare it with the manifest, as everywhere, and so never take
half a checkpoint for a complete one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from finetrainers.config.base import read_path
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.plan.initial_weights import INITIAL_LORA
from finetrainers.rundir.best import BEST
from finetrainers.rundir.find import CheckpointInfo, checkpoints_dir, scan_checkpoints
from finetrainers.rundir.identity import IDENTITY, Identity, read_identity
from finetrainers.rundir.lock import HOLDER, in_use, keep_unused
from finetrainers.rundir.manifest import MANIFEST, is_optimizer_state, read_manifest
from finetrainers.utils.failures import ExpectedError, Kind
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import file_sha256, folder_problem, missing_path_problem
from finetrainers.utils.text import duration, file_size

from .copies import EVENTS, METRICS, copy_problem

logger = logging.getLogger(__name__)

#: Suffixes of copied files of the run directory: settings, metrics, events, status of data items, the model card.
_SMALL = (".toml", ".json", ".jsonl", ".md", ".txt")
#: A transfer without progress for this time is ended, and retried.
_TIMEOUT_S = 120
_REMOTE = re.compile(r"^(?:[^/:]+:|rsync://)")
_DAEMON = re.compile(r"^(?:[^/:]+::|rsync://)")
#: Seconds until a machine that does not answer counts as unreachable.
_CONNECT_S = 20
#: Exit codes of rsync that no retry changes: wrong usage, and an option that one of the two sides lacks.
_USAGE = (1, 4)
#: Output of rsync about a directory that does not exist (ENOENT).
_MISSING = re.compile(r"change_dir .*\(2\)")
#: No questions: there is no user to answer them in the background, and each transfer would ask again.
SSH = f"ssh -o BatchMode=yes -o ConnectTimeout={_CONNECT_S} -o ServerAliveInterval=30"
#: Output of ssh if it would have to ask for a password, or whether to trust a machine.
_ASKS = re.compile(r"Permission denied \([a-z,-]+\)|Host key verification failed")


def login_problem(lines: Sequence[str], host: str) -> str | None:
    """Return the line of ssh's output about a question that it would have to ask, with the remedy, or None."""
    refusal = next((line for line in lines if _ASKS.search(line)), None)
    if refusal is None:
        return None
    return f"{refusal}; let `ssh {host}` work without a prompt first (ssh-copy-id), or set --rsh"


class TransferError(ExpectedError):
    """Failure of rsync."""

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        """Make the error.

        Args:
            message: the failure and its reason.
            is_missing: whether the directory to read from does not exist.
        """
        super().__init__(message)
        self.is_missing = is_missing


@dataclass(frozen=True)
class Copied:
    """Checkpoint that has arrived."""

    name: str
    num_bytes: int
    seconds: float


@dataclass
class Sync:
    """Copies of a run.

    Attributes:
        run: its directory.
        target: `user@host:dir`, or a folder.
        rsh: the command that rsync connects with, or None for that of RSYNC_RSH, or ssh without questions.
        prune: whether checkpoints that the run no longer has are deleted at the target.
    """

    run: Path
    target: str
    rsh: str | None = None
    prune: bool = False
    _arrived: dict[str, str] = field(default_factory=dict)  # SHA-256 of the manifest by name
    _has_compared: bool = False  # whether the target's records have proved it a copy of this run

    @property
    def _is_remote(self) -> bool:
        return _REMOTE.match(self.target) is not None

    @property
    def _destination(self) -> str:
        """The target for rsync, resolved since --mkpath fails on `../new`.

        Without the slash at its end, a single file would get the target's name.
        """
        return f"{(self.target if self._is_remote else str(read_path(self.target).resolve())).rstrip('/')}/"

    def problems(self) -> Iterator[Problem]:
        """Yield the problems that can be found before anything is copied."""
        if not self.run.is_dir():
            message = f"{self.run} {missing_path_problem(self.run, folder=True)}"
            yield Problem("RUN", message, "invalid" if self.run.exists() else "not_found")
        elif not (self.run / "config.toml").is_file() and not checkpoints_dir(self.run).is_dir():
            message = f"{self.run} has neither config.toml nor checkpoints/; use a run's --output_dir"
            yield Problem("RUN", message, "not_found")
        is_remote = self._is_remote
        if self.target.startswith("-"):
            message = f"{self.target} begins with a hyphen, as options do; use ./{self.target}"
            yield Problem("TARGET", message)
        try:
            path = None if is_remote else read_path(self.target)
        except ValueError as error:
            yield Problem.from_error("TARGET", error)
            return
        if is_remote and self.target.endswith(":"):
            yield Problem("TARGET", f"{self.target} has no directory; use user@host:directory", "required")
        if path is not None and (problem := folder_problem(path)) is not None:
            yield Problem("TARGET", problem)
        if path is not None and path.resolve().is_relative_to(self.run.resolve()):
            message = f"{self.target} is the run itself, or inside it; use another directory"
            yield Problem("TARGET", message, "conflict")
        if shutil.which("rsync") is None:
            message = "is not installed; apt-get install rsync (here, and at the target)"
            yield Problem("rsync", message, "not_installed")
        if is_remote and self._connection() and not self.rsh and shutil.which("ssh") is None:
            yield Problem("ssh", "is not installed; apt-get install openssh-client", "not_installed")

    def _connection(self) -> list[str]:
        """Return rsync's arguments for connecting to the target."""
        if _DAEMON.match(self.target):
            return [f"--contimeout={_CONNECT_S}"]
        rsh = self.rsh or (None if os.environ.get("RSYNC_RSH") else SSH)
        return [] if rsh is None or not self._is_remote else [f"--rsh={rsh}"]

    def _published(self) -> list[CheckpointInfo]:
        checkpoints = scan_checkpoints(self.run, weights_only=True)
        return [checkpoint for checkpoint in checkpoints if checkpoint.damage is None]

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run has published a checkpoint."""
        return bool(self._published())

    def transfer(self) -> list[Copied]:
        """Copy everything that the target lacks, and return the checkpoints that have arrived.

        Raises:
            TransferError: rsync failed. Files that arrived before stay, and the next call copies the rest.
            ConfigError: the target is not a copy of this run. Nothing is written there.
        """
        with self._checked_target():
            return self._copy_all()

    def _copy_all(self) -> list[Copied]:
        small = self._small_files()
        if read_identity(self.run) is None:  # then these identify the copy's run, and come first
            self._copy([name for name in (EVENTS, METRICS) if name in small])
        self._copy(small)
        published = self._published()
        arrived = [copy for checkpoint in published if (copy := self._copy_checkpoint(checkpoint)) is not None]
        if self.prune and published:  # an unmounted disk has none
            self._prune()
        return arrived

    def _small_files(self) -> list[str]:
        files = [path for path in sorted(self.run.iterdir()) if path.suffix in _SMALL and path.is_file()]
        logs = self.run / "logs"
        files += [path for path in sorted(logs.rglob("*")) if path.is_file() and "wandb" not in path.parts]
        files += (self.run / INITIAL_LORA).glob("*.safetensors")  # without which a copy could not be continued
        names = [path.relative_to(self.run).as_posix() for path in files if not path.name.startswith(".")]
        return [name for name in names if name != IDENTITY]  # the target's own file marks it as a copy

    @contextlib.contextmanager
    def _checked_target(self) -> Iterator[None]:
        """Keep the target a copy of this run, present or future, without a run of this machine in it, within the block.

        Raises:
            TransferError: another process uses it at the moment, or it cannot be read.
            ConfigError: it is something else.
        """
        with contextlib.ExitStack() as locks:
            folder = Path(locks.enter_context(TemporaryDirectory())) if self._is_remote else read_path(self.target)
            try:
                locks.enter_context(keep_unused(folder))
            except BlockingIOError:
                if in_use(folder):
                    self._refuse("is in use by a run that trains there; use another directory")
                raise TransferError(f"{self.target} is in use by another process") from None
            is_empty = self._fetch_records(folder) if self._is_remote else _is_empty(folder)
            if self._is_remote and (folder / HOLDER).is_file():
                self._refuse(f"is in use by a run that trains there; if that run was killed, remove {HOLDER} there")
            if (problem := copy_problem(self.run, folder, is_empty=is_empty)) is not None:
                self._refuse(*problem)
            self._has_compared = True
            identity = read_identity(self.run)
            if identity is not None and not (folder / IDENTITY).is_file():
                with TemporaryDirectory() as sent:
                    Identity(identity.run, is_copy=True).write(Path(sent) / IDENTITY)
                    self._rsync(["--mkpath", "--", f"{sent}/{IDENTITY}", self._destination])
            yield

    def _refuse(self, problem: str, kind: Kind = "occupied") -> None:
        raise ConfigError([Problem("TARGET", f"{self.target} {problem}", kind)])

    def _fetch_records(self, folder: Path) -> bool:
        """Fetch the records that identify a remote target's run into a folder; return whether the target is empty."""
        if not self._fetch(folder, IDENTITY, HOLDER, *([] if self._has_compared else [EVENTS])):
            return True
        if (folder / IDENTITY).is_file():
            return False
        self._fetch(folder, EVENTS, METRICS, f"checkpoints/*/{MANIFEST}")
        listing = self._rsync(["--list-only", "--", self._destination])
        names = [fields[4] for line in listing.splitlines() if len(fields := line.split(maxsplit=4)) == 5]
        return all(_is_insignificant(name) for name in names)

    def _fetch(self, folder: Path, *names: str) -> bool:
        """Fetch files of the target into a folder, as far as they exist; return whether the target exists."""
        parents = dict.fromkeys(f"/{parent}/" for name in names for parent in reversed(Path(name).parents[:-1]))
        includes = [f"--include={pattern}" for pattern in [*parents, *(f"/{name}" for name in names)]]
        try:
            self._rsync(["--recursive", *includes, "--exclude=*", "--", self._destination, f"{folder}/"])
        except TransferError as error:
            if error.is_missing:
                return False
            raise
        return True

    def _copy_checkpoint(self, checkpoint: CheckpointInfo) -> Copied | None:
        """Copy a checkpoint, and return it, or None if it arrived earlier or was removed meanwhile."""
        name, started = checkpoint.path.name, time.monotonic()
        try:
            files, digest = read_manifest(checkpoint.path)["files"], file_sha256(checkpoint.path / MANIFEST)
            if name.startswith(".") or self._arrived.get(name) == digest:
                return None
            needed = {file: entry["size"] for file, entry in files.items() if not is_optimizer_state(file)}
            folder = checkpoint.path.relative_to(self.run).as_posix()
            self._copy([f"{folder}/{file}" for file in needed])
            fault_point("sync.manifest")
            self._copy([f"{folder}/{MANIFEST}"])
        except (OSError, ValueError, TransferError) as error:
            if isinstance(error, TransferError | ConfigError) and (checkpoint.path / MANIFEST).is_file():
                raise
            logger.info("%s was removed while it was copied; the next checkpoints follow", name)
            return None
        self._arrived[name] = digest
        return Copied(name, sum(needed.values()), time.monotonic() - started)

    def _copy(self, files: Sequence[str]) -> None:
        """Copy files of the run, named relative to it, to the same paths at the target."""
        # A step that was saved again may have the size of the old one, and a time within the same second.
        options = "--archive --no-owner --no-group --modify-window=-1 --mkpath --partial-dir=.rsync-partial --from0"
        places = ["--files-from=-", "--", f"{self.run.resolve()}/", self._destination]
        self._rsync([*options.split(), *places], "\0".join(files))

    def _prune(self) -> None:
        """Delete checkpoints at the target that the run has pruned, except the one marked as the best there."""
        target = f"{self._destination}checkpoints"
        best = None
        with contextlib.suppress(TransferError):  # no checkpoint is marked
            best = re.search(
                rf"{BEST} -> (step-\d+)", self._rsync(["--links", "--list-only", "--", f"{target}/{BEST}"])
            )
        protected = [] if best is None else [f"--filter=P /{best[1]}"]
        # Without --recursive, rsync does not examine the contents of checkpoints that stay.
        arguments = ["--dirs", "--existing", "--delete", *protected, "--include=/step-*", "--exclude=/*"]
        self._rsync([*arguments, "--", f"{checkpoints_dir(self.run).resolve()}/", f"{target}/"])

    def _rsync(self, arguments: Sequence[str], stdin: str = "") -> str:
        """Run rsync, and return its output.

        Raises:
            TransferError: it failed; the message has its last line.
            ConfigError: it failed, and would fail again.
        """
        command = ["rsync", f"--timeout={_TIMEOUT_S}", *self._connection(), *arguments]
        completed = subprocess.run(command, input=stdin, capture_output=True, text=True, errors="replace")
        if completed.returncode:
            lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
            # rsync's last line has a position in its source code. The reason is printed before, unless it is lost: an
            # rsync that ends at the target may close the connection first.
            reasons = [line for line in lines if not line.startswith("rsync error:")] or lines
            reason = login_problem(lines, self.target.partition(":")[0]) or next(iter(reasons), "no reason was printed")
            message = f"rsync to {self.target} failed with exit code {completed.returncode}: {reason}"
            if completed.returncode in _USAGE:
                raise ConfigError([Problem("TARGET", message, "unsupported")])
            raise TransferError(message, is_missing=any(_MISSING.search(line) for line in lines))
        return completed.stdout


def _is_empty(directory: Path) -> bool:
    return not directory.exists() or all(_is_insignificant(path.name) for path in directory.iterdir())


def _is_insignificant(name: str) -> bool:
    """Return whether an entry of a directory is not a run's, such as a leftover of an interrupted transfer."""
    return name.startswith(".") or name == "lost+found"


def told(copied: Copied, target: str) -> str:
    """Return a line about a checkpoint that has arrived."""
    return f"{copied.name}: {file_size(copied.num_bytes)} copied to {target} in {duration(copied.seconds)}"
