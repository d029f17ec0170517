"""Parts of a run that are begun anew on purpose, each against a run that shows what it must have become."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from refusals import refused_options
from safetensors.torch import load_file, save_file

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.given import RawOptions
from finetrainers.config.load import load_config
from finetrainers.config.root import critical_options
from finetrainers.config.sample import SampleSection
from finetrainers.methods.sft import SFT
from finetrainers.plan.preflight import preflight
from finetrainers.plan.resume_plan import changed_options, changes
from finetrainers.rundir.manifest import write_manifest
from finetrainers.sampling.plan import plan_samples
from finetrainers.training.checkpoints.restore import check_restorable
from finetrainers.utils.failures import Kind

EMA = "ema.safetensors"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, int], ...]]:
    """The samples of every micro-batch that is trained on."""
    found: list[tuple[tuple[int, int], ...]] = []
    loss = SFT.loss

    def record(self: SFT, transformer: Any, batch: Any) -> Any:
        found.append(tuple(batch.sample_keys))
        return loss(self, transformer, batch)

    monkeypatch.setattr(SFT, "loss", record)
    return found


@pytest.fixture
def halfway(options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`halfway(**changes)`: the options with which a run of 4 steps goes on from its second one."""

    def build(**changes: Any) -> dict[str, Any]:
        values = options(
            clips=3,
            train_steps=4,
            lr_scheduler="linear",
            lr_warmup_steps=0,
            use_ema=True,
            checkpointing_steps=2,
            **changes,
        )
        run(**{**values, "output_dir": str(tmp_path / "first")})
        checkpoint = str(tmp_path / "first" / "checkpoints" / "step-2")
        return {**values, "resume_from_checkpoint": checkpoint, "output_dir": str(tmp_path / "second")}

    return build


def rows(text: str) -> dict[str, str]:
    """The printed table: part -> its source."""
    lines = text.split("source of each component:\n", 1)[1].splitlines()
    return {line[:26].strip(): line[26:] for line in takewhile(lambda line: line.startswith("  "), lines)}


