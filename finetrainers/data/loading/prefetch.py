"""Prefetches batches in threads of this process, where batches are read and not computed.

Entries of a cache come off a disk: a thread waits for them as well as a process does, and need not hand over what it
has read. For a batch that takes 2 ms to read, another process takes as long again to send it and this one to take it
over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")

#: Batches that each thread is ahead by default, as many as a worker process of torch's loader.
AHEAD = 2


def prefetch(order: Iterable[S], fetch: Callable[[S], T], *, threads: int, ahead: int = AHEAD) -> Iterator[T]:
    """Results of `fetch` for each element, in order; an exception is raised when its element's turn comes.

    Args:
        order: iterated in the caller's thread.
        fetch: is called in several threads at once.
        threads: how many.
        ahead: how many elements each is ahead.
    """
    # One thread of torch's each: they shall not take cores from the step.
    pool = ThreadPoolExecutor(threads, "prefetch", initializer=torch.set_num_threads, initargs=(1,))
    due: deque[Future[T]] = deque()
    try:
        for one in order:
            due.append(pool.submit(fetch, one))
            if len(due) > ahead * threads:
                yield due.popleft().result()
        while due:
            yield due.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
