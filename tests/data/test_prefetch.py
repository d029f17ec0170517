"""Batches that threads read ahead: the same ones, in order, never too many, and errors in their turn."""

from __future__ import annotations

import threading
from itertools import count

import pytest
import torch

from finetrainers.data.loading.prefetch import prefetch


@pytest.mark.parametrize(("threads", "ahead"), [(1, 2), (3, 2), (1, 5)])
def test_results_come_in_order_from_other_threads_and_not_too_many_ahead(threads: int, ahead: int) -> None:
    begun: list[int] = []
    main, cores = threading.get_ident(), torch.get_num_threads()
    slow = threading.Event()

    def fetch(number: int) -> tuple[int, int]:
        begun.append(number)
        if number % 3 == 0:
            slow.wait(0.01)  # others overtake
        assert threading.get_ident() != main
        return number, torch.get_num_threads()

    found = prefetch(count(), fetch, threads=threads, ahead=ahead)
    for number in range(20):
        assert next(found) == (number, 1)
        assert max(begun) <= number + ahead * threads
    assert torch.get_num_threads() == cores
    found.close()
    assert list(prefetch(range(5), lambda number: number, threads=threads)) == list(range(5))


def test_an_error_comes_in_its_turn_and_later_requests_are_given_up() -> None:
    asked: list[int] = []
    failed, told = threading.Event(), threading.Event()

    def fetch(number: int) -> int:
        asked.append(number)
        if number == 2:
            failed.set()
            raise KeyError(number)
        if number == 3:
            assert told.wait(5)
        return number

    found = prefetch(count(), fetch, threads=1)
    assert next(found) == 0
    assert failed.wait(5)  # it is known already
    assert next(found) == 1
    with pytest.raises(KeyError, match="2"):
        next(found)
    told.set()
    with pytest.raises(StopIteration):
        next(found)
    for thread in threading.enumerate():
        if thread.name.startswith("read-ahead"):
            thread.join(5)
    assert 4 not in asked  # which was waiting; 3 may have begun
