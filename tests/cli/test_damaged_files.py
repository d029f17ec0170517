"""Hostile names and numbers in commands, and checkpoints whose files were edited: refused at once, in plain text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from finetrainers.rundir.manifest import MANIFEST, write_manifest
from tests.refusals import refused_command

MODEL = ("--model_name", "ltx_video", "--pretrained_model_name_or_path", "demo://ltx", "--dry_run")
LONG = "9" * 5000


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_messages_have_no_control_characters(odd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names from command lines and files cannot move the cursor, color the terminal or reverse its text."""
    Path("d.toml").write_text('[[dataset]]\ndata_root = "x"\n"a\\u001b[31m\\u0000b\\u202e" = 1\n', encoding="utf-8")
    for command in (["--config", "\u202e\x1b[31m"], [*MODEL, "--dataset", "d.toml"], [*MODEL, "--lr", LONG]):
        assert refused_command(["train", *command])[0] in (2, 65)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if not line.isprintable()] == []


def test_numbers_that_are_no_floats_are_refused(odd: Path) -> None:
    for option in ("--rank", "--train_steps", "--seed"):
        assert (option, "invalid") in refused_command(["train", *MODEL, option, "9" * 320])[1]


RUNS = Path(__file__).parents[1] / "upgrades" / "ac471eb6"


def test_manifests_with_wrong_values(odd: Path) -> None:
    """Their checksums fit: only what is in them is wrong."""
    shutil.copytree(RUNS, odd, dirs_exist_ok=True)
    checkpoint = odd / "runs/sft/checkpoints/step-4"
    facts = json.loads((checkpoint / MANIFEST).read_text())
    facts = {name: facts[name] for name in facts.keys() - {"files", "manifest_sha256"}}
    resume = ["train", "--config", "sft.toml", "--output_dir", "runs/sft", "--resume_from_checkpoint", "latest"]
    wrong = {"activation_memory": [1], "blocks_to_swap": "x", "enable_slicing": {}}
    for name, value in wrong.items():
        (checkpoint / MANIFEST).unlink()
        write_manifest(checkpoint, facts={**facts, "config": {**facts["config"], name: value}})
        refusal = refused_command([*resume, "--train_steps", 7, "--dry_run"])
        assert refusal == (2, [("--resume_from_checkpoint", "unreadable")]), name
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, facts={**facts, "config": {**facts["config"], "train_steps": "x"}})
    assert refused_command([*resume, "--train_steps", 7, "--dry_run"]) == (0, [])
    state = json.loads((checkpoint / "state.json").read_text())
    course = state["course"]
    values = [
        ("guards", [1]), ("step", "x"), ("course", {**course, "stretches": [0.5]}), ("critical", None),
        ("course", {**course, "stretches": []}), ("initial", {"kind": "full"}), ("initial", [1]),
        ("method", None),
    ]  # fmt: skip
    for name, value in values:
        (checkpoint / "state.json").write_text(json.dumps({**state, name: value}))
        (checkpoint / MANIFEST).unlink()
        write_manifest(checkpoint, facts=facts)
        code, problems = refused_command([*resume, "--train_steps", 7, "--dry_run"])
        kind = "unreadable" if name == "course" else "invalid"
        assert (code, problems) == (2, [("--resume_from_checkpoint", kind)]), name
    (checkpoint / "state.json").write_text(json.dumps(state))
    for saved_at in (float("-inf"), float("nan"), 10**400, facts["saved_at"]):
        (checkpoint / MANIFEST).unlink()
        write_manifest(checkpoint, facts={**facts, "saved_at": saved_at})
        assert refused_command(["ckpt", "ls", "runs/sft"]) == (0, []), saved_at
    manifest = (checkpoint / MANIFEST).read_text()
    (checkpoint / "ema.safetensors").rename(odd / "ema.safetensors")
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, facts=facts)
    (odd / "ema.safetensors").rename(checkpoint / "ema.safetensors")
    sample = ["sample", "runs/sft", "--prompts", "a", "--dry_run"]
    assert refused_command(sample) == (2, [("TARGET", "unreadable")])
    (checkpoint / MANIFEST).write_text(manifest)
    assert refused_command(sample) == (0, [])
