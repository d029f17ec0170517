"""A watch samples each published checkpoint once, as `finetrainers sample` does.

It does so whatever arrives late, vanishes or is killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused_command
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetrainers.cli.main import main
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.rewards.pixels import Brightness
from finetrainers.rundir.best import best_checkpoint
from finetrainers.rundir.manifest import MANIFEST, read_manifest, write_manifest
from finetrainers.sampling.watch import server
from finetrainers.sampling.watch.waiting import training_state

PROMPTS = ("a red ball", "a blue ball on a hill")  # of the run


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
    assert re.search(r"^run: 2 clips .* 9x64x64, 2 ", out, re.MULTILINE)
    assert re.search(r"^step 2: .*pytorch_lora_weights\.safetensors.* SHA-256", out, re.MULTILINE)
    assert "step 1, run: 2 clips, brightness " in out
    assert re.search(r" brightness: step 1 \(run ", out)
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
    for mine, theirs in zip(
        sorted(folder.glob("*step-000002*.mp4")), sorted((trained / "samples" / "sample").glob("*.mp4")), strict=True
    ):
        assert _frames(mine) == _frames(theirs)
    # In the run of the training at the tracker.
    events = EventAccumulator(str(trained / "logs" / "finetrainers"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    assert [(one.step, pytest.approx(one.value)) for one in events.Scalars("watch/run/brightness")] == list(
        zip((1, 2), means, strict=True)
    )
    assert [one.step for one in events.Scalars("loss")] == [1, 2]
    assert [one.step for one in events.Images("watch/run/sheet")] == [1, 2]
    assert sum(tag.startswith("watch/low1s/") for tag in events.Tags()["images"]) == 3
    page = (folder / "index.html").read_text()
    assert [text in page for text in ("step 1", "step 2", ", best", "by brightness", *PROMPTS)] == [True] * 6
    told = [f"{means[step - 1]:.4g}</td>" in page for step in (1, 2)]  # the table of all checkpoints
    assert told == [True, True]
    assert f"brightness {records[0]['scores']['brightness']:.4g}\n" in page  # below the clip
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

    # One watch for each preset, and one that marks the best, wherever it writes.
    parallel = server.join(server_plan(watch))
    with server.exclusive(folder, parallel):
        assert main(watch) == 2
        assert re.search(rf"--presets: .*/watch/run .*\b{os.getpid()}\b", capsys.readouterr().err)
        assert main(["watch", str(trained), "--once", "--presets", "low1s"]) == 0
    with server.exclusive(trained / "watch", parallel):
        elsewhere = ["--output_dir", str(trained.parent / "elsewhere")]
        assert main([*watch, *elsewhere, "--best_by", "contrast"]) == 2
        assert re.search(rf"--best_by: .*/watch .*\b{os.getpid()}\b.* --best_by ", capsys.readouterr().err)

    # The best by another reward: of the ledger, of records of the training, or of any.
    for name in ("contrast", "eval_reward/contrast", "steadiness"):
        assert main(["watch", str(trained), "--once", "--best_by", name, "--no_track"]) == 0
        assert f"by {name.removeprefix('eval_reward/')}" in (folder / "index.html").read_text()
    assert drawn == []
    for name, kind, hint in (
        ("eval_reward/contrasts", "unknown", "'contrast'"),
        ("smoothnes", "unknown", "'smoothness'"),
        ("demo.colr", "unknown", "'color'"),
        ("eval_reward/weighted_sum", "unsupported", "weighted_sum"),
        ("a b", "unknown", "'a b'"),
    ):
        capsys.readouterr()
        assert refused_command(["watch", trained, "--once", "--best_by", name]) == (2, [("--best_by", kind)])
        assert hint in capsys.readouterr().err


def test_prompts_with_and_without_the_trigger_word_are_compared(
    options: Callable[..., dict], run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["ZORK a red ball", "a dog, ZORK", "a red ball", "a cat"]
    root = run(
        **options(train_steps=2, checkpointing_steps=1, validation_inference_steps=2, id_token="ZORK", lr=0.1),
        validation_prompts=":::".join(prompts),
    ).root
    watch = ["watch", str(root), "--once", "--num", "2", "--no_track", "--best_by"]
    assert refused_command([*watch, "brightness/trigger_gap", "--prompts", "ZORK a dog:::a cat"])[1] == [
        ("--best_by", "required")
    ]
    capsys.readouterr()
    assert main([*watch, "brightness/trigger_gap"]) == 0
    folder, gaps = root / "watch" / "run", []
    page, out = (folder / "index.html").read_text(), capsys.readouterr().out
    for step in (1, 2):
        scores = [
            [one["scores"]["brightness"] for one in lines(folder / "scores.jsonl")
             if (one["step"], one["prompt"]) == (step, prompt)]
            for prompt in prompts
        ]  # fmt: skip
        assert [len(of_prompt) for of_prompt in scores] == [2] * 4
        with_word, without_word = sum(scores[0]) / 2, sum(scores[2]) / 2
        gaps.append(with_word - without_word)
        for name, value in (("with", with_word), ("without", without_word)):
            assert f", brightness/{name}_trigger {value:.4g}" in out
            assert f"{value:.4g}</td>" in page
    best = gaps.index(max(gaps)) + 1
    assert best_checkpoint(root) == root / "checkpoints" / f"step-{best}"
    assert f"brightness: {max(gaps):.4g} at step {best}" in page
    assert f"brightness/trigger_gap: step {best} (run {max(gaps):.4g})" in out


def server_plan(watch: list[str]) -> Any:
    from finetrainers.cli.watch import _planned

    return _planned(watch[1:]).config


def _frames(path: Path) -> bytes:
    return server._pixels(path).numpy().tobytes()


@pytest.mark.rotating
def test_what_vanishes_or_fails_costs_that_checkpoint_alone(
    trained: Path, drawn: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [trained / "checkpoints" / f"step-{step}" for step in (1, 2)]
    third = steps[1].with_name("step-3")
    shutil.copytree(steps[1], third)
    facts = {name: value for name, value in read_manifest(third).items() if name not in ("files", "manifest_sha256")}
    (third / MANIFEST).unlink()
    write_manifest(third, facts={**facts, "step": 3})
    load, calls = server.generate_missing, []

    def vanish(plan: Any, *arguments: Any, **more: Any) -> Any:
        calls.append(plan.variants[0].label)
        if len(calls) == 1:
            shutil.rmtree(steps[0])
        if len(calls) == 2:
            raise RuntimeError("no luck")
        return load(plan, *arguments, **more)

    monkeypatch.setattr(server, "generate_missing", vanish)
    arguments = ["watch", str(trained), "--once", "--no_track", "--best_by", "brightness", "--reward", "brightness"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert re.search(r"^step 1 .*removed", out, re.MULTILINE)
    assert re.search(r"^step 2, run: .*: RuntimeError: no luck$", out, re.MULTILINE)
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


@pytest.mark.rotating
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


@pytest.mark.rotating
def test_prompts_that_fail_are_left_out_and_named_once(
    trained: Path, drawn: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is given twice is sampled once, and other prompts later on are sampled, too."""
    encode = LTXVideoSpec.encode_text

    def fail(self: Any, encoders: Any, texts: Sequence[str]) -> Any:
        if "goblin" in texts[0]:
            raise ValueError("no goblins")
        return encode(self, encoders, texts)

    monkeypatch.setattr(LTXVideoSpec, "encode_text", fail)
    watch = ["watch", str(trained), "--once", "--no_track", "--reward", "brightness", "--best_by", "brightness"]
    given = [*watch, "--prompts", "a goblin:::a cat:::a cat"]
    assert main(given) == 1
    out = capsys.readouterr().out
    assert out.count("'a goblin'") == 1
    assert re.search(r"'a goblin' .*: ValueError: no goblins$", out, re.MULTILINE)
    assert "step 1, run: 1 clip, brightness" in out
    assert re.search(r" brightness: step [12] \(run ", out)
    assert len(drawn) == 2
    records = trained / "watch" / "run" / "scores.jsonl"
    assert len(lines(records)) == 2
    assert main(given) == 1
    assert main([*watch, "--prompts", "a cat:::a cat"]) == 0
    assert (len(drawn), len(lines(records))) == (2, 2)  # not again
    capsys.readouterr()
    monkeypatch.setattr(server, "check_weights", None)  # what is done is not looked at
    assert main([*watch, "--prompts", "a cat:::a cat"]) == 0
    assert "step" not in capsys.readouterr().out.replace("denoising steps", "")
    monkeypatch.undo()
    assert main([*watch, "--prompts", "a dog"]) == 0
    assert capsys.readouterr().err == ""
    assert [one["prompt"] for one in lines(records)] == ["a cat", "a cat", "a dog", "a dog"]
    assert "a cat" not in (trained / "watch" / "run" / "index.html").read_text()

    monkeypatch.setattr(LTXVideoSpec, "encode_text", fail)
    assert main([*watch, "--prompts", "a goblin"]) == 1
    assert re.search("error: .*prompt", capsys.readouterr().err)


