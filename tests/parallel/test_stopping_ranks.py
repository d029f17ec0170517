"""What happens on one of two ranks is decided by both together: stops, saves, and steps that are not finite."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_process import Python

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
    def same_on_all(value: Any) -> Any:
        return value


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopping")


@pytest.fixture(scope="module")
def ranks(options: Callable[..., dict], python_of_module: Python, root: Path) -> list[dict[str, Any]]:
    jobs = {
        name: options(
            root / ("signal" if name == "resumed" else name), train_steps=4, **{"lora_dropout": 0.3, **changes}
        )
        for name, changes in JOBS.items()
    }
    (root / "jobs.json").write_text(json.dumps(jobs))
    with exclusive(root / "in use", _Here()):  # type: ignore[arg-type]
        for process in python_of_module.ranks(2, str(SCRIPT), str(root / "jobs.json"), str(root)):
            assert process.wait() == 0, process.stderr
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def events(directory: Path) -> list[tuple[str, int | None]]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [(event["event"], event.get("step")) for event in map(json.loads, lines)]


@pytest.mark.parametrize(("job", "by"), [("signal", "SIGUSR1"), ("stop file", "control/stop")])
def test_both_stop_after_the_same_step(job: str, by: str, ranks: list[dict[str, Any]], root: Path) -> None:
    for rank in ranks:
        assert (rank[job]["step"], rank[job]["stopped_by"]) == (2, by)
    assert ("stopped", 2) in events(root / job)
    assert scan_checkpoints(root / job)[0].step == 2


def test_resuming_after_the_stop_changes_nothing(ranks: list[dict[str, Any]], root: Path) -> None:
    assert [rank["resumed"] for rank in ranks] == [rank["straight"] for rank in ranks]
    assert len({rank["resumed"]["digest"] for rank in ranks}) == 1
    assert [found.step for found in scan_checkpoints(root / "signal") if found.damage is None] == [2, 4]


def test_a_checkpoint_that_was_asked_for_is_written(ranks: list[dict[str, Any]], root: Path) -> None:
    assert [found.step for found in scan_checkpoints(root / "save file") if found.damage is None] == [2, 4]
    assert [rank["save file"] for rank in ranks] == [rank["straight"] for rank in ranks]


def test_one_ranks_nan_ends_both_before_the_update(ranks: list[dict[str, Any]], root: Path) -> None:
    for rank in ranks:
        assert "step 2: loss nan, grad_norm nan" in rank["raise"]["error"]
    assert scan_checkpoints(root / "raise") == []


def test_one_ranks_nan_is_skipped_by_both(ranks: list[dict[str, Any]]) -> None:
    assert [rank["skip"]["skipped"] for rank in ranks] == [1, 1]
    assert len({rank["skip"]["digest"] for rank in ranks}) == 1
    assert ranks[0]["skip"]["digest"] != ranks[0]["straight"]["digest"]


def test_both_go_back_together(ranks: list[dict[str, Any]], root: Path) -> None:
    for rank in ranks:
        assert (rank["rollback"]["step"], rank["rollback"]["data_ahead"], rank["rollback"]["skipped"]) == (4, 1, 1)
    assert len({rank["rollback"]["digest"] for rank in ranks}) == 1
    assert ("rollback", 1) in events(root / "rollback")


def test_exchanging_gradients_late_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    assert [rank["late"] for rank in ranks] == [rank["straight"] for rank in ranks]


def test_one_rank_out_of_memory_halves_the_batches_of_both(ranks: list[dict[str, Any]], root: Path) -> None:
    """Also where the other has a batch of one clip, at the end of an epoch of five."""
    assert len({rank["memory"]["digest"] for rank in ranks}) == 1
    assert [[size for _, size in rank["memory"]["fits"]] for rank in ranks] == [[1], [1]]
    found = [[json.loads(line) for line in (root / job / "metrics.jsonl").read_text().splitlines()]
             for job in ("memory", "pairs")]  # fmt: skip
    for ours, theirs in zip(*found, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert ("out_of_memory", None) in events(root / "memory")


def test_a_directory_in_use_is_refused_on_both(ranks: list[dict[str, Any]]) -> None:
    assert all("is in use by another run (process " in rank["in use"]["error"] for rank in ranks)


def test_the_slow_rank_is_the_one_that_is_named(ranks: list[dict[str, Any]], root: Path) -> None:
    """The reaction is tested in `training/guards/test_straggler.py`: here the machine may slow the other down."""
    records = [json.loads(line) for line in (root / "slow" / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "loss" in record]
    assert statistics.mode(record["slowest_rank"] for record in records) == 1
    assert all(0 <= record["waiting_s"] < record["step_s"] for record in records)
    assert max(record["waiting_s"] for record in records) > 0.1
