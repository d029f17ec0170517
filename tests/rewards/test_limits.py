"""Places of a server: in turn, and none for who waits too long."""

from __future__ import annotations

import threading
import time

import pytest

from finetrainers.rewards.limits import FairQueue


def waiting(queue: FairQueue, count: int) -> None:
    """Wait until so many wait."""
    for _ in range(1000):
        if len(queue._waiting) == count:
            return
        time.sleep(0.002)
    raise AssertionError(f"{len(queue._waiting)} wait, not {count}")


def test_places_go_to_who_has_fewest_then_to_who_came_first() -> None:
    queue, order = FairQueue(2), []
    release = {name: threading.Event() for name in ("a1", "a2", "a3", "a4", "b1", "c1")}

    def ask(name: str) -> None:
        with queue.place(name[0]):
            order.append(name)
            release[name].wait(10)

    threads = []
    for number, name in enumerate(("a1", "a2", "a3", "a4", "b1", "c1")):
        threads.append(threading.Thread(target=ask, args=(name,)))
        threads[-1].start()
        for _ in range(1000):
            if len(order) + len(queue._waiting) == number + 1:
                break
            time.sleep(0.002)
    assert order == ["a1", "a2"]
    for done, left in (("a1", 3), ("b1", 2), ("c1", 1), ("a2", 0), ("a3", 0), ("a4", 0)):
        release[done].set()
        waiting(queue, left)
    for thread in threads:
        thread.join(10)
    assert order == ["a1", "a2", "b1", "c1", "a3", "a4"]
    assert (queue._free, dict(queue._held)) == (2, {})


def test_patience_ends_and_an_error_gives_the_place_back() -> None:
    queue = FairQueue(1)

    def fail() -> None:
        with queue.place("a"):
            with pytest.raises(TimeoutError, match=r"0\.02"), queue.place("b", patience=0.02):
                pass
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with queue.place("b", patience=0.0):
        pass