@pytest.mark.rotating
def test_each_part_by_itself(
    halfway: Callable[..., dict],
    run: Callable[..., Any],
    seen: list,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = halfway()
    straight = list(seen)
    old = tmp_path / "first" / "checkpoints" / "step-2"
    lr = [record["lr"] for record in map(json.loads, (tmp_path / "first" / "metrics.jsonl").read_text().splitlines())]
    weights = load_file(old / "pytorch_lora_weights.safetensors")

    def again(*resets: str, **changes: Any) -> tuple[Any, list, dict[str, str]]:
        seen.clear()
        capsys.readouterr()
        name = "-".join(resets) or "none"
        done = run(**{**values, "output_dir": str(tmp_path / name), "reset": list(resets), **changes})
        return done, list(seen), rows(capsys.readouterr().out)

    plain, order, printed = again()
    assert order == straight[2:]
    resumed = ("optimizer", "learning rate schedule", "data", "moving average", "step")
    assert printed == {**dict.fromkeys(resumed, "step 2"), "weights": f"step 2 of {old}", "noise": "seed 42"}
    curve = plain.curve("loss", "lr")
    assert [entry[2] for entry in curve] == lr[2:]

    # The first loss comes from the weights, which no reset touches; what differs after it is the reset's doing.
    done, order, printed = again("data", lr=0.0)
    assert order == straight[:2]
    assert printed["data"].startswith("from ")
    assert "lr 0.01 -> 0.0" in printed["changed options"]

    done, order, printed = again("optimizer", optimizer="adamw")
    assert order == straight[2:]
    assert done.curve("loss")[0] == plain.curve("loss")[0]
    assert done.curve("loss")[1] != plain.curve("loss")[1]
    steps = torch.load(done.root / "checkpoints" / "step-4" / "optimizer.pt", weights_only=True)["state"][0]["step"]
    assert steps == 2
    assert printed["optimizer"].startswith("new, ")

    done, order, printed = again("scheduler")
    assert [entry[1] for entry in done.curve("lr")] == pytest.approx([1e-2, 5e-3])  # of a run of two steps
    assert order == straight[2:]
    later = run(**{**values, "train_steps": 6, "output_dir": str(done.root), "resume_from_checkpoint": "latest"})
    assert later.curve("lr")[-1][1] == pytest.approx(1e-2 / 4)  # still counted from step 2

    done, order, printed = again("rng", seed=7)
    assert order == straight[2:]  # the epoch that has begun keeps its order
    assert done.curve("loss")[0] != plain.curve("loss")[0]
    assert printed["noise"].startswith("seed 7, ")

    done, order, printed = again("ema", lr=0.0, weight_decay=0.0)
    average = load_file(done.root / "checkpoints" / "step-4" / EMA)
    assert all(torch.equal(average[name.replace("transformer.", "").replace(".weight", ".default.weight")], tensor)
               for name, tensor in weights.items())  # fmt: skip
    assert printed["moving average"].startswith("from ")
    done, order, printed = again("ema", use_ema=False, output_dir=str(tmp_path / "let go"))
    assert printed["moving average"] == "let go"
    assert not (done.root / "checkpoints" / "step-4" / EMA).exists()

    done, order, printed = again("step")
    assert [record["step"] for record in done.metrics] == [1, 2, 3, 4]
    assert [entry[1] for entry in done.curve("lr")] == lr
    assert order == straight
    assert printed["step"] == "from 0"
    assert printed["optimizer"] == "step 2"
    steps = torch.load(done.root / "checkpoints" / "step-4" / "optimizer.pt", weights_only=True)["state"][0]["step"]
    assert steps == 6


def test_other_data_begins_at_its_beginning_and_is_continued_from_there(
    options: Callable[..., dict], run: Callable[..., Any], seen: list, tmp_path: Path
) -> None:
    """Epochs count from the reset; a later resume, in other batches, goes on with what the epoch has left."""
    first = options(clips=2, train_steps=3)
    run(**first)
    seen.clear()
    values = {**options(clips=5), "train_steps": None, "checkpointing_steps": 1}
    values = {name: value for name, value in values.items() if value is not None}
    run(**values, resume_from_checkpoint="latest", reset=["data"], train_epochs=1)
    assert sorted(item for keys in seen for _, item in keys) == [0, 1, 2, 3, 4]
    order = [key for keys in seen for key in keys]
    seen.clear()
    done = run(**values, resume_from_checkpoint="5", batch_size=2, gradient_accumulation_steps=1, train_epochs=1)
    assert [key for keys in seen for key in keys] == order[2:]
    assert [len(keys) for keys in seen] == [2, 1]
    assert done.state.step == 7


def test_what_a_reset_allows_and_what_has_no_effect(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    run(**options(clips=2, train_steps=2))

    def refusal(**changes: Any) -> Problem:
        with pytest.raises(ConfigError) as caught:
            preflight(load_config(**options(clips=changes.pop("clips", 2), **changes)))
        [problem] = caught.value.problems
        return problem

    def refused_reset(kind: Kind, *values: object, **changes: Any) -> str:
        problem = refusal(resume_from_checkpoint="latest", **changes)
        assert (problem.where, problem.kind) == ("--resume_from_checkpoint", kind)
        assert all(str(value) in problem.message for value in values)
        return problem.message

    assert str(refusal(reset=["data"], output_dir=str(tmp_path / "n"))).startswith("--reset: data: ")
    assert refusal(resume_from_checkpoint="auto", reset=["data"]).where == "--reset"
    refused_reset("conflict", "--reset rng ", " 42,", reset=["rng"])
    refused_reset("conflict", "--reset ema ", reset=["ema"])
    refused_reset("occupied", "--reset step ", tmp_path / "run", reset=["step"])
    other: dict[str, Any] = {"clips": 3, "seed": 3, "use_ema": True, "optimizer": "lion"}
    message = refused_reset("mismatch", "--reset data ema optimizer rng ", **other, reset=["data", "rng"])
    assert "seed" not in message
    latest = {"resume_from_checkpoint": "latest"}
    resets = ["data", "rng", "ema", "optimizer", "scheduler"]
    checked = preflight(load_config(**options(**latest, **other, reset=resets)))
    assert any(re.search("--reset scheduler .*--lr_scheduler constant", text) for text in checked.warnings)
    checked = preflight(load_config(**options(**latest, clips=2, train_steps=2)))
    assert any(re.search("step 2, .*--train_steps is 2", text) for text in checked.warnings)


def test_more_steps_raise_the_rate_of_a_schedule_and_that_is_told(halfway: Callable[..., dict]) -> None:
    values = halfway()

    def warnings(**changes: Any) -> str:
        return "\n".join(preflight(load_config(**{**values, **changes})).start.warnings)

    assert "--train_steps" not in warnings()
    assert f"is {0.95 * values['lr']:.3g} instead of {0.5 * values['lr']:.3g}" in warnings(train_steps=40)
    assert "--train_steps" not in warnings(train_steps=40, reset=["scheduler"])


def test_other_packages_and_other_batches_are_told(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = options(clips=3, train_steps=1, batch_size=2, gradient_accumulation_steps=3)
    run(**values)
    more = {**values, "train_steps": 2, "resume_from_checkpoint": "latest"}

    def warnings(world: int, **changes: Any) -> str:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        return "\n".join(preflight(load_config(**{**more, **changes})).start.warnings)

    assert warnings(1) == ""
    assert warnings(3, gradient_accumulation_steps=1) == ""  # as many clips as before
    said = warnings(2)
    assert re.search(r"\b6 clips .* 12 ", said)
    assert "--batch_size 1 --gradient_accumulation_steps 3" in said
    assert "--batch_size 2 --gradient_accumulation_steps 1" in warnings(3)
    assert re.search(r"\b6 clips .* 4 processes", warnings(4))
    monkeypatch.setattr("finetrainers.plan.resume_plan.package_versions", lambda: {"torch": "9.9", "new": "1"})
    assert re.search(r": torch 2\..* then, 9\.9 now", warnings(1))


def test_another_engines_optimizer_is_refused_and_ranks_must_agree(
    options: Callable[..., dict], run: Callable[..., Any]
) -> None:
    """What depends on the launcher is looked at before anything is loaded."""
    done = run(**options(train_steps=1))
    directory = done.root / "checkpoints" / "step-1"
    state = json.loads((directory / "state.json").read_text())
    assert state["engine"].startswith("DDP, ")
    (directory / "state.json").write_text(json.dumps({**state, "engine": "DeepSpeed ZeRO-2 (processes: 4)"}))
    (directory / "manifest.json").unlink()
    write_manifest(directory, facts={})
    more = {**options(train_steps=2), "resume_from_checkpoint": "latest"}
    with refused_options(("--resume_from_checkpoint", "mismatch")) as caught:
        run(**more)
    assert re.search(r"ZeRO-2 \(processes: 4\).* DDP.*--reset optimizer", str(caught.value))
    assert run(**more, reset=["optimizer"]).state.step == 2
    events = [event for event in done.events if event["event"] == "origin"]
    assert [(event["step"], event["optimizer"][:3]) for event in events] == [(1, "new")]

    start = preflight(load_config(**more)).start
    other = SimpleNamespace(rank=1, broadcast_object=lambda value: "elsewhere", raise_if_any_failed=raise_error)
    with pytest.raises(RuntimeError, match=r"rank 1 .* rank 0 .*elsewhere"):
        check_restorable(start, other)


def raise_error(error: Exception | None, what: str) -> None:
    if error is not None:
        raise error


def test_encoders_that_have_changed_are_named(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """Latents and texts of another VAE and other encoders are other data, which `--reset data` allows."""
    values = options(train_steps=2, checkpointing_steps=1)
    model = tmp_path / "model"
    shutil.copytree(values["pretrained_model_name_or_path"], model)
    values |= {"pretrained_model_name_or_path": str(model), "resume_from_checkpoint": "1"}
    run(**{**values, "resume_from_checkpoint": None})

    def change(part: str, name: str) -> None:
        tensors = load_file(model / part / name)
        save_file(
            {key: tensor * 1.01 for key, tensor in tensors.items()}, model / part / name, metadata={"format": "pt"}
        )

    preflight(load_config(**values))
    (weights,) = (path.name for path in (model / "vae").glob("*.safetensors"))
    change("vae", weights)
    with refused_options(("--resume_from_checkpoint", "mismatch")) as refusal:
        preflight(load_config(**values))
    assert re.search(r"vae: .*--vae_id\) \(--reset data\)", str(refusal.value))
    assert "text_encoders" not in str(refusal.value)
    settings = json.loads((model / "text_encoder" / "config.json").read_text())
    (model / "text_encoder" / "config.json").write_text(json.dumps({**settings, "layer_norm_epsilon": 1e-3}))
    with refused_options(("--resume_from_checkpoint", "mismatch")) as refusal:
        preflight(load_config(**values))
    assert re.search(r"text_encoders: .*--tokenizer_id\)", str(refusal.value))
    preflight(load_config(**values, reset=["data"]))
    # A checkpoint that is older than the fact, and a model that is moved.
    state_file = tmp_path / "run" / "checkpoints" / "step-1" / "state.json"
    state = json.loads(state_file.read_text())
    state["critical"] = {k: v for k, v in state["critical"].items() if k not in ("vae", "text_encoders")}
    state_file.write_text(json.dumps(state))
    (state_file.parent / "manifest.json").unlink()
    write_manifest(state_file.parent, facts={})
    model.rename(tmp_path / "moved")
    preflight(load_config(**{**values, "pretrained_model_name_or_path": str(tmp_path / "moved")}))


def test_a_checkpoint_may_have_options_by_their_former_names():
    plan = SimpleNamespace(critical_options=critical_options("data"))
    saved = {"framepack_window_size": 9, "bucket_keep": []}
    assert changes(saved, {"sliding_window_size": 9, "bucket_keep_prob": []}, plan=plan) == []
    [change] = changes(saved, {"sliding_window_size": 5, "bucket_keep_prob": []}, plan=plan)
    assert (change.text, change.reset) == ("sliding_window_size: 9 then, 5 now", "data")
    config = load_config(pretrained_model_name_or_path="repo", sliding_window_size=9, max_pixels=7)
    assert changed_options({**saved, "max_pixels": 8, "batch_size": 2}, config) == ["max_pixels 8 -> 7"]


@pytest.mark.parametrize(
    ("version", "part"), [("i2v", "image_encoder"), ("i2v", "image_processor"), ("a14b", "transformer_2")]
)
def test_other_frozen_parts_are_named(version: str, part: str, options: Callable[..., dict], tmp_path: Path) -> None:
    """An image encoder, its processor and the other expert: for runs that continue, and for clips that are sampled."""
    values = options("wan", version=version)
    model, image = tmp_path / "model", tmp_path / "image.png"
    shutil.copytree(values["pretrained_model_name_or_path"], model)
    values["pretrained_model_name_or_path"] = str(model)
    Image.new("RGB", (64, 64)).save(image)
    flags = {"expert": "high"} if version == "a14b" else {}
    section = SampleSection(prompts="a ball", size="9x64x64", image=None if flags else str(image))

    def preflighted() -> tuple[Any, set[str]]:
        samples = plan_samples([str(model)], section, RawOptions(dict(flags))).samples()
        return preflight(load_config(**values)), {sample.key for sample in samples}

    before, keys = preflighted()
    if part == "image_processor":
        [file] = (model / part).glob("*.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), "image_mean": [0.1, 0.2, 0.3]}))
    else:
        [file] = (model / part).glob("*.safetensors")
        tensors = load_file(file)
        save_file({key: tensor * 1.01 for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    after, other_keys = preflighted()
    then, now = before.start.critical, after.start.critical
    assert [(one.name, one.reset) for one in changes(then, now, plan=after.plan)] == [("other_parts", "data")]
    assert keys.isdisjoint(other_keys)
    older = {name: value for name, value in then.items() if name != "other_parts"}
    assert changes(older, now, plan=after.plan) == []
