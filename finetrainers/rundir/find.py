"""The checkpoints of a run, and the choice of the one to continue from. Imports no torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.utils.failures import InputError
from finetrainers.utils.launch import launched_rank
from finetrainers.utils.reading import MAX_RECORDS, expect, fits, read_json_object

from .manifest import damage, lacks_optimizer, read_manifest, total_size

logger = logging.getLogger(__name__)

#: Layout of checkpoint directories. 1 had no manifest, so that nothing vouches for its contents; 2 did not record the
#: run's path through its data.
FORMAT = 3
#: Layout 3 with the optimizer's state in slices: earlier versions look for it in one file.
SLICED_FORMAT = 4
#: Largest file that each process reads itself: such files describe the checkpoint and hold no weights.
SMALL_BYTES = 1 << 20
#: Ending of a checkpoint's name while a new checkpoint of the same step takes its place.
REPLACED = ".replaced"
#: Message about a checkpoint that cannot be resumed, because `finetrainers sync` copied it without its optimizer state.
WITHOUT_OPTIMIZER = (
    "has no optimizer state: it is a copy for sampling. Resume where it was trained, or start a new run from its "
    "weights with --init_from"
)
_STEP_DIR = re.compile(rf"^(?:step-(?P<step>\d+)|\.step-(?P<replaced>\d+){re.escape(REPLACED)})$")


def checkpoints_dir(output_dir: Path) -> Path:
    """Return the directory in which a run keeps its checkpoints."""
    return output_dir / "checkpoints"


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint directory of a run.

    Attributes:
        step: the optimizer steps that it holds.
        path: its directory.
        damage: why it cannot be used, judged by names and sizes, or None if it is complete.
        size: bytes; 0 if damaged.
        saved_at: seconds since 1970; 0 if damaged.
    """

    step: int
    path: Path
    damage: str | None
    size: int = 0
    saved_at: float = 0.0


def scan_checkpoints(output_dir: Path, *, weights_only: bool = False) -> list[CheckpointInfo]:
    """Return all checkpoints of a run, complete or damaged, oldest step first; half-written ones have another name.

    Args:
        output_dir: of the run.
        weights_only: whether a checkpoint without its optimizer state also counts as complete.
    """
    root = checkpoints_dir(output_dir)
    if not root.is_dir():
        return []
    by_step: dict[int, Path] = {}
    for path in root.iterdir():
        step = step_of(path)
        # One that was being replaced when its process died counts only if the new one is not there.
        if step is not None and (step not in by_step or not path.name.endswith(REPLACED)):
            by_step[step] = path
    return [_inspect(step, path, weights_only) for step, path in sorted(by_step.items())]


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint directory's name, including one being replaced, or None for any other name."""
    match = _STEP_DIR.match(path.name)
    return None if match is None else int(match["step"] or match["replaced"])


def _inspect(step: int, path: Path, weights_only: bool) -> CheckpointInfo:
    problem = damage(path, contents=False, weights_only=weights_only)
    if problem is not None:
        return CheckpointInfo(step, path, problem)
    manifest = read_manifest(path)
    return CheckpointInfo(step, path, None, size=total_size(manifest), saved_at=float(manifest.get("saved_at", 0.0)))


def find_checkpoint(
    requested: str | None,
    output_dir: Path,
    *,
    weights_only: bool = False,
    contents: bool = True,
    known_damage: Mapping[Path, str] | None = None,
) -> Path | None:
    """Return the checkpoint that `auto`, `latest`, a step number or a directory names, or None if none is requested.

    Every byte of it is compared with its manifest, unless processes are to share that work. `latest` falls back to the
    newest checkpoint that passes, with a warning for each that does not. So does `auto`, which requests none without
    checkpoints, not even damaged ones.

    Args:
        requested: `auto`, `latest`, a step number, a directory or None.
        output_dir: of the run.
        weights_only: whether its optimizer state may be missing.
        contents: whether all bytes are compared, or only those of small files and the sizes of the others.
        known_damage: checkpoints already found to be damaged, with the reason.

    Raises:
        ValueError: it does not exist or is damaged; the message lists those that exist.
    """
    largest = None if contents else SMALL_BYTES
    root, checkpoints = checkpoints_dir(output_dir), scan_checkpoints(output_dir, weights_only=weights_only)
    if requested is None or (requested == "auto" and not checkpoints):
        return None

    def find_damage(path: Path) -> str | None:
        reason = (known_damage or {}).get(path)
        return reason or damage(path, contents=True, weights_only=weights_only, largest=largest)

    if requested in ("auto", "latest"):
        return _find_newest_verified(root, checkpoints, find_damage, weights_only=weights_only)
    names = ", ".join(str(checkpoint.step) for checkpoint in checkpoints if checkpoint.damage is None) or "none"
    path = _find_named(requested, root, checkpoints, names)
    problem = find_damage(path)
    if problem is None:
        return path
    if lacks_optimizer(path):
        raise InputError(f"{path} {WITHOUT_OPTIMIZER}", "not_found")
    message = f"{path} is damaged: {problem}; `latest` uses the newest complete one (by file sizes: {names})"
    raise InputError(message, "unreadable")


