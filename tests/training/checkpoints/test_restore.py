"""A resumed run equals an uninterrupted one, bit for bit, and a broken save costs nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file

from finetrainers.config.errors import ConfigError
from finetrainers.rundir.find import find_checkpoint, read_state, scan_checkpoints
from finetrainers.rundir.manifest import write_manifest
from finetrainers.training.checkpoints import save as saving

BNB = {"optimizer": "adamw-bnb-8bit", "transformer_dtype": "bf16", "text_encoder_dtype": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "lora": {"use_ema": True, "lora_dropout": 0.3, "caption_dropout_p": 0.5, "eval_num_items": 1, "eval_steps": 2},
    "full": {
        "training_type": "full-finetune", "use_ema": True, "caption_dropout_p": 0.5, "lr_scheduler": "cosine",
        "lr_warmup_steps": 2,
    },
    "precomputed": {
        "precompute_conditions": True, "caption_dropout_p": 0.5, "caption_dropout_technique": "zero", "batch_size": 2,
    },
    "accumulated": {"gradient_accumulation_steps": 2, "batch_size": 2, "lora_dropout": 0.2, "optimizer": "adamw"},
    "8-bit bf16": {"training_type": "full-finetune", **BNB},
    "stochastic rounding": {
        "training_type": "full-finetune", "optimizer": "adamw", "transformer_dtype": "bf16",
        "master_weights": "stochastic_rounding",
    },
}  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize("name", CASES)
def test_resuming_changes_nothing(
    name: str, options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchao compiles its step, which takes longer than all of this.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    changes = {"clips": 3, "train_steps": 6, **CASES[name]}
    straight = run(**options(**changes, output_dir=str(tmp_path / "straight")))

    # The interrupted run knows that it is going for six steps; it is stopped after writing its third.
    resumed_options = options(**changes, output_dir=str(tmp_path / "resumed"), checkpointing_steps=3)
    with stopping_after(3), pytest.raises(KeyboardInterrupt):
        run(**resumed_options)
    assert [found.step for found in scan_checkpoints(tmp_path / "resumed") if found.damage is None] == [3]
    resumed = run(**resumed_options, resume_from_checkpoint="latest")

    assert resumed.steps_done == 3
    assert resumed.curve("loss", "grad_norm", "lr") == straight.curve("loss", "grad_norm", "lr")
    evaluations = [[r["eval_loss"] for r in done.metrics if "eval_loss" in r] for done in (straight, resumed)]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == (4 if "eval_steps" in changes else 0)  # steps 0, 2, 4, 6
    assert_same(straight.weights, resumed.weights)
    key = next(iter(straight.weights))
    last = [done.root / "checkpoints" / "step-6" for done in (straight, resumed)]
    if changes.get("use_ema"):
        averages = [load_file(path / "ema.safetensors") for path in last]
        assert_same(*averages)
        # What is handed out is the average; what training continues from is not.
        exported = {name.removeprefix("transformer."): tensor for name, tensor in straight.weights.items()}
        assert_same(exported, {name.replace(".default", ""): tensor for name, tensor in averages[0].items()})
        assert not torch.equal(straight.weights[key], results(last[0])[key])
    states = [optimizer_tensors(path) for path in last]
    assert_same(*states)
    if name == "8-bit bf16":
        assert any(tensor.dtype == torch.uint8 and tensor.numel() > 1000 for tensor in states[0].values())


@contextmanager
def stopping_after(step: int) -> Iterator[None]:
    """Within the block, a trainer dies as by Ctrl-C once it has published the checkpoint of a step."""
    save = saving.save_checkpoint

    def save_and_stop(state: Any, background: Any) -> Path:
        path = save(state, background)
        if state.step == step:
            raise KeyboardInterrupt
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finetrainers.training.trainer.save_checkpoint", save_and_stop)
        yield


def optimizer_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor and number of the optimizer's state, by its path."""
    found: dict[str, torch.Tensor] = {}

    def take(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                take(inner, f"{path}.{key}")
        elif isinstance(value, (int, float, torch.Tensor)):
            found[path] = torch.as_tensor(value)

    take(torch.load(directory / "optimizer.pt", weights_only=False)["state"], "")
    assert found
    return found


def results(directory: Path) -> dict[str, torch.Tensor]:
    lora = directory / "pytorch_lora_weights.safetensors"
    return load_file(lora if lora.is_file() else directory / "transformer" / "diffusion_pytorch_model.safetensors")


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        assert torch.equal(value, theirs[name]), name


def steps_of(root: Path) -> list[int]:
    return [found.step for found in scan_checkpoints(root) if found.damage is None]


def test_a_save_that_fails_publishes_nothing(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = options(train_steps=4, checkpointing_steps=1, checkpointing_limit=2)
    save_weights = saving.save_weights

    def fail_at_four(directory: Path, **arguments: Any) -> Any:
        written = save_weights(directory, **arguments)
        if directory.name == ".step-4.tmp":
            raise OSError("disk gone")
        return written

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_weights", fail_at_four)
        with pytest.raises(OSError, match="disk gone"):
            run(**values)
    root = tmp_path / "run"
    # The oldest checkpoint has not been pruned for one that never came, and the half-written one is not taken for one.
    assert steps_of(root) == [2, 3]
    assert find_checkpoint("latest", root) == root / "checkpoints" / "step-3"
    assert not (root / "checkpoints" / ".step-4.tmp").exists()  # it would take the room that the next try needs

    # A file that the manifest does not list is not read.
    save_file({"a/b": torch.zeros(1)}, root / "checkpoints" / "step-3" / "method.safetensors")
    resumed = run(**values, resume_from_checkpoint="latest")
    assert [step for step, _ in resumed.curve("loss")] == [1, 2, 3, 4]  # step 4 came twice
    assert steps_of(root) == [3, 4]
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == ["step-3", "step-4"]
    straight = run(**options(train_steps=4, output_dir=str(tmp_path / "straight")))
    assert straight.curve("loss") == resumed.curve("loss")


def test_only_the_newest_are_kept(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    done = run(**options(train_steps=5, checkpointing_steps=1, checkpointing_limit=2))
    assert steps_of(done.root) == [4, 5]
    # Going back keeps what lies before, not what lies after in another future.
    again = run(**options(train_steps=6, checkpointing_steps=1, checkpointing_limit=2), resume_from_checkpoint="4")
    assert steps_of(again.root) == [5, 6]
    assert [step for step, _ in again.curve("loss")] == [1, 2, 3, 4, 5, 6]


def test_without_a_limit_all_are_kept(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    done = run(**options(train_steps=5, checkpointing_steps=2))
    assert steps_of(done.root) == [2, 4, 5]
    events = [e for e in done.events if e["event"] == "checkpoint"]
    assert [e["step"] for e in events] == [2, 4, 5]


def test_changed_runs_are_refused_with_every_difference(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(**options(train_steps=1))
    before = {path: path.read_bytes() for path in done.root.rglob("*") if path.is_file()}
    changed = options(
        train_steps=2, clips=2, batch_size=2, rank=8, lora_alpha=16, seed=7, flow_shift=3.0, optimizer="adam",
        target_modules=["to_q"],
    )  # fmt: skip
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as refusal:
        run(**changed, resume_from_checkpoint="latest")
    assert [problem.where for problem in refusal.value.problems] == ["--resume_from_checkpoint"]
    for difference in (
        r"rank: 4 \w+, 8 ",
        r"lora_alpha: 8\.0 \w+, 16\.0 ",
        r"data: .*\(bucket 9x64x64, clips 1, .*; bucket 9x64x64, clips 2, .*\) \(--reset data\)",
        r"optimizer: 'adamw' \w+, 'adam' \w+ \(--reset optimizer\)",
        r"seed: 42 \w+, 7 \w+ \(--reset rng\)",
        r"flow_shift: 1\.0 \w+, 3\.0 \w+ \(--reset rng\)",
        r"target_modules: ",
        r"--reset data optimizer rng .* rank, lora_alpha, target_modules",
    ):
        assert re.search(difference, str(refusal.value))
    assert "use_rslora" not in str(refusal.value)
    assert "batch_size" not in str(refusal.value)
    assert {path: path.read_bytes() for path in done.root.rglob("*") if path.is_file()} == before


def test_a_finished_run_can_be_resumed(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    done = run(**options(train_steps=2))
    weights = done.weights
    again = run(**options(train_steps=2), resume_from_checkpoint="latest")
    assert again.steps_done == 0
    assert_same(again.weights, weights)
    shorter = run(**options(train_steps=1), resume_from_checkpoint="latest")
    assert shorter.state.step == 2


def test_other_formats_are_refused(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    directory = run(**options(train_steps=1)).root / "checkpoints" / "step-1"
    state = directory / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 99}))
    (directory / "manifest.json").unlink()
    write_manifest(directory, facts={})
    with refused("unsupported", directory, " 99", "3 and 4"):
        read_state(directory)
    with pytest.raises(ConfigError, match=r"step-1 .* 99"):
        run(**options(train_steps=2), resume_from_checkpoint="latest")
    content = {**json.loads(state.read_text()), "format": 4}
    for table in (0.5, [["a"], ["b", "c"]], [[1]]):
        state.write_text(json.dumps({**content, "critical": {**content["critical"], "data_table": table}}))
        with refused("invalid", directory, "data_table"):
            read_state(directory)


def test_checkpoints_are_found_by_name(tmp_path: Path) -> None:
    whole = ("step-2", "step-10", ".step-12.tmp", "step-x", ".step-10.replaced")
    for name in (*whole, "step-11"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in whole:
        (tmp_path / "checkpoints" / name / "state.json").write_text("{}")
        write_manifest(tmp_path / "checkpoints" / name, facts={})
    assert steps_of(tmp_path) == [2, 10]
    assert find_checkpoint(None, tmp_path) is None
    assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoints" / "step-10"
    assert find_checkpoint("2", tmp_path) == tmp_path / "checkpoints" / "step-2"
    other = tmp_path / "checkpoints" / "step-x"
    assert find_checkpoint(str(other), tmp_path) == other
    with refused("not_found", tmp_path / "checkpoints", "step 3", "2, 10"):
        find_checkpoint("3", tmp_path)
    with refused("unreadable", tmp_path / "checkpoints" / "step-11", "manifest.json"):
        find_checkpoint("11", tmp_path)
    with refused("not_found", f"{tmp_path} ", "state.json", "(2, 10)"):
        find_checkpoint(str(tmp_path), tmp_path)
    with refused("not_found", tmp_path / "elsewhere" / "checkpoints"):
        find_checkpoint("latest", tmp_path / "elsewhere")