@pytest.mark.rotating
def test_a_reward_that_fails_is_asked_again_by_the_next_start(
    trained: Path, drawn: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ["watch", str(trained), "--once", "--no_track", "--reward", "brightness", "--best_by", "brightness"]
    with monkeypatch.context() as patch:
        patch.setattr(Brightness, "score", lambda *_, **__: {"score": torch.tensor([float("nan")])})
        assert main(watch) == 0
    assert "step 1, run: 2 clips (" in capsys.readouterr().out
    assert best_checkpoint(trained) is None
    assert main(watch) == 0
    assert "step 1, run: 2 clips, brightness" in capsys.readouterr().out
    assert best_checkpoint(trained) is not None
    assert len(drawn) == 4
    # A device that is not there is not replaced by another one.
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for device, kind in (("cuda:1", "unavailable"), ("gpu", "invalid")):
        assert refused_command([*watch, "--device", device]) == (2, [("--device", kind)])
        assert device in capsys.readouterr().err
    # Weights of rewards that are nowhere are named before anything is loaded, and so they are for training.
    monkeypatch.setattr(server, "join", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    away = ["watch", trained, "--once", "--reward", "clipscore,path=no/such-weights"]
    assert refused_command(away) == (2, [("--reward", "unavailable")])
    err = capsys.readouterr().err
    assert "HF_HUB_OFFLINE" in err
    assert " download no/such-weights`" in err


def test_what_it_waits_for(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A state of the run is told once; where no checkpoint is expected, memory is free."""
    events = trained / "events.jsonl"
    finished = events.read_text()
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": "now"}
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / ".lock").unlink()
    unfinished = "".join(line for line in finished.splitlines(True) if '"finished"' not in line)
    (copy / "events.jsonl").write_text(unfinished)
    copied = training_state(copy, total_steps=9)
    assert (copied.may_go_on, "copy" in copied.sentence, copied.sentence[-13:]) == (True, True, ", step 2 of 9")
    looks: list[bool] = []
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        looks.append(freed.pop() if freed else False)
        if len(pauses) == 2:  # a new start
            events.write_text(unfinished)
        if len(pauses) == 3:
            (trained / ".lock-holder.json").write_text(json.dumps(holder))
        if len(pauses) == 4:
            (trained / ".lock-holder.json").unlink()
            events.write_text(unfinished + json.dumps({"event": "stopped", "step": 2}) + "\n")
            config = trained / "config.toml"  # it was resumed with other steps
            config.write_text(config.read_text().replace("train_steps = 2", "train_steps = 5"))
        if len(pauses) == 5:
            signal.raise_signal(signal.SIGTERM)

    freed: list[bool] = []
    free = server.Sampler.free
    monkeypatch.setattr(server.Sampler, "free", lambda self: (freed.append(True), free(self)))
    monkeypatch.setattr(server.time, "sleep", pause)
    monkeypatch.setattr(server.WatchTracker, "finish", lambda self: print("tracker finished"))
    assert main(["watch", str(trained), "--poll_seconds", "7"]) == 128 + signal.SIGTERM
    out, err = capsys.readouterr()
    waits = [line for line in out.splitlines() if line.startswith("waiting")]
    states = ("has finished", "did not finish", "is training", "was stopped")
    assert [[state for state in states if f"{state}" in line] for line in waits] == [[s] for s in states]
    assert [line.partition("step ")[2][:6] for line in waits] == ["2 of 2"] * 3 + ["2 of 5"]
    assert all(" 7 s" in line for line in waits)
    assert pauses == [7] * 5
    assert looks == [True, True, True, False, True]
    assert "tracker finished" in out
    assert err.splitlines()[-1].startswith("stopped; ")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
