"""A watch samples each published checkpoint once, as `finetrainers sample` does, whatever arrives late, vanishes or is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetrainers.cli.main import main
from finetrainers.engine.checkpoints.best import best_checkpoint
from finetrainers.engine.checkpoints.manifest import MANIFEST, read_manifest, write_manifest
from finetrainers.engine.sample.run import _Drawing
from finetrainers.engine.watch import server

PROMPTS = ("a red ball", "a blue ball on a hill")


@pytest.fixture
def trained(options: Callable[..., dict], run: Callable[..., Any]) -> Path:
    """A run with two checkpoints."""
    values = options(
        train_steps=2, checkpointing_steps=1, validation_prompts=":::".join(PROMPTS), validation_inference_steps=2, seed=5,
        report_to="tensorboard",
    )  # fmt: skip
    return run(**values).root


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the clips that are sampled."""
    names: list[str] = []
    write = _Drawing._write

    def keep(self: Any, sample: Any, clip: Any, **more: Any) -> None:
        names.append(self.names[sample.key])
        write(self, sample, clip, **more)

    monkeypatch.setattr(_Drawing, "_write", keep)
    return names


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_checkpoint_is_sampled_scored_sent_and_compared_once(
    trained: Path, drawn: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [trained / "checkpoints" / f"step-{step}" for step in (1, 2)]
    # Step 2 has arrived in part, without its optimizer state, as from a copy.
    weights = steps[1] / "pytorch_lora_weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of its size already
    (steps[1] / "optimizer.pt").unlink()
    watch = [
        "watch", str(trained), "--once", "--presets", "run,low1s", "--reward", "brightness", "contrast",
        "--best_by", "brightness",
    ]  # fmt: skip
    assert main(watch) == 0
    out = capsys.readouterr().out
    assert "run: 2 clips of each checkpoint, 9x64x64, 2 denoising steps" in out
    assert "step 2 is not whole yet" in out
    assert "SHA-256 differs" in out
    assert "step 1, run: 2 clips, brightness " in out
    assert "best by brightness: step 1" in out
    assert best_checkpoint(trained) == steps[0]
    assert len(drawn) == 4
    weights.write_bytes(content)
    drawn.clear()
    assert main(watch) == 0
    assert len(drawn) == 4
    assert all("step-000002" in name for name in drawn)
    folder = trained / "watch" / "run"
    records = lines(folder / "scores.jsonl")
    assert [(one["step"], one["prompt"], one["seed"]) for one in records] == [
        (s, p, 5) for s in (1, 2) for p in PROMPTS
    ]
    assert {one["size"] for one in lines(trained / "watch" / "low1s" / "scores.jsonl")} == {
        "9x32x32"
    }  # at the 8 fps of the clips
    assert all(set(one["scores"]) == {"brightness", "contrast"} for one in records)
    means = [sum(one["scores"]["brightness"] for one in records if one["step"] == step) / 2 for step in (1, 2)]
    low = [one["scores"]["brightness"] for one in lines(trained / "watch" / "low1s" / "scores.jsonl")]
    totals = [means[0] + sum(low[:2]) / 2, means[1] + sum(low[2:]) / 2]
    assert best_checkpoint(trained) == steps[totals.index(max(totals))]
    # The same clips as those of the other command, of the same weights.
    assert main(["sample", str(steps[1]), "--seed", "5"]) == 0
    for mine, theirs in zip(sorted(folder.glob("*step-000002*.mp4")), sorted((trained / "samples" / "sample").glob("*.mp4")), strict=True):  # fmt: skip
        assert _frames(mine) == _frames(theirs)
    # Its own run at the tracker, beside the training's.
    events = EventAccumulator(str(trained / "logs" / "finetrainers" / "watch-run"), size_guidance={"scalars": 0, "images": 0})  # fmt: skip
    events.Reload()
    assert [(one.step, pytest.approx(one.value)) for one in events.Scalars("watch/brightness")] == list(zip((1, 2), means, strict=True))  # fmt: skip
    assert [one.step for one in events.Images("samples/sheet")] == [1, 2]
    assert len(events.Tags()["images"]) == 3
    page = (folder / "index.html").read_text()
    assert [text in page for text in ("step 1", "step 2", "best", "mean brightness", *PROMPTS)] == [True] * 6
    assert (folder / "sheet.png").is_file()

    # Again: nothing is sampled, scored or sent. A further reward is scored on the clips that are there.
    drawn.clear()
    capsys.readouterr()
    assert main(watch) == 0
    assert len(lines(folder / "scores.jsonl")) == 4
    assert main([*watch, "--reward", "brightness", "motion"]) == 0
    assert drawn == []
    again = lines(folder / "scores.jsonl")
    assert len(again) == 8
    assert all(set(one["scores"]) == {"brightness", "motion"} for one in again[4:])
    assert [one["scores"]["brightness"] for one in again[4:]] == [one["scores"]["brightness"] for one in records]

    # One watch for each preset, and one that marks the best.
    with server.exclusive(folder, server.join(server_plan(watch))):
        assert main(watch) == 2
        assert "is in use by another" in capsys.readouterr().err
        assert main(["watch", str(trained), "--once", "--presets", "low1s"]) == 0


def server_plan(watch: list[str]) -> Any:
    from finetrainers.cli.watch import _planned

    return _planned(watch[1:]).config


def _frames(path: Path) -> bytes:
    return server._pixels(path).numpy().tobytes()


def test_what_vanishes_or_fails_costs_that_checkpoint_alone(
    trained: Path, drawn: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [trained / "checkpoints" / f"step-{step}" for step in (1, 2)]
    third = steps[1].with_name("step-3")
    shutil.copytree(steps[1], third)
    facts = {name: value for name, value in read_manifest(third).items() if name not in ("files", "manifest_sha256")}
    (third / MANIFEST).unlink()
    write_manifest(third, facts={**facts, "step": 3})
    load, calls = server.draw_missing, []

    def vanish(plan: Any, *arguments: Any, **more: Any) -> Any:
        calls.append(plan.variants[0].label)
        if len(calls) == 1:
            shutil.rmtree(steps[0])
        if len(calls) == 2:
            raise RuntimeError("no luck")
        return load(plan, *arguments, **more)

    monkeypatch.setattr(server, "draw_missing", vanish)
    arguments = ["watch", str(trained), "--once", "--no_track", "--best_by", "brightness", "--reward", "brightness"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "step 1 was removed while it was sampled" in out
    assert "step 2, run: not sampled: RuntimeError: no luck" in out
    assert calls == ["step 1", "step 2", "step 3"]
    assert best_checkpoint(trained) == steps[1].with_name("step-3")
    assert len(drawn) == 2
    # The weights of step 2 are those of step 3: its clips are there.
    assert main(arguments) == 0
    assert len(drawn) == 2
    assert len(lines(trained / "watch" / "run" / "scores.jsonl")) == 4

    # A step that is saved again with other weights while it is sampled: which of the two the clips show, nobody knows.
    shutil.rmtree(trained / "watch")
    monkeypatch.setattr(server, "_is_other", lambda checkpoint: checkpoint.step == 2)
    assert main(arguments) == 0
    assert {one["step"] for one in lines(trained / "watch" / "run" / "scores.jsonl")} == {3}


@pytest.mark.parametrize("point", ["sample.record:2", "watch.score", "watch.best"])
def test_a_killed_watch_continues(trained: Path, python: Any, point: str, drawn: list[str]) -> None:
    arguments = ["watch", str(trained), "--once", "--reward", "brightness", "--best_by", "brightness"]
    killed = python("-m", "finetrainers", *arguments, FINETRAINERS_FAULT=f"kill@{point}", ACCELERATE_USE_CPU="true")
    assert killed.wait() == -9, killed.stderr
    folder = trained / "watch" / "run"
    there = len(lines(folder / "ledger.jsonl"))
    assert there == {"sample.record:2": 1, "watch.score": 2, "watch.best": 4}[point]
    assert main(arguments) == 0
    assert len(drawn) == 4 - there
    assert len(lines(folder / "ledger.jsonl")) == len(lines(folder / "scores.jsonl")) == 4
    assert best_checkpoint(trained) is not None
    assert not list(folder.glob(f"**/{MANIFEST}"))
