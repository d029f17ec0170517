"""How long parts of a rollout take."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch


@contextmanager
def timed(totals: MutableMapping[str, float], name: str, device: torch.device) -> Iterator[None]:
    """Add the seconds of a block to a named total, until the device has done what the block gave it to do."""
    _wait(device)
    start = time.perf_counter()
    yield
    _wait(device)
    totals[name] = totals.get(name, 0.0) + time.perf_counter() - start


def _wait(device: torch.device) -> None:
    """Wait for a device that works on its own; else the seconds of one block would be counted in a later one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