def _find_named(requested: str, root: Path, checkpoints: Sequence[CheckpointInfo], names: str) -> Path:
    """Return the checkpoint of a step, or the directory; `names` are the complete ones for messages."""
    if requested.isdigit():
        path = next((checkpoint.path for checkpoint in checkpoints if checkpoint.step == int(requested)), None)
        if path is None:
            raise InputError(f"no checkpoint of step {requested} in {root}; valid: {names}", "not_found")
        return path
    if not (Path(requested) / "state.json").is_file():
        raise InputError(
            f"{requested} is not a checkpoint (no state.json); use `auto`, `latest`, a step ({names}) or a directory",
            "not_found",
        )
    return Path(requested)


def _find_newest_verified(
    root: Path, checkpoints: list[CheckpointInfo], find_damage: Callable[[Path], str | None], *, weights_only: bool
) -> Path:
    """Return the newest checkpoint whose files match its manifest; see `damage`."""
    if not checkpoints:
        remedy = "wait until the run has saved one" if weights_only else "remove the option to start a new run"
        raise InputError(f"no checkpoint in {root}; {remedy}", "not_found")
    damaged: list[str] = []
    for checkpoint in reversed(checkpoints):
        problem = checkpoint.damage or find_damage(checkpoint.path)
        if problem is None:
            for reason in damaged:
                if launched_rank() == 0:  # all processes read the same directory
                    logger.warning(
                        "continuing from %s, because a newer checkpoint is damaged: %s", checkpoint.path, reason
                    )
            return checkpoint.path
        damaged.append(f"{checkpoint.path.name}: {problem}")
    if not weights_only and all(lacks_optimizer(checkpoint.path) for checkpoint in checkpoints):
        raise InputError(f"every checkpoint in {root} {WITHOUT_OPTIMIZER}", "not_found")
    raise InputError(f"every checkpoint in {root} is damaged ({'; '.join(damaged)})", "unreadable")


#: Entries of a state and their types.
_STATE_TYPES: dict[str, type] = {
    "step": int, "critical": dict, "course": dict, "guards": dict, "method": dict, "schedule_start": int,
}  # fmt: skip


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state of a run that a checkpoint has stored.

    Raises:
        ValueError: it is of another version, or cannot be read.
    """
    state = read_json_object(checkpoint / "state.json", limit=MAX_RECORDS)
    if state.get("format") not in (FORMAT, SLICED_FORMAT):
        raise InputError(
            f"{checkpoint} has checkpoint format {state.get('format')!r}; this version reads {FORMAT} and "
            f"{SLICED_FORMAT}",
            "unsupported",
        )
    for name, kind in _STATE_TYPES.items():
        expect(state.get(name), kind, f"{checkpoint}: {name} of its state")
    expect(state["guards"].get("data_ahead"), int, f"{checkpoint}: data_ahead of its state")
    table = state["critical"].get("data_table")
    if not fits(table, (type(None), [[str]])) or len({len(row) for row in table or ()}) > 1:
        raise InputError(f"{checkpoint}: expected rows of strings as critical.data_table of its state")
    if state.setdefault("initial", None) is not None:
        initial = expect(state["initial"], dict, f"{checkpoint}: initial of its state")
        for name in ("given", "kind"):
            expect(initial.get(name), str, f"{checkpoint}: initial.{name} of its state")
    return state
