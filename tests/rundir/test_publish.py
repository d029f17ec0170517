"""What is published, what is kept, what is refused: on short runs and on directories made by hand."""

from __future__ import annotations

import errno
import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file

import finetrainers
from finetrainers.config.errors import ConfigError
from finetrainers.rundir import publish
from finetrainers.rundir.best import best_checkpoint, mark_best
from finetrainers.rundir.find import find_checkpoint, scan_checkpoints
from finetrainers.rundir.manifest import damage, lacks_optimizer, read_manifest, write_manifest
from finetrainers.training.checkpoints import restore
from finetrainers.training.checkpoints import save as saving


def make(root: Path, *steps: int) -> None:
    """Whole checkpoints of the given steps."""
    for step in steps:
        final = root / "checkpoints" / f"step-{step}"
        temporary = publish.reserve(final, needed=0)
        (temporary / "state.json").write_text(json.dumps({"step": step}))
        publish.publish(temporary, final, facts={"step": step})


def break_file(root: Path, step: int) -> None:
    """One changed byte."""
    (root / "checkpoints" / f"step-{step}" / "state.json").write_text(json.dumps({"step": step}).replace("s", "z", 1))


def steps_of(root: Path) -> list[int]:
    return [found.step for found in scan_checkpoints(root) if found.damage is None]


# ---- publishing, on directories -----------------------------------------------------------------------------------


