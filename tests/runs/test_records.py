"""What a run says and leaves: learning rates, events, refusals, exit codes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_family import FAMILIES, short_clip
from PIL import Image
from real_process import Python
from refusals import refused_options
from safetensors.torch import load_file

from finetrainers.config.facts import Facts
from finetrainers.config.load import load_config
from finetrainers.config.root import changed_options, fields
from finetrainers.draw.sample_files import write_sample
from finetrainers.models.registry import families
from finetrainers.rundir.run_records import read_run
from finetrainers.runs.training import train
from finetrainers.training.callbacks.validation import Validation
from finetrainers.utils.failures import Kind

ROOT = Path(__file__).parents[2]


def test_learning_rate_follows_its_schedule(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    values = options(clips=4, batch_size=2, gradient_accumulation_steps=2, train_steps=6, lr=1e-3)
    done = run(**values, lr_scheduler="cosine", lr_warmup_steps=2, scale_lr=True)
    peak = 1e-3 * 2 * 2
    # Two steps up from zero, then half a cosine over the other four.
    expected = [0.0, peak / 2, *(peak * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4))]
    assert [lr for _, lr in done.curve("lr")] == pytest.approx(expected)
    assert done.state.optimizer.param_groups[0]["lr"] == pytest.approx(expected[-1])
    assert all(record["step_s"] > 0 for record in done.metrics)


def test_a_step_at_learning_rate_zero_changes_nothing(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    """The rate in the records is the one that was used."""
    done = run(**options(train_steps=1, training_type="full-finetune", weight_decay=0.1, lr_scheduler="linear"))
    assert done.curve("lr") == [(1, 0.0)]
    repository = Path(done.state.config.model.pretrained_model_name_or_path)
    before = load_file(repository / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all((value == before[name]).all() for name, value in done.weights.items())


def test_epochs_become_steps(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    values = options(clips=5, batch_size=2, gradient_accumulation_steps=2, train_epochs=2)
    del values["train_steps"]
    done = run(**values)
    assert done.state.step == 3  # two epochs of three batches, two batches a step
    assert (done.root / "checkpoints" / "step-3" / "state.json").is_file()


def test_a_checkpoint_is_written_before_sampling_can_fail(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("sampling")

    monkeypatch.setattr(Validation, "sample", out_of_memory)
    values = options(train_steps=2)
    with pytest.raises(RuntimeError, match="sampling"):
        run(**values, validation_prompts="a@@@9x64x64", checkpointing_steps=2)
    assert (Path(values["output_dir"]) / "checkpoints" / "step-2" / "state.json").is_file()


def test_samples_do_not_change_training(options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path) -> None:
    sampled = run(
        **options(train_steps=3, lora_dropout=0.5, eval_num_items=1, clips=2, output_dir=str(tmp_path / "a")),
        validation_prompts="a@@@9x64x64:::b@@@1x32x32", num_validation_videos=2, validation_steps=2,
        validation_inference_steps=2, eval_steps=1,
    )  # fmt: skip
    plain = run(**options(train_steps=3, lora_dropout=0.5, eval_num_items=1, clips=2, output_dir=str(tmp_path / "b")))
    assert sampled.curve("loss", "grad_norm") == plain.curve("loss", "grad_norm")
    folders = sorted(path.name for path in (sampled.root / "samples").iterdir() if path.is_dir())
    assert folders == ["step-000000", "step-000002", "step-000003"]  # the base model, every two, and the last
    names = sorted(path.name for path in (sampled.root / "samples" / "step-000002").glob("*.mp4"))
    assert names == ["00-a-0.mp4", "00-a-1.mp4", "01-b-0.mp4", "01-b-1.mp4"]
    # What a prompt gives at the steps, below each other; and each by itself.
    overview, *sheets = (
        Image.open(sampled.root / "samples" / place)
        for place in ("00-a-1.png", "step-000002/00-a-1.png", "step-000003/00-a-1.png")
    )
    assert overview.width == sheets[0].width == sheets[1].width
    assert overview.height == sheets[0].height + 4 * 64 + 8
    assert [event["step"] for event in sampled.events if event["event"] == "samples"] == [0, 2, 3]
    assert [record["step"] for record in sampled.metrics if "eval_loss" in record] == [0, 1, 2, 3]
    assert [record["step"] for record in plain.metrics if "eval_loss" in record] == [0, 3]


def test_samples_of_all_steps_lie_below_each_other(tmp_path: Path) -> None:
    """At most eight of them, the first and the newest among them."""
    for step in range(0, 100, 10):
        clip = np.full((9, 32, 64, 3), 100 + step, np.uint8)
        write_sample(tmp_path, "00-a", clip, step=step, fps=8, heading="a\nseed 42")
    picture = np.asarray(Image.open(tmp_path / "00-a.png"))[:, -30, 0].astype(int)
    edges = [y for y in range(1, len(picture)) if picture[y] < 205 <= picture[y - 1]]
    assert np.diff(edges).tolist() == [100] * 7
    assert [picture[y + 50] for y in edges] == pytest.approx([100, 110, 130, 140, 150, 160, 180, 190], abs=2)


def test_what_a_run_leaves(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    values = options(train_steps=1, lora_alpha=6)
    done = run(**values)
    assert {path.name for path in done.root.iterdir()} == {
        "README.md", "checkpoints", "config.toml", "env.json", "events.jsonl", "manifest.jsonl", "metrics.jsonl",
        "run.json", "pytorch_lora_weights.safetensors", "report.html", ".lock",
    }  # fmt: skip
    again = load_config(done.root / "config.toml")
    assert again == done.state.config
    assert json.loads((done.root / "env.json").read_text())["packages"]["torch"]
    assert [event["event"] for event in done.events] == [
        "start", "memory_planned", "checkpoint", "memory", "finished",
    ]  # fmt: skip
    found = read_run(done.root)
    assert found.values("loss") == [record["loss"] for record in done.metrics if "loss" in record]
    assert found.status == "finished"
    assert found.planned_memory().keys() == found.measured_memory().keys()
    assert 0 < found.values("seconds/data")[0] < found.values("step_s")[0]
    assert "finished</span>" in (done.root / "report.html").read_text()


@pytest.mark.parametrize(
    ("targets", "kind", "named"),
    [
        (["to_qq"], "unknown", ["'to_qq'", "'to_q'"]),
        (["to_q", "blocks.0"], "unknown", ["'blocks.0'"]),
        ([r"single_blocks\..*to_q"], "not_found", [r"'single_blocks\\..*to_q'", "['"]),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_unknown_lora_targets_are_refused(
    targets: list[str], kind: Kind, named: list[str], dry: bool, options: Callable[..., dict], tmp_path: Path
) -> None:
    with refused_options(("--target_modules", kind)) as refusal:
        train(load_config(**options(target_modules=targets), dry_run=dry))
    assert all(name in str(refusal.value) for name in named)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_lora_targets_may_be_an_expression(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    done = run(**options(train_steps=1, target_modules=[r"transformer_blocks\.1\..*to_[qk]"]))
    layers = {name.removesuffix(".weight").rpartition(".lora_")[0] for name in done.weights}
    assert layers == {f"transformer.transformer_blocks.1.attn{i}.to_{x}" for i in (1, 2) for x in "qk"}


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_tells_the_plan_and_writes_nothing(
    family: str, options: Callable[..., dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = options(family, clips=3, dry_run=True)
    capsys.readouterr()  # making the model may be the first to import a library that prints
    before = set(tmp_path.rglob("*"))
    train(load_config(**values))
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].endswith(f" {family} ({values['pretrained_model_name_or_path']}) on 3 clips")
    assert f"{short_clip(family)}x64x64" in printed
    assert "M parameters" in printed
    assert "< peak" in printed
    assert "encoding clips" in printed
    changed = changed_options(load_config(**values))
    targets = ["target_modules"] if families()[family].facts.lora_targets != Facts.lora_targets else []
    chosen = {*changed, *targets, *([] if family == "cogvideox" else ["validation_frame_rate"])} - {
        "dry_run"
    }  # that of the clips
    assert [name for name in fields() if f"\n{name} = " in printed] == [name for name in fields() if name in chosen]
    assert re.search(r"disk: \d+ x [\d.]+ KiB .*, result [\d.]+ KiB", printed)
    assert re.search("checks out$" if family == "cogvideox" else "checks out.* 1 warning$", lines[-1])
    assert set(tmp_path.rglob("*")) == before

    train(load_config(**values, verbose=True, precompute_conditions=True))
    printed = capsys.readouterr().out
    assert {name for name in fields() if f"\n{name} = " in printed} > {*changed, "lr_scheduler"} - {"dry_run"}
    assert re.search(r"disk: .*, cache [\d.]+ KiB", printed)


def test_a_failing_run_exits_with_1(options: Callable[..., dict], python: Python) -> None:
    """What no check foresees: the shell must hear of it, with the traceback."""
    flags = [
        part
        for name, value in options(train_steps=1, video_resolution_buckets="9x64x64").items()
        for part in (f"--{name}", str(value))
    ]
    done = python("train.py", *flags, FINETRAINERS_FAULT="raise@load")
    assert done.wait() == 1, done.stderr[-2000:]
    assert "Traceback" in done.stderr
    assert "RuntimeError" in done.stderr
