"""Map a function over paths, with threads if the file system is slow (NFS)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 16  # they mostly wait for disks
_CHUNK = 32  # values that a thread takes at once
_PROBES = 64  # values that measure the file system
_SLOW_S = 0.5e-3  # seconds per value on a slow file system


def map_paths_threaded(ask: Callable[[T], R], values: Sequence[T]) -> Iterator[R]:
    """Yield the results of `ask` for each value, in order; in threads if the first are slow.

    On local disks threads cost time.
    """
    started = time.monotonic()
    yield from [ask(value) for value in values[:_PROBES]]
    if time.monotonic() - started < _PROBES * _SLOW_S:
        yield from map(ask, values[_PROBES:])
        return
    chunks = [values[start : start + _CHUNK] for start in range(_PROBES, len(values), _CHUNK)]
    with ThreadPoolExecutor(_THREADS) as pool:
        for answers in pool.map(lambda chunk: [ask(value) for value in chunk], chunks):
            yield from answers
