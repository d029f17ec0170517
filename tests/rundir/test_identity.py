"""A run has an id: in its directory and in its checkpoints, from its first start on, whatever is copied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refusals import refused_options

from finetrainers.config.load import load_config
from finetrainers.plan.lineage import ancestors, began_from
from finetrainers.rundir.identity import IDENTITY, Identity, read_identity, run_of, take_identity
from finetrainers.rundir.run_dir import RunDirectory
from finetrainers.tools.copies import copy_problem
from finetrainers.utils.reading import read_jsonl


def test_a_run_keeps_its_id_and_each_checkpoint_has_it(
    options: Callable[..., dict[str, Any]], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(train_steps=2, checkpointing_steps=1, async_checkpointing=True)
    root = tmp_path / "run"
    first = run(**values).state.run_dir.identity
    checkpoints = root / "checkpoints"
    assert [run_of(checkpoints / f"step-{step}") for step in (1, 2)] == [first, first]
    assert read_identity(root) == Identity(first)
    assert IDENTITY not in (root / "config.toml").read_text()
    assert first not in (root / "config.toml").read_text() + (root / "env.json").read_text()

    # It is continued by name, and where its file was lost, by its checkpoints.
    (root / IDENTITY).write_text("[" * 100_000)
    resumed = {**values, "train_steps": 3, "resume_from_checkpoint": "latest", "async_checkpointing": False}
    assert run(**resumed).state.run_dir.identity == first
    assert json.loads((root / IDENTITY).read_text())["run"] == first
    assert run_of(checkpoints / "step-3") == first

    # What begins from it is another run, and says from which one.
    other = tmp_path / "other"
    began = run(**{**values, "output_dir": str(other), "train_steps": 1, "init_from": str(root)}).state.run_dir
    assert began.identity not in (None, first)
    assert began_from(other)["run_id"] == first
    assert len(ancestors(other)) == 1
    began_again = tmp_path / "again"
    shutil.copytree(other, began_again)
    events = (began_again / "events.jsonl").read_text().replace(str(root), str(other))
    (began_again / "events.jsonl").write_text(events)
    assert len(ancestors(began_again)) == 1  # another run is there than the one that it began from


def test_a_finished_run_without_its_checkpoints_is_not_begun_again_in_its_place(
    options: Callable[..., dict[str, Any]], run: Callable[..., Any], tmp_path: Path
) -> None:
    values, root = options(train_steps=2, checkpointing_steps=1), tmp_path / "run"
    first = run(**values)
    result, records = root / "pytorch_lora_weights.safetensors", first.metrics
    shutil.rmtree(root / "checkpoints")
    shutil.copytree(root, tmp_path / "copy")
    for resume in (None, "auto"):
        with refused_options(("--output_dir", "occupied")):
            run(**values, resume_from_checkpoint=resume)
    assert first.metrics == records
    result.rename(tmp_path / "moved.safetensors")
    again = run(**values | {"resume_from_checkpoint": "auto", "train_steps": 1})
    assert [read_jsonl(path)[0] for path in root.glob("replaced-*-metrics.jsonl")] == [records]
    assert [record["step"] for record in again.metrics] == [1]
    second = again.state.run_dir.identity
    assert read_identity(root) == Identity(second)
    assert second != first.state.run_dir.identity
    assert copy_problem(root, tmp_path / "copy", is_empty=False)[1] == "mismatch"  # a backup stays that of the first

    # A run that was killed before its first checkpoint is begun again as the same one.
    result.unlink()
    shutil.rmtree(root / "checkpoints")
    config = load_config(**values)
    third = RunDirectory(root, writes=True)
    third.start(config, resumed_step=0)
    assert third.identity not in (first.state.run_dir.identity, second)
    fourth = RunDirectory(root, writes=True)
    fourth.start(config, resumed_step=0)
    assert fourth.identity == third.identity
    assert len(list(root.glob("replaced-*-metrics.jsonl*"))) == 2


def test_a_run_of_before_gets_an_id_and_a_copy_that_is_trained_another(tmp_path: Path) -> None:
    assert read_identity(tmp_path) is None
    first = take_identity(tmp_path)
    assert take_identity(tmp_path) == first
    for content in (b"", b"[]", b'{"run": 3}', b'{"run": "../../x"}', b"\xff"):
        (tmp_path / IDENTITY).write_bytes(content)
        assert read_identity(tmp_path) is None
    Identity(first, is_copy=True).write(tmp_path / IDENTITY)
    assert read_identity(tmp_path) == Identity(first, is_copy=True)
    assert take_identity(tmp_path) != first
    assert run_of(tmp_path) is None
