"""Fault injection for tests: `FINETRAINERS_FAULT` kills, hangs, fills the disk of or poisons a run at a named point.

    FINETRAINERS_FAULT=kill@save.write:2,nan@loss:5:rank=1

is a list of `KIND@POINT[:COUNT][:rank=RANK]`: the fault, the point, at which visit of a process (default: the first;
`3+`: the third and all later ones), and on which rank (default: all). Without the variable, a point costs two lookups.
Imports no torch.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .failures import InputError
from .launch import launched_rank

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

ENVIRONMENT = "FINETRAINERS_FAULT"
#: Seconds that replace the ten minutes of `min_hang_seconds`, so that a test need not wait for them.
PATIENCE = "FINETRAINERS_FAULT_PATIENCE"

#: Points at which a fault can be injected. A data worker counts its own visits.
POINTS = {
    "start": "the directory is locked; nothing is loaded yet",
    "load": "the transformer is about to be loaded",
    "resume": "a checkpoint is about to be restored",
    "precompute": "a cache entry is written and not yet renamed; each rank counts its own",
    "data": "a micro-batch is about to be fetched; with workers, in the worker",
    "step": "an optimizer step begins",
    "loss": "the loss of a micro-batch is computed",
    "backward": "the gradients of a step are computed, before clipping",
    "update": "the optimizer is about to change the weights",
    "reward": "a reward has scored a batch of clips",
    "save": "a checkpoint is about to be gathered, on every rank",
    "save.copy": "an asynchronous checkpoint is about to be copied to host memory",
    "save.write": "the weights are written, the optimizer is not",
    "save.seal": "everything is written and flushed, the manifest is not",
    "save.publish": "the manifest is written, the checkpoint is not renamed",
    "save.replace": "the old checkpoint of the same step is renamed, the new one is not",
    "save.prune": "the checkpoint is published; older ones are about to be removed",
    "save.remove": "an older checkpoint is renamed; its files still exist",
    "vae": "the VAE is about to encode or decode clips",
    "sample": "validation samples are about to be sampled",
    "export": "the results are about to be written",
    "close": "the results are written; the run is about to be closed",
    "sample.record": "a clip of `finetrainers sample` or `watch` is written, its line of the ledger is not",
    "watch.score": "`watch` has sampled a checkpoint, and its clips are about to be scored",
    "watch.best": "`watch` has recorded scores, and is about to mark the best checkpoint",
    "sync.manifest": "`sync` has copied a checkpoint's weights, and not its manifest",
}
#: Kinds of faults.
KINDS = {
    "kill": "SIGKILL, as by the kernel's OOM killer",
    "term": "SIGTERM to itself, as before a preemption",
    "hang": "waits forever",
    "raise": "RuntimeError",
    "oom": "torch.OutOfMemoryError",
    "enospc": "OSError, no space left on device",
    "nan": "the computed value becomes NaN; only at `loss`, `backward` and `reward`",
}
_POISONED = ("loss", "backward", "reward")
_FAULT = re.compile(
    r"(?P<kind>[^@:,]+)@(?P<point>[^@:,]+)(:(?P<count>[1-9]\d*)(?P<ever>\+)?)?(:rank=(?P<rank>\d+))?", re.ASCII
)
_FORM = "KIND@POINT[:COUNT][:rank=RANK]"


@dataclass(frozen=True)
class Fault:
    """A fault at a point; `count` from 1, `ever` for that visit and all later ones, `rank` None for all ranks."""

    kind: str
    point: str
    count: int = 1
    ever: bool = False
    rank: int | None = None


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse a specification; an empty one has no faults.

    Raises:
        ValueError: it is invalid; the message names the valid values.
    """
    return tuple(_parse(part.strip()) for part in text.split(",")) if text.strip() else ()


def _parse(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {_FORM}; for example kill@save.write:2 or nan@loss:5+:rank=1")
    kind, point = match["kind"], match["point"]
    if kind not in KINDS:
        raise InputError(f"{text!r}: unknown type {kind!r}; valid: {', '.join(KINDS)}", "unknown")
    if point not in POINTS:
        raise InputError(f"{text!r}: unknown point {point!r}; valid: {', '.join(POINTS)}", "unknown")
    if kind == "nan" and point not in _POISONED:
        message = f"{text!r}: no value to replace by NaN at {point}; nan requires {', '.join(_POISONED)}"
        raise InputError(message, "unsupported")
    rank = None if match["rank"] is None else int(match["rank"])
    return Fault(kind, point, int(match["count"] or 1), bool(match["ever"]), rank)


def min_hang_seconds() -> float:
    """Return the seconds after which work without a limit of the user counts as hung, at the earliest.

    Raises:
        ValueError: the environment's value is not a positive number.
    """
    text = os.environ.get(PATIENCE, "")
    try:
        seconds = float(text or 600.0)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{PATIENCE}: expected a positive number of seconds, got {text!r}")
    return seconds


#: Faults of this process; None until the first point, so that a process that is started for a run reads its faults.
_faults: tuple[Fault, ...] | None = None
_visits: Counter[str] = Counter()


def arm_faults() -> None:
    """Read this rank's faults from the environment, and reset the counts of visits.

    Raises:
        ValueError: as `parse_faults`.
    """
    global _faults
    rank = launched_rank()
    _faults = tuple(fault for fault in parse_faults(os.environ.get(ENVIRONMENT, "")) if fault.rank in (None, rank))
    _visits.clear()


def fault_point(name: str, poison: Iterable[Tensor] = ()) -> None:
    """Inject the faults that the environment asks for at this point.

    Args:
        name: one of `POINTS`.
        poison: tensors that `nan` overwrites in place; only `nan` iterates over them.
    """
    if _faults is None:
        arm_faults()
    if not _faults:
        return
    assert name in POINTS
    _visits[name] += 1
    visit = _visits[name]
    for fault in _faults:
        if fault.point == name and (visit == fault.count or (fault.ever and visit > fault.count)):
            logger.warning("%s: %s at %s, visit %d, process %d", ENVIRONMENT, fault.kind, name, visit, os.getpid())
            sys.stderr.flush()
            _inject(fault.kind, f"fault injected at {name}", poison)


def _inject(kind: str, message: str, poison: Iterable[Tensor]) -> None:
    if kind in ("kill", "term"):
        # Windows has no SIGKILL, but any other signal has its effect there.
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM) if kind == "kill" else signal.SIGTERM)
    elif kind == "hang":
        while True:
            time.sleep(60)
    elif kind == "enospc":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({message})")
    elif kind == "raise":
        raise RuntimeError(message)
    elif kind == "oom":
        import torch

        raise torch.OutOfMemoryError(message)
    else:
        tensors = list(poison)
        if not tensors:  # for example, DeepSpeed has used and dropped its gradients
            raise RuntimeError(f"{message}: no value to replace by NaN here")
        for tensor in tensors:
            tensor.data.fill_(float("nan"))  # not a change that autograd counts
