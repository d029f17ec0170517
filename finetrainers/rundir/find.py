"""Which checkpoints a run has, and which of them to continue from. Imports no torch."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetrainers.utils.launch import launched_rank

from .manifest import damage, lacks_optimizer, read_manifest, total_size

logger = logging.getLogger(__name__)

#: Layout of checkpoint directories. 1 had no manifest, so that nothing vouches for what it holds; 2 did not say which way the
#: run had gone through its data.
FORMAT = 3
#: The same, with the optimizer's state in slices: earlier versions look for it in one file.
SLICED_FORMAT = 4
#: A file that each process may read for itself: it says what the checkpoint is, and holds no weights.
SMALL_BYTES = 1 << 20
#: Ending of a checkpoint's name while another one of the same step takes its place.
REPLACED = ".replaced"
#: What is said of a checkpoint that cannot be resumed, because `finetrainers sync` has copied it, and not its optimizer.
WITHOUT_OPTIMIZER = (
    "has no optimizer state: it is a copy to sample from. Resume where it was trained, or start a new run from its weights "
    "with --init_from"
)
_STEP_DIR = re.compile(rf"^(?:step-(?P<step>\d+)|\.step-(?P<replaced>\d+){re.escape(REPLACED)})$")


def checkpoints_dir(output_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return output_dir / "checkpoints"


@dataclass(frozen=True)
class Found:
    """A checkpoint directory of a run.

    Attributes:
        step: the optimizer steps that it holds.
        path: where it is.
        damage: why it cannot be used, as far as names and sizes tell; None for a whole one.
        size: bytes; 0 for a damaged one.
        saved_at: seconds since 1970; 0 for a damaged one.
    """

    step: int
    path: Path
    damage: str | None
    size: int = 0
    saved_at: float = 0.0


def scan_checkpoints(output_dir: Path, *, weights_only: bool = False) -> list[Found]:
    """Every checkpoint of a run, whole or damaged, oldest step first. Half-written ones have another name.

    Args:
        output_dir: of the run.
        weights_only: whether one without its optimizer state counts as whole, too.
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
    return [_look_at(step, path, weights_only) for step, path in sorted(by_step.items())]


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's directory by its name, also of one that was being replaced; None for anything else."""
    match = _STEP_DIR.match(path.name)
    return None if match is None else int(match["step"] or match["replaced"])


def _look_at(step: int, path: Path, weights_only: bool) -> Found:
    wrong = damage(path, contents=False, weights_only=weights_only)
    if wrong is not None:
        return Found(step, path, wrong)
    manifest = read_manifest(path)
    return Found(step, path, None, size=total_size(manifest), saved_at=float(manifest.get("saved_at", 0.0)))


def find_checkpoint(
    wanted: str | None,
    output_dir: Path,
    *,
    weights_only: bool = False,
    contents: bool = True,
    known: Mapping[Path, str] | None = None,
) -> Path | None:
    """The checkpoint that `auto`, `latest`, a step number or a directory names; None when none is wanted.

    Every byte of it is compared with its manifest, unless processes are to share that. `latest` falls back to the newest that passes, with a warning for
    each that does not. So does `auto`, but where there are none, not even damaged ones, it wants none.

    Args:
        wanted: what names it.
        output_dir: of the run.
        weights_only: whether its optimizer state may be missing.
        contents: whether all bytes are compared; without, those of small files, and the sizes of the others.
        known: checkpoints that were found to be damaged, with the reason.

    Raises:
        ValueError: it does not exist or is damaged; the message lists those that exist.
    """
    largest = None if contents else SMALL_BYTES
    root, found = checkpoints_dir(output_dir), scan_checkpoints(output_dir, weights_only=weights_only)
    if wanted is None or (wanted == "auto" and not found):
        return None
    if wanted in ("auto", "latest"):
        known = known or {}
        found = [replace(one, damage=one.damage or known.get(one.path)) for one in found]
        return _newest_verified(root, found, weights_only=weights_only, largest=largest)
    names = ", ".join(str(one.step) for one in found if one.damage is None) or "none"
    if wanted.isdigit():
        named = [one.path for one in found if one.step == int(wanted)]
        if not named:
            raise ValueError(f"no checkpoint of step {wanted} in {root}; there are: {names}")
        path = named[0]
    else:
        path = Path(wanted)
        if not (path / "state.json").is_file():
            raise ValueError(
                f"{wanted} is not a checkpoint (no state.json); give `auto`, `latest`, a step ({names}) or a directory"
            )
    wrong = (known or {}).get(path) or damage(path, contents=True, weights_only=weights_only, largest=largest)
    if wrong is not None:
        if lacks_optimizer(path):
            raise ValueError(f"{path} {WITHOUT_OPTIMIZER}")
        raise ValueError(f"{path} is damaged: {wrong}; `latest` takes the newest whole one (whole by size: {names})")
    return path


def _newest_verified(root: Path, found: list[Found], *, weights_only: bool, largest: int | None) -> Path:
    """The newest checkpoint that is what was saved; see `damage`."""
    if not found:
        raise ValueError(f"no checkpoint in {root}; leave the option out to start a new run")
    damaged: list[str] = []
    for one in reversed(found):
        wrong = one.damage or damage(one.path, contents=True, weights_only=weights_only, largest=largest)
        if wrong is None:
            for line in damaged:
                _warn("continuing from %s, because a newer checkpoint is damaged: %s", one.path, line)
            return one.path
        damaged.append(f"{one.path.name}: {wrong}")
    if not weights_only and all(lacks_optimizer(one.path) for one in found):
        raise ValueError(f"every checkpoint in {root} {WITHOUT_OPTIMIZER}")
    raise ValueError(f"every checkpoint in {root} is damaged ({'; '.join(damaged)})")


def _warn(message: str, *values: object) -> None:
    """Warn once for all processes: they look at the same directory."""
    if launched_rank() == 0:
        logger.warning(message, *values)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of its run.

    Raises:
        ValueError: it is of another version.
    """
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    if state["format"] not in (FORMAT, SLICED_FORMAT):
        raise ValueError(
            f"{checkpoint} has checkpoint format {state['format']}; this version reads {FORMAT} and {SLICED_FORMAT}"
        )
    return state