def test_disk_before_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and directories are flushed before the checkpoint gets its name, and the manifest comes after the files."""
    calls: list[str] = []

    def spy(module: Any, name: str, label: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (calls.append(label), original(*a, **k))[1])

    spy(publish, "fsync_tree", "flush files")
    spy(publish, "write_manifest", "manifest")
    spy(publish, "fsync_dir", "flush name")
    spy(Path, "rename", "rename")
    make(tmp_path, 1)
    assert calls == ["flush files", "manifest", "rename", "flush name", "flush name"]


def test_a_step_that_is_reached_again_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 2, 4)
    root = tmp_path / "checkpoints"
    # Killed between the two renames: the old one still counts, and gets its name back with the next save.
    (root / "step-4").rename(root / ".step-4.replaced")
    assert find_checkpoint("latest", tmp_path) == root / ".step-4.replaced"
    make(tmp_path, 5)
    assert steps_of(tmp_path) == [2, 4, 5]
    # Killed after them: the new one counts, and the old one goes.
    shutil.copytree(root / "step-4", root / ".step-4.replaced")
    assert find_checkpoint("4", tmp_path) == root / "step-4"
    make(tmp_path, 6)
    assert sorted(path.name for path in root.iterdir()) == ["step-2", "step-4", "step-5", "step-6"]
    make(tmp_path, 6)
    assert steps_of(tmp_path) == [2, 4, 5, 6]


def test_only_whole_checkpoints_count_and_only_they_are_pruned(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "checkpoints" / "step-5" / "state.json").unlink()
    (tmp_path / "checkpoints" / "step-2" / "manifest.json").unlink()
    gone = publish.prune(tmp_path, step=5, limit=2)
    assert [path.name for path in gone] == ["step-1"]
    assert [found.step for found in scan_checkpoints(tmp_path)] == [2, 3, 4, 5]
    assert steps_of(tmp_path) == [3, 4]
    publish.prune(tmp_path, step=5, limit=1)
    assert steps_of(tmp_path) == [4]
    assert publish.prune(tmp_path, step=5, limit=None) == []


def test_the_best_checkpoint_is_not_pruned(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4)
    root = tmp_path / "checkpoints"
    assert best_checkpoint(tmp_path) is None
    mark_best(root / "step-1")
    assert best_checkpoint(tmp_path) == root / "step-1"
    assert (root / "best" / "state.json").read_text() == '{"step": 1}'
    mark_best(root / "step-2")
    assert [path.name for path in publish.prune(tmp_path, step=4, limit=1)] == ["step-1", "step-3"]
    assert steps_of(tmp_path) == [2, 4]
    make(tmp_path, 2)  # reached again
    assert best_checkpoint(tmp_path) == root / "step-2"
    shutil.rmtree(root / "step-2")
    assert best_checkpoint(tmp_path) is None
    assert publish.prune(tmp_path, step=4, limit=1) == []


def test_a_copy_without_optimizer_state_can_be_sampled_from_and_not_resumed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        temporary = publish.reserve(root / f"step-{step}", needed=0)
        (temporary / "deepspeed" / "a").mkdir(parents=True)
        for name in ("state.json", "optimizer.pt", "deepspeed/a/b.pt"):
            (temporary / name).write_text(json.dumps({"step": step}))
        publish.publish(temporary, root / f"step-{step}", facts={"step": step})
    (root / "step-2" / "optimizer.pt").write_text("cut")
    assert damage(root / "step-2", contents=True, weights_only=True) is None
    assert not lacks_optimizer(root / "step-2")
    assert not lacks_optimizer(root / "step-1")
    with refused("unreadable", root / "step-2", "optimizer.pt", 3):
        find_checkpoint("2", tmp_path)
    (root / "step-2" / "optimizer.pt").unlink()
    shutil.rmtree(root / "step-2" / "deepspeed")
    assert lacks_optimizer(root / "step-2")
    assert find_checkpoint("latest", tmp_path, weights_only=True) == root / "step-2"
    assert find_checkpoint("latest", tmp_path) == root / "step-1"
    with refused("not_found", root / "step-2", "--init_from"):
        find_checkpoint("2", tmp_path)
    shutil.rmtree(root / "step-1")
    for wanted in ("latest", "auto"):
        with refused("not_found", root, "--init_from"):
            find_checkpoint(wanted, tmp_path)
    break_file(tmp_path, 2)
    assert not lacks_optimizer(root / "step-3")
    with refused("unreadable", root, "step-2"):
        find_checkpoint("latest", tmp_path, weights_only=True)


def test_with_a_limit_of_one_there_is_a_whole_checkpoint_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(publish, "fault_point", lambda name: moments.append((name, steps_of(tmp_path))))
    for step in (1, 2, 3):
        make(tmp_path, step)
        publish.prune(tmp_path, step=step, limit=1)
        assert steps_of(tmp_path) == [step]
    assert ("save.prune", [1, 2]) in moments
    assert all(steps for _, steps in moments[2:])  # from the first checkpoint on


def test_a_disk_without_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**30))
    publish.reserve(tmp_path / "checkpoints" / "step-2", needed=2**30)
    with pytest.raises(OSError, match=r" 12 GiB .*checkpoints .* 1 GiB "):
        publish.reserve(tmp_path / "checkpoints" / "step-3", needed=12 * 2**30)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


# ---- finding ------------------------------------------------------------------------------------------------------


def test_latest_falls_back_to_the_newest_that_verifies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, 2, 4, 6, 8)
    root = tmp_path / "checkpoints"
    break_file(tmp_path, 6)  # same size: only reading shows it
    (root / "step-8" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint("latest", tmp_path) == root / "step-4"
    first, second = (record.getMessage() for record in caplog.records)
    assert "step-8: manifest.json " in first
    assert re.search(r"step-6: state\.json .*SHA-256", second)
    assert steps_of(tmp_path) == [2, 4, 6]
    # Who names a checkpoint gets that one or none.
    with refused("unreadable", root / "step-6", "state.json", "SHA-256"):
        find_checkpoint("6", tmp_path)
    with refused("unreadable", root / "step-8", "manifest.json"):
        find_checkpoint(str(root / "step-8"), tmp_path)
    for step in (2, 4):
        break_file(tmp_path, step)
    with refused("unreadable", root, *(f"step-{step}: " for step in (2, 4, 6, 8))):
        find_checkpoint("latest", tmp_path)


# ---- runs ---------------------------------------------------------------------------------------------------------


def test_a_manifest_says_what_the_checkpoint_is_of(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    done = run(**options(train_steps=1, use_ema=True, hub_token="SECRET"))
    directory = done.root / "checkpoints" / "step-1"
    manifest = read_manifest(directory)
    assert sorted(manifest["files"]) == [
        "ema.safetensors", "optimizer.pt", "pytorch_lora_weights.safetensors", "state.json",
    ]  # fmt: skip
    assert manifest["format"] == 3
    assert manifest["step"] == 1
    assert manifest["packages"]["torch"] == torch.__version__
    assert manifest["config"]["lr"] == 1e-2
    assert "SECRET" not in (directory / "manifest.json").read_text()
    assert manifest["data"] == done.state.checkpoint_fields["critical"]["data"]
    assert manifest["tracker_run"] is None
    assert damage(directory, contents=True) is None
    # The room that was asked for is the room that it takes.
    taken = sum(entry["size"] for entry in manifest["files"].values())
    snapshot = saving.take_snapshot(done.state)
    needed = saving._bytes_needed(done.state, [(snapshot.num_bytes(), 0)]) - saving._SPARE
    assert 0.5 * taken < needed < taken + 2**20


def test_damage_is_found_before_anything_is_loaded(
    options: Callable[..., dict], run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    values = options(train_steps=4, checkpointing_steps=2)
    done = run(**values)
    straight = done.curve("loss", "grad_norm")
    file = done.root / "checkpoints" / "step-4" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--resume_from_checkpoint: .*step-4 .*optimizer\.pt"):
        run(**values, resume_from_checkpoint="4")
    with pytest.raises(ConfigError, match=r"--output_dir: .*--resume_from_checkpoint latest"):
        run(**values)
    with caplog.at_level(logging.WARNING):
        resumed = run(**values, resume_from_checkpoint="latest")
    assert "step-4: optimizer.pt" in caplog.text
    assert resumed.steps_done == 2
    assert resumed.curve("loss", "grad_norm") == straight
    # The damaged one is put aside, not removed.
    names = sorted(path.name for path in (done.root / "checkpoints").iterdir())
    assert names[-2:] == ["step-2", "step-4"]
    assert names[0].startswith("replaced-")


def test_a_run_is_not_restarted_over_damaged_checkpoints(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    done = run(**options(train_steps=1))
    (done.root / "checkpoints" / "step-1" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"--output_dir: .*--resume_from_checkpoint latest"):
        run(**options(train_steps=1))


@pytest.mark.parametrize("where", ["weights", "ema.safetensors"])
def test_what_is_not_finite_is_not_published(
    where: str, options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = saving.save_checkpoint
    poisoned: list[str] = []

    def poison(state: Any, background: Any) -> Path:
        if state.step == 4:
            trained = saving.trainable_parameters(state.parallel.unwrap(state.transformer))
            name = sorted(trained)[3]
            poisoned.append(name)
            tensor = trained[name] if where == "weights" else state.ema.weights[name]
            tensor.data.view(-1)[1] = float("nan") if where == "weights" else float("inf")
        return save(state, background)

    monkeypatch.setattr("finetrainers.training.trainer.save_checkpoint", poison)
    values = options(train_steps=4, checkpointing_steps=1, checkpointing_limit=2, use_ema=True)
    with pytest.raises(FloatingPointError, match="step 4") as refusal:
        run(**values)
    assert str(refusal.value).startswith(f"{poisoned[0]} ({where}) ")
    root = Path(values["output_dir"])
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == ["step-2", "step-3"]


def test_no_room_leaves_older_checkpoints(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([2**40] * 4 + [1000])  # at the start, and before each checkpoint
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=next(free)))
    values = options(train_steps=4, checkpointing_steps=1, checkpointing_limit=2)
    root = Path(values["output_dir"])
    with pytest.raises(OSError, match=re.escape(str(root / "checkpoints"))) as refusal:
        run(**values)
    assert refusal.value.errno == errno.ENOSPC
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == ["step-2", "step-3"]
    assert find_checkpoint("latest", root) == root / "checkpoints" / "step-3"


# ---- what the files are -------------------------------------------------------------------------------------------


def test_a_method_state_comes_back_from_safetensors(tmp_path: Path) -> None:
    state = {"old": {"a.weight": torch.randn(3), "b": torch.ones(2, dtype=torch.bfloat16)}, "count": 3, "none": {}}
    tensors, values = saving.split_state(state)
    save_file(tensors, tmp_path / "method.safetensors")
    back = restore.join_state(load_file(tmp_path / "method.safetensors"), json.loads(json.dumps(values)))
    assert back.keys() == state.keys()
    assert back["count"] == 3
    assert back["none"] == {}
    assert all(torch.equal(back["old"][name], tensor) for name, tensor in state["old"].items())


class Payload:
    """What a malicious pickle does when it is loaded."""

    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Payload, "ran", True))


def test_a_pickle_that_acts_is_not_loaded(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    """A checkpoint from somebody else may come with a manifest that fits."""
    done = run(**options(train_steps=1))
    directory = done.root / "checkpoints" / "step-1"
    torch.save({"state": Payload()}, directory / "optimizer.pt")
    (directory / "manifest.json").unlink()
    write_manifest(directory, facts={})
    with pytest.raises(pickle.UnpicklingError):
        run(**options(train_steps=2), resume_from_checkpoint="latest")
    assert Payload.ran is False


def test_pickles_are_read_with_weights_only() -> None:
    """Every `torch.load` of the package says so."""
    package = Path(finetrainers.__file__).parent
    calls = [
        f"{path.name}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?<!safetensors\.)\btorch\.load\((?!\.)", line)  # but not a docstring's `torch.load(...)`
    ]
    assert calls
    assert [call for call in calls if "weights_only=True" not in call] == []
