"""What a start of many files rests on: asking a far disk in threads, and many objects that are not collected."""

from __future__ import annotations

import gc
import threading

import pytest

from finetrainers.utils import map_paths
from finetrainers.utils.process_state import gc_paused


@pytest.mark.parametrize("count", [0, 3, 64, 65, 300])
@pytest.mark.parametrize("is_far", [False, True])
def test_answers_come_in_order_from_near_and_far(count: int, is_far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_paths, "_SLOW_S", 0.0 if is_far else 1.0)
    asked_by = set()

    def ask(value: int) -> int:
        asked_by.add(threading.current_thread())
        return -value

    assert list(map_paths.map_paths_threaded(ask, range(count))) == [-value for value in range(count)]
    assert (asked_by <= {threading.main_thread()}) == (not is_far or count <= 64)


def test_what_is_made_without_collections_is_not_walked_afterwards() -> None:
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    walked = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            walked.append(len(gc.get_objects(generation=info["generation"])))

    gc.callbacks.append(note)
    try:
        with gc_paused():
            kept = [[k] for k in range(50_000)]
        others = [[k] for k in range(2_000)]  # enough for a collection of what is young
    finally:
        gc.callbacks.remove(note)
        if frozen:
            gc.freeze()
    assert (len(kept), len(others)) == (50_000, 2_000)
    assert gc.isenabled()
    assert walked
    assert max(walked) < 10_000
