"""What happens on one of two ranks is decided by both together: stops, saves, and steps that are not finite."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import Jobs

from finetrainers.rundir.find import scan_checkpoints
from finetrainers.rundir.lock import exclusive

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("stopping_rank.py")
JOBS: dict[str, dict[str, Any]] = {
    "straight": {},
    "signal": {"_disturb": "SIGUSR1"},
    "resumed": {"resume_from_checkpoint": "latest"},
    "stop file": {"_disturb": "stop"},
    "save file": {"_disturb": "save"},
    "raise": {"_disturb": "nan"},
    "skip": {"_disturb": "nan", "on_nonfinite": "skip"},
    "in use": {},
    "rollback": {"_disturb": "nan", "on_nonfinite": "rollback", "checkpointing_steps": 1},
    "late": {"overlap_gradient_exchange": False},
    "pairs": {"batch_size": 2, "training_type": "full-finetune", "max_grad_norm": 0.0},
    "memory": {"batch_size": 2, "training_type": "full-finetune", "max_grad_norm": 0.0, "_disturb": "memory"},
    "slow": {"_disturb": "slow", "logging_steps": 1},
}


class _Here:
    """This process as the only one."""

    is_main = True

    @staticmethod
    def broadcast_object(value: Any) -> Any:
        return value


@pytest.fixture(scope="module")
def ranks(
    options: Callable[..., dict], do_jobs: Callable[..., Jobs], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Jobs]:
    root = tmp_path_factory.mktemp("stopping")
    jobs = {
        name: options(
            root / ("signal" if name == "resumed" else name), train_steps=4, **{"lora_dropout": 0.3, **changes}
        )
        for name, changes in JOBS.items()
    }
    with exclusive(root / "in use", _Here()):  # type: ignore[arg-type]
        yield do_jobs(root, jobs, script=SCRIPT, needs={"resumed": ["signal"]})


def events(directory: Path) -> list[tuple[str, int | None]]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [(event["event"], event.get("step")) for event in map(json.loads, lines)]


@pytest.mark.parametrize(
    ("job", "by"), [("signal", "SIGUSR1"), pytest.param("stop file", "control/stop", marks=pytest.mark.rotating)]
)
def test_both_stop_after_the_same_step(job: str, by: str, ranks: Jobs) -> None:
    for rank in ranks[job]:
        assert (rank["step"], rank["stopped_by"]) == (2, by)
    assert ("stopped", 2) in events(ranks.directory(job))
    assert scan_checkpoints(ranks.directory(job))[0].step == 2


def test_resuming_after_the_stop_changes_nothing(ranks: Jobs) -> None:
    assert ranks["resumed"] == ranks["straight"]
    assert len({rank["digest"] for rank in ranks["resumed"]}) == 1
    assert [found.step for found in scan_checkpoints(ranks.directory("signal")) if found.damage is None] == [2, 4]


def test_a_checkpoint_that_was_asked_for_is_written(ranks: Jobs) -> None:
    assert [found.step for found in scan_checkpoints(ranks.directory("save file")) if found.damage is None] == [2, 4]
    assert ranks["save file"] == ranks["straight"]


def test_one_ranks_nan_ends_both_before_the_update(ranks: Jobs) -> None:
    for rank in ranks["raise"]:
        assert "step 2: loss nan, grad_norm nan" in rank["error"]
    assert scan_checkpoints(ranks.directory("raise")) == []


def test_one_ranks_nan_is_skipped_by_both(ranks: Jobs) -> None:
    assert [rank["skipped"] for rank in ranks["skip"]] == [1, 1]
    assert len({rank["digest"] for rank in ranks["skip"]}) == 1
    assert ranks["skip"][0]["digest"] != ranks["straight"][0]["digest"]


def test_both_go_back_together(ranks: Jobs) -> None:
    for rank in ranks["rollback"]:
        assert (rank["step"], rank["data_ahead"], rank["skipped"]) == (4, 1, 1)
    assert len({rank["digest"] for rank in ranks["rollback"]}) == 1
    assert ("rollback", 1) in events(ranks.directory("rollback"))


@pytest.mark.rotating
def test_exchanging_gradients_late_changes_nothing(ranks: Jobs) -> None:
    assert ranks["late"] == ranks["straight"]


@pytest.mark.rotating
def test_one_rank_out_of_memory_halves_the_batches_of_both(ranks: Jobs) -> None:
    """Also where the other has a batch of one clip, at the end of an epoch of five."""
    assert len({rank["digest"] for rank in ranks["memory"]}) == 1
    assert [[size for _, size in rank["fits"]] for rank in ranks["memory"]] == [[1], [1]]
    found = [[json.loads(line) for line in (ranks.directory(job) / "metrics.jsonl").read_text().splitlines()]
             for job in ("memory", "pairs")]  # fmt: skip
    for ours, theirs in zip(*found, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert ("out_of_memory", None) in events(ranks.directory("memory"))


def test_a_directory_in_use_is_refused_on_both(ranks: Jobs) -> None:
    assert all(re.search(r"in use .*\(process \d+", rank["error"]) for rank in ranks["in use"])


@pytest.mark.rotating
def test_the_slow_rank_is_the_one_that_is_named(ranks: Jobs) -> None:
    """What is done with that is tested in `training/guards/test_straggler.py`: here the machine may make the other
    slow, now and then."""
    records = [json.loads(line) for line in (ranks.directory("slow") / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "loss" in record]
    assert statistics.mode(record["slowest_rank"] for record in records) == 1
    assert all(0 <= record["waiting_s"] < record["step_s"] for record in records)
    assert max(record["waiting_s"] for record in records) > 0.1
