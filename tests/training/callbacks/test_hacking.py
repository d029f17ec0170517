"""A run whose held-out reward can only fall: it is warned of or stopped, resumed, and shown; and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetrainers.cli.main import train_command
from finetrainers.config.hacking import WITNESSES
from finetrainers.draw.curves import marks_of
from finetrainers.results.reports.sections import events_of
from finetrainers.rundir.run_records import read_run
from finetrainers.utils import exit_codes

#: With every call one score rises, and the other falls. What all clips of a call have in common teaches nothing.
REWARDS = """
from itertools import count

ups, downs = count(), count()


def up(videos, prompts):
    return videos.mean(dim=(1, 2, 3, 4)) + next(ups)


up.differentiable = True

def down(videos, prompts):
    return videos.mean(dim=(1, 2, 3, 4)) - next(downs)
"""


@pytest.fixture
def flags(tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a run in this folder, whose trained reward rises, and whose held-out one falls."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red ball\na blue cube\n")
    (tmp_path / "held_out.txt").write_text("a dog\na bird\na tree\n")
    (tmp_path / "opposites.py").write_text(REWARDS)
    return {
        "method": "grpo", "model_name": "ltx_video", "pretrained_model_name_or_path": tiny_repo("ltx_video"),
        "prompts": "prompts.txt", "reward": "opposites:up", "eval_prompts": "held_out.txt", "eval_steps": 1,
        "eval_reward": "opposites:down", "rollout_size": "9x32x32", "prompts_per_step": 2, "num_generations": 4,
        "batch_size": 8, "sampling_steps": 4, "transformer_dtype": "fp32", "vae_dtype": "fp32",
        "text_encoder_dtype": "fp32", "lr": 1e-4, "rank": 4, "lora_alpha": 8, "train_steps": 12,
        "checkpointing_steps": 1, "output_dir": "run",
    }  # fmt: skip


def exit_code(flags: dict[str, Any]) -> int:
    return train_command([str(part) for name, value in flags.items() for part in (f"--{name}", value)])


def events(root: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def test_a_hacked_run_is_stopped_and_can_go_on(
    flags: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code({**flags, "hacking_guard": "stop"}) == exit_codes.GUARDED
    root = tmp_path / "run"
    (found,) = events(root, "reward_hacking")
    assert found["judge"] == "opposites:down"
    assert found["now"] < found["before"]
    assert found["trained_now"] > found["trained_before"]
    assert found["checkpoint"] == (f"run/checkpoints/step-{found['best_step']}" if found["best_step"] else None)
    assert re.search(rf"opposites:down .*{found['before']:.3g} .*{found['now']:.3g}", caplog.text)
    assert f"stopped by --hacking_guard after step {found['step']}" in (printed := capsys.readouterr().out)
    assert f"--resume_from_checkpoint {found['checkpoint'] or 'latest'}" in printed
    assert not events(root, "stopped")  # which would have a cluster's script start it again
    (end,) = events(root, "stopped_by_guard")
    assert end["step"] == found["step"] < 12
    assert read_run(root).status == "stopped"
    (record, *_) = [record for record in read_run(root).metrics if "weighted_reward" in record]
    assert {name for name in record if name.startswith("witness/")} == {f"witness/{name}" for name in WITNESSES}
    assert record["seconds/witness"] > 0
    shown = events_of(read_run(root))
    assert shown is not None
    assert any("opposites:down" in text and color == "bad" for _, _, text, color in shown.rows)
    assert marks_of(read_run(root).events).hacked == [found["step"]]
    saved = json.loads((root / "checkpoints" / f"step-{end['step']}" / "state.json").read_text())["guards"]["hacking"]
    assert [look["step"] for look in saved["looks"]] == list(range(found["step"] + 1))

    # It continues there, with the earlier looks and the evaluation of the step itself, which no checkpoint has.
    flags |= {"hacking_guard": "warn", "train_steps": end["step"] + 2, "resume_from_checkpoint": "latest"}
    assert exit_code(flags) == exit_codes.DONE
    assert len(events(root, "reward_hacking")) == 1  # has been said
    last = root / "checkpoints" / f"step-{end['step'] + 2}" / "state.json"
    steps = [look["step"] for look in json.loads(last.read_text())["guards"]["hacking"]["looks"]]
    assert steps == [*range(found["step"] + 1), end["step"] + 1]


def test_a_run_on_reward_gradients_is_stopped(flags: dict[str, Any], tmp_path: Path) -> None:
    flags |= {"method": "refl", "num_generations": 1, "batch_size": 2, "hacking_guard": "stop", "hacking_patience": 1}
    assert exit_code({**flags, "sampling_steps": 2}) == exit_codes.GUARDED
    (found,) = events(tmp_path / "run", "reward_hacking")
    assert found["judge"] == "opposites:down"
    assert found["trained_now"] > found["trained_before"]


@pytest.mark.rotating("refl-hacks-brightness")
@pytest.mark.timeout(600)
def test_brightness_is_hacked_and_witnesses_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of docs/how-to/reward-gradients.md, without held-out prompts: all clips turn white."""
    monkeypatch.chdir(Path(__file__).parents[3])
    options = {
        "method": "refl", "draft_k": 2, "model_name": "ltx_video", "pretrained_model_name_or_path": "demo://ltx",
        "shift": 3, "prompts": "examples/demo_prompts.txt", "reward": "brightness", "rollout_size": "9x32x64",
        "prompts_per_step": 8, "num_generations": 1, "batch_size": 8, "transformer_dtype": "fp32", "vae_dtype": "fp32",
        "text_encoder_dtype": "fp32", "lr": 1e-3, "train_steps": 10, "output_dir": tmp_path / "run",
    }  # fmt: skip
    assert exit_code(options) == exit_codes.DONE
    (hacking, *_) = events(tmp_path / "run", "reward_hacking")
    assert hacking["judge"] in ("witness/motion", "witness/sharpness", "witness/saturation")
    assert 5 <= hacking["step"] <= 10
    assert hacking["trained_now"] > 0.9 > 0.7 > hacking["trained_before"]
