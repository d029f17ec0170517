"""What hangs is ended by its time limit, with the place where it stood; the run goes on from the newest checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_process import Python

from finetrainers.utils import exit_codes
from finetrainers.utils.reading import read_jsonl


@pytest.mark.rotating
def test_a_section_that_hangs_is_ended(train: Callable[..., Any], files: Any, tmp_path: Path) -> None:
    sections = {
        "step_timeout": ("hang@data:3", "in load_clips", [1, 2]),
        "checkpoint_timeout": ("hang@save.write:2", "in save_checkpoint", [1]),
    }
    runs = {limit: train(fault, output_dir=tmp_path / limit, **{limit: 2}) for limit, (fault, *_) in sections.items()}
    for limit, (_, place, left) in sections.items():
        left_by = type(files)(tmp_path / limit)
        assert runs[limit].wait() == exit_codes.HUNG, runs[limit].stderr
        assert f" 2 s (--{limit})" in runs[limit].stderr
        assert place in (left_by.root / "hangs" / "rank-0.txt").read_text()
        assert left_by.checkpoints == left
        runs[limit] = train(resume=True, train_steps=3, output_dir=left_by.root)
    for limit, done in runs.items():
        assert done.wait() == 0, done.stderr
        assert type(files)(tmp_path / limit).checkpoints == [2, 3]


@pytest.mark.rotating
def test_what_hangs_before_the_first_step_or_after_the_last_is_ended(train: Callable[..., Any], tmp_path: Path) -> None:
    sections: dict[str, tuple[str, str, str, dict[str, Any]]] = {
        "loading": ("hang@load", "loading_timeout", "in load_trainable_transformer", {}),
        "encoding": ("hang@precompute:3", "step_timeout", "in precompute_text", {"precompute_conditions": True}),
        "exporting": ("hang@export", "checkpoint_timeout", "in export", {"train_steps": 1}),
    }
    runs = {
        section: train(fault, output_dir=tmp_path / section, **{limit: 2}, **changes)
        for section, (fault, limit, _, changes) in sections.items()
    }
    for section, (_, limit, place, _) in sections.items():
        hanging = runs[section]
        assert hanging.wait() == exit_codes.HUNG, hanging.stderr
        assert re.search(rf"'{section}' .* 2 s \(--{limit}\)", hanging.stderr)
        assert place in (tmp_path / section / "hangs" / "rank-0.txt").read_text()


@pytest.mark.rotating
def test_a_worker_that_hangs_on_an_unneeded_batch_does_not_keep_a_finished_run(
    train: Callable[..., Any], files: Any
) -> None:
    point = "data"
    done = train(f"hang@{point}:5", train_steps=4, dataloader_num_workers=1, checkpointing_steps=0)
    assert done.wait(40) == exit_codes.DONE, done.stderr
    assert f"hang at {point}" in done.stderr
    assert files.events[-1] == "finished"


def test_what_hangs_while_a_finished_run_is_closed_costs_nothing(
    python: Python, flags: Callable[..., list[str]], files: Any, tmp_path: Path
) -> None:
    command = flags(tmp_path / "run", train_steps=1, checkpointing_steps=0)
    environment = {"FINETRAINERS_FAULT": "hang@close", "FINETRAINERS_FAULT_PATIENCE": "0.5"}
    done = python("-m", "finetrainers", *command, **environment)
    assert done.wait() == exit_codes.DONE, done.stderr
    assert files.events[-1] == "finished"
    assert (files.root / "pytorch_lora_weights.safetensors").is_file()
    assert "in _conclude" in (files.root / "hangs" / "rank-0.txt").read_text()


@pytest.mark.rotating
def test_a_step_that_takes_many_times_the_usual_is_reported_then_ended(
    python: Python, flags: Callable[..., list[str]], files: Any, tmp_path: Path
) -> None:
    """No limit is set; ten minutes are a moment."""
    command = flags(tmp_path / "run", checkpointing_steps=0)
    environment = {"FINETRAINERS_FAULT": "hang@step:8", "FINETRAINERS_FAULT_PATIENCE": "0.5"}
    hanging = python("-m", "finetrainers", *command, **environment)
    assert hanging.wait() == exit_codes.HUNG, hanging.stderr
    [event] = [event for event in read_jsonl(files.root / "events.jsonl")[0] if event["event"] == "slow_section"]
    assert (event["section"], event["step"]) == ("step", 7)
    assert event["seconds"] >= 9.9 * event["median"]  # both are rounded
    assert (files.root / "hangs" / "rank-0.txt").read_text().count("in train_step") == 2
    assert "--step_timeout" in hanging.stderr
