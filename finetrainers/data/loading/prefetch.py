"""Prefetching of batches in threads of this process, where batches are read and not computed.

Entries of a cache come from a disk: a thread waits for them as well as a process does, and need not hand over the data.
For a batch that takes 2 ms to read, another process takes as long again to send it and this one to receive it.
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
    """Yield the results of `fetch` for each element, in order; an exception is raised at its element's turn.

    Args:
        order: iterated in the caller's thread.
        fetch: is called in several threads at once.
        threads: number of threads.
        ahead: number of elements that each thread is ahead.
    """
    # Each uses one thread of torch, so that they do not take cores from the step.
    pool = ThreadPoolExecutor(threads, "prefetch", initializer=torch.set_num_threads, initargs=(1,))
    due: deque[Future[T]] = deque()
    try:
        for element in order:
            due.append(pool.submit(fetch, element))
            if len(due) > ahead * threads:
                yield due.popleft().result()
        while due:
            yield due.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
