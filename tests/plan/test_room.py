"""Room on disk is looked for before anything is loaded, by an estimate that is near what a run then writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused_options

from finetrainers.config.load import load_config
from finetrainers.plan import room
from finetrainers.plan.ready import get_ready
from finetrainers.plan.trainable import network_without_weights
from finetrainers.runs.training import train
from finetrainers.utils.text import file_size


def needs_of(**values: Any) -> room.Needs:
    checked = get_ready(load_config(**values))
    return room.disk_needs(checked, network_without_weights(checked))


@pytest.mark.parametrize(
    "changes",
    [{"rank": 64, "lora_alpha": 64, "use_ema": True}, {"training_type": "full-finetune", "transformer_dtype": "bf16"}],
    ids=["lora", "full"],
)
def test_the_estimate_is_what_is_written(changes: dict[str, Any], options: Callable[..., dict]) -> None:
    values = options(train_steps=2, checkpointing_steps=1, **changes)
    needs = needs_of(**values)
    result = train(load_config(**values))
    checkpoints = sorted((result.run_dir / "checkpoints").glob("step-*"))
    assert len(checkpoints) == needs.num_checkpoints == 2
    written = sum(path.stat().st_size for path in checkpoints[0].rglob("*") if path.is_file())
    assert 0.9 * written < needs.checkpoint < 1.05 * written
    weights = result.weights
    files = [weights] if weights.is_file() else list(weights.iterdir())
    assert needs.result == pytest.approx(sum(path.stat().st_size for path in files), rel=0.1)


def test_checkpoints_that_are_kept_are_counted(options: Callable[..., dict], tmp_path: Path) -> None:
    assert needs_of(**options(train_steps=10, checkpointing_steps=3)).num_checkpoints == 4
    assert needs_of(**options(train_steps=10, checkpointing_steps=1, checkpointing_limit=2)).num_checkpoints == 3
    assert needs_of(**options(train_steps=10, checkpointing_steps=0)).num_checkpoints == 1
    sampled = {"train_steps": 10, "validation_prompts": "a@@@9x64x64", "validation_steps": 5}
    for at_start, count in ((None, 4), (False, 3)):
        needs = needs_of(**options(**sampled, validation_at_start=at_start))
        assert needs.samples == round(count * (0.1 * 9 + 1.5 * 8) * 64 * 64)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_disk_without_room_is_refused_and_a_small_one_warned_of(
    dry_run: bool, options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = options(train_steps=3, checkpointing_steps=1, dry_run=dry_run)
    needs = needs_of(**{**values, "dry_run": True})
    root = Path(values["output_dir"])
    monkeypatch.setattr(room, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=needs.least - 1)))
    monkeypatch.setattr("finetrainers.runs.run.assemble", lambda *_: pytest.fail("something was loaded"))
    with refused_options(("--output_dir", "too_large")) as caught:
        train(load_config(**values))
    assert f"about {file_size(needs.least)} " in str(caught.value)
    assert f"checkpoint {file_size(needs.checkpoint)}, " in str(caught.value)
    assert not list(root.glob("checkpoints"))
    monkeypatch.undo()

    monkeypatch.setattr(room, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=needs.most - 1)))
    capsys.readouterr()
    train(load_config(**values))
    printed = capsys.readouterr().out
    assert re.search(r"warning: .* 3 checkpoints .*--checkpointing_limit", printed)
