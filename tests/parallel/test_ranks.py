"""How processes wait for each other: two real ones over gloo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_of import OneOf
from real_process import Python

from finetrainers.parallel import ranks
from finetrainers.rewards.reward_set import RewardError

#: The step's time-out is one second; rank 0 keeps rank 1 waiting for longer, in every way that there is.
IDLE = """
import json, sys, time
from pathlib import Path
from finetrainers.config.load import load_config
from finetrainers.parallel.ddp import DDP

def slow(value, seconds=1.15):
    time.sleep(seconds if parallel.is_main else 0)
    return value

def load():
    begun = time.monotonic()
    time.sleep(0.3)
    return [begun, time.monotonic()]

config = load_config(
    model_name="ltx_video", pretrained_model_name_or_path="x", mixed_precision="no", nccl_timeout=1, idle_timeout=30
)
parallel = DDP(config, config.parallel)
found = {"objects": parallel.gather_objects([parallel.rank]), "same": parallel.broadcast_object(slow(parallel.rank))}
slow(None)
parallel.barrier()
with parallel.raise_on_all_ranks("saving"):
    slow(None)
found["turns"] = parallel.gather_objects([parallel.one_at_a_time("loading", load, together=parallel.is_main)])
together = lambda: parallel.gather_objects([parallel.rank])
found["together"] = parallel.one_at_a_time("loading", together, together=True)

def fail_on_rank_0():
    if parallel.is_main:
        raise KeyError("missing part")

try:
    parallel.one_at_a_time("loading the VAE", fail_on_rank_0)
except Exception as error:
    found["failed"] = repr(error)
found["agreed"] = parallel.max_on_host([parallel.rank])
slow(None, seconds=1.6)
try:
    parallel.max_on_host([0])
    found["hang"] = "unseen"
except RuntimeError as error:
    found["hang"] = "seen"
(Path(sys.argv[1]) / f"{parallel.rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.rotating
def test_idle_ranks_wait_longer_than_a_step_may_take(python: Python, tmp_path: Path) -> None:
    """A rank that has nothing to do outlives the time-out of collectives; within a step the time-out counts."""
    started = python.ranks(2, "-c", IDLE, str(tmp_path))
    for process in started:
        assert process.wait() == 0, process.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for found in (first, second):
        assert found["objects"] == [0, 1]
        assert found["same"] == 0
        assert found["agreed"] == [1]
        assert found["together"] == [0, 1]
        (_, end), (begin, _) = sorted(found["turns"])
        assert begin >= end  # one at a time
    assert first["failed"] == "KeyError('missing part')"
    assert second["failed"].startswith("RemoteRankError(")
    assert "the VAE " in second["failed"]
    assert " rank 0: 'missing part'" in second["failed"]
    assert second["hang"] == "seen"


@pytest.mark.parametrize("here", [None, "reward", "other"])
@pytest.mark.parametrize("there", [None, "reward", "other"])
def test_all_ranks_agree_on_whether_a_run_can_be_saved(
    here: str | None, there: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving is collective: all processes begin it after a failure, or none."""
    errors = {None: None, "reward": RewardError("gone"), "other": ValueError("diverged")}
    process = ranks.SingleProcess(torch.device("cpu"))
    others = [("rank 1: error", there == "reward")] if there else []
    monkeypatch.setattr(process, "gather_objects", lambda items: [*items, *others])
    if here is there is None:
        process.raise_if_any_failed(None, "scoring")
        return
    with pytest.raises((RewardError, ranks.RemoteRankError, ValueError)) as caught:
        process.raise_if_any_failed(errors[here], "scoring")
    assert getattr(caught.value, "is_resumable", False) == ({here, there} <= {None, "reward"})


def test_processes_that_share_samples_take_turns() -> None:
    """A round is made before any of them works on its part; one that shares nothing works on each as it is made."""

    def order(rank: int, sharing: int) -> str:
        done: list[str] = []

        def made() -> Iterator[int]:
            for number in range(5):
                done.append(f"make {number}")
                yield number

        ranked: Any = OneOf(rank, 4, sharing=sharing)
        for number in ranked.take_turns(made()):
            done.append(f"work {number}")
        return ", ".join(done)

    assert order(0, 1).startswith("make 0, work 0, make 1, work 1")
    assert order(2, 2) == "make 0, make 1, work 0, make 2, make 3, work 2, make 4, work 4"
    assert order(3, 2) == "make 0, make 1, work 1, make 2, make 3, work 3, make 4"


def test_machines_that_do_not_reach_each_other_are_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with Connect timeout [127.0.1.1]:4711")

    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(RuntimeError, match=r"127\.0\.1\.1\]:4711.*GLOO_SOCKET_IFNAME"):
        ranks._host_group(timedelta(seconds=1))
