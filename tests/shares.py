"""In which order the tests run on several workers: what takes long begins at once, and short tests fill up the end.

xdist (`--dist worksteal`) gives every worker an equal run of the list, and one that has done its own takes from the end
of another's. In the order of the files a worker may come to a module of two minutes last, while the others are done,
and a module with an expensive fixture may be split, so that two workers make it.
"""

from __future__ import annotations

from itertools import groupby

import pytest

#: Marks of tests that take more than a few seconds.
LONG = ("slow", "timeout")


def in_shares(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests, reordered: each worker's share begins with whole modules that take long, dealt in turn."""
    long = {item.path for item in items if any(item.get_closest_marker(name) for name in LONG)}
    modules = [list(module) for path, module in groupby(items, key=lambda item: item.path) if path in long]
    short = [item for item in items if item.path not in long]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = [item for module in modules[worker::workers] for item in module]
        size = (len(items) - len(ordered)) // (workers - worker)  # as xdist divides them
        fill = max(size - len(share), 0)
        ordered += share + short[:fill]
        short = short[fill:]
    return ordered + short
