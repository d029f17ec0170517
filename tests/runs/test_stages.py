"""How far stages are, what they are started with, and what has changed since, by what their runs have left."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetrainers.config.errors import ConfigError
from finetrainers.config.given import RawOptions
from finetrainers.config.stages import Stage, read_stages
from finetrainers.plan.lineage import ancestors, began_from, find_lineage
from finetrainers.rundir.identity import IDENTITY, take_identity
from finetrainers.runs.stages import (
    StageStatus,
    changed_stages,
    incompatibilities,
    look_at,
    missing_before,
    resume_flags,
    set_aside,
    start_flags,
    used_elsewhere,
)
from finetrainers.runs.stages_plan import plan_stages
from finetrainers.utils.text import listed

TEXT = """
output_dir = "runs"
pretrained_model_name_or_path = "demo://ltx"
rank = 8
[[stage]]
name = "low"
training_type = "full-finetune"
lr = 1e-5
[[stage]]
name = "mid"
init = { stage = "low" }
[[stage]]
name = "more"
init = { stage = "mid" }
[[stage]]
name = "whole"
init = { stage = "more", load = "weights" }
training_type = "full-finetune"
[[stage]]
name = "on"
init = { stage = "whole", load = "state" }
training_type = "full-finetune"
"""
PARTS = {"low": "transformer", "mid": "", "more": "", "whole": "transformer", "on": "transformer"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stages(text: str = TEXT) -> list[Stage]:
    Path("stages.toml").write_text(text)
    return read_stages(Path("stages.toml"), RawOptions())


def standing(name: str, text: str = TEXT, **more: str) -> StageStatus:
    return next(one for one in look_at(stages(text), **more) if one.name == name)


def write_weights(folder: Path, content: str, *, lora: bool = False) -> None:
    """Files that look like weights: a header of safetensors without tensors, and its metadata."""
    name = "x.lora_A.weight" if lora else "x"
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "__metadata__": {"c": content}})
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ("pytorch_lora_weights.safetensors" if lora else "diffusion_pytorch_model.safetensors")
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    if not lora:
        (folder / "config.json").write_text("{}")


def finish(names: Sequence[str], content: str = "1") -> None:
    """Leave what finished runs leave of these stages."""
    for name in names:
        one = standing(name)
        start_flags(one)
        write_weights(one.root / PARTS[name], content, lora=not PARTS[name])
        if name == "more":
            write_weights(one.root / "export" / "merged" / "transformer", content)
        events = [{"event": "start", "step": 0}]
        if one.source is not None:
            place = one.config.training.init_from or one.source.root
            weights = Path(place) / ("" if one.load == "lora" else "transformer")
            lora = next(iter(weights.glob("*.safetensors")))
            from finetrainers.plan.lineage import read_origin

            events.append({"event": "began_from", **read_origin(lora if one.load == "lora" else weights)})
        events.append({"event": "finished", "step": 3})
        (one.root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_what_stages_are_started_with() -> None:
    at_first = look_at(stages())
    assert [one.is_promised for one in at_first] == [False, True, True, True, True]
    assert not any(one.is_done for one in at_first)
    finish(PARTS)
    found = look_at(stages())
    assert all(one.is_done and not one.is_promised for one in found)
    started = [(one.config.training.init_from, one.config.model.transformer_id) for one in found]
    assert started == [
        (None, None),
        ("runs/low", None),
        ("runs/mid", "runs/low/transformer"),  # the base of the LoRA is that of the stage before
        ("runs/more/export/merged", None),
        (None, "runs/more/export/merged/transformer"),
    ]
    assert all(resume_flags(one) == {"--resume_from_checkpoint": "auto"} for one in found)
    assert [Path(event["run"]).name for event in ancestors(Path("runs/whole"))] == ["more", "mid", "low"]
    assert changed_stages(found) == []


def test_options_that_have_changed_since() -> None:
    finish(PARTS)
    text = TEXT.replace("lr = 1e-5", "lr = 2e-5\nvalidation_steps = 7\ndataloader_num_workers = 3\nblocks_to_swap = 4")
    text = text.replace("rank = 8", "rank = 8\noverlap_gradient_exchange = false")
    (problem,) = changed_stages(look_at(stages(text)))
    assert (problem.where, problem.kind) == ("stage low", "mismatch")
    for values in ("lr 1e-05 -> 2e-05;", listed(["mid", "more", "whole", "on"]), "--from low,", "--keep_finished,"):
        assert values in problem.message
    assert problem.message.count("->") == 1
    again = look_at(stages(text), again_from="low")
    assert changed_stages(again) == []
    assert not any(one.is_done for one in again)


def test_weights_that_are_others_now() -> None:
    finish(PARTS)
    finish(["mid"], "2")
    (problem,) = changed_stages(look_at(stages()))
    assert (problem.where, problem.kind) == ("stage more", "mismatch")
    assert re.search("from mid, .* changed .*; whole and on ", problem.message)
    (Path("runs/low") / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    (Path("runs/low") / "transformer" / "config.json").unlink()
    (Path("runs/low") / "transformer").rmdir()
    problem = changed_stages(look_at(stages()))[0]
    assert problem.where == "stage mid"
    assert re.search("from low, .* finished", problem.message)


def test_weights_that_are_alike_of_another_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight files are told apart by their ends, which may be the same."""
    seals = dict.fromkeys((Path(f"runs/{name}/checkpoints/step-3").resolve() for name in PARTS), "a")
    monkeypatch.setattr("finetrainers.plan.lineage.seal_of", seals.get)
    finish(PARTS)
    assert changed_stages(look_at(stages())) == []
    seals[Path("runs/low/checkpoints/step-3").resolve()] = "b"
    (problem,) = changed_stages(look_at(stages()))
    assert (problem.where, problem.kind) == ("stage mid", "mismatch")
    assert re.search("from low, .* changed ", problem.message)


def test_a_whole_training_state_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the newest whole checkpoint of the stage before; later the stage resumes from its own."""
    finish(list(PARTS)[:-1])
    saved = [
        SimpleNamespace(path=Path(f"runs/whole/step-{n}"), step=n, damage="cut off" if n == 3 else None)
        for n in (1, 2, 3)
    ]
    monkeypatch.setattr("finetrainers.runs.stages.scan_checkpoints", lambda root: saved if root.name == "whole" else [])
    one = standing("on")
    assert (one.load, one.step) == ("state", 0)
    assert resume_flags(one) == {"--resume_from_checkpoint": "runs/whole/step-2", "--reset": "step"}
    assert resume_flags(replace(one, step=1)) == {"--resume_from_checkpoint": "auto"}


def test_a_lora_begins_from_another_one_of_the_same_base() -> None:
    """A stage that itself begins from a LoRA of the user's trained no weights below it."""
    write_weights(Path("mine"), "1", lora=True)
    text = TEXT.replace('name = "mid"\ninit = { stage = "low" }', 'name = "mid"\ninit_from = "mine"')
    one = standing("more", text)
    assert (one.load, one.config.model.transformer_id) == ("lora", None)


def test_a_stage_that_another_process_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    finish(["low"])
    monkeypatch.setattr("finetrainers.runs.stages.in_use", lambda root: root.name in ("low", "mid"))
    (problem,) = used_elsewhere(look_at(stages()))
    assert (problem.where, problem.kind) == ("stage mid", "occupied")
    assert "runs/mid " in problem.message


def test_what_a_run_says_that_it_began_from(tmp_path: Path) -> None:
    """Its own checkpoints are no origin, and a new run in its directory has its own."""
    root, other = tmp_path / "run", tmp_path / "other"
    own = root / "checkpoints" / "step-3"
    assert find_lineage(root, checkpoint=own, initial=None) is None
    found = find_lineage(other, checkpoint=own, initial=None)
    assert found is not None
    assert (found["load"], found["path"]) == ("state", str(own))
    root.mkdir()
    events = [{"event": "start", "step": 0}, {"event": "began_from", "run": "x"}, {"event": "start", "step": 2}]
    for more, origin in (([], "x"), ([{"event": "start", "step": 0}], None)):
        (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*events, *more]))
        assert (began_from(root) or {}).get("run") == origin


def test_training_again_from_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        saved = [SimpleNamespace(step=3, damage=None)]
        patch.setattr("finetrainers.runs.stages.scan_checkpoints", lambda root: saved)
        assert [one.step for one in look_at(stages(), again_from="mid")] == [3, 0, 0, 0, 0]
    finish(["low"])
    assert missing_before(look_at(stages(), again_from="mid"), "mid") == []
    problem = missing_before(look_at(stages(), again_from="more"), "more")[0]
    assert (problem.where, problem.kind) == ("--from", "required")
    assert "--from mid" in problem.message
    finish(["mid"])
    ((was, now),) = set_aside(look_at(stages(), again_from="mid"))
    assert (was, now.name.endswith("-mid"), now.is_dir(), was.exists()) == (Path("runs/mid"), True, True, False)
    assert [one.is_done for one in look_at(stages())] == [True, False, False, False, False]
    assert began_from(now) is not None


@pytest.mark.parametrize(
    ("name", "change", "load", "patterns"),
    [
        ("more", 'name = "more"\nrank = 4', "lora", ["rank: 8 .*, 4 "]),
        ("more", 'name = "more"\nmodel_name = "cogvideox"', "lora", [".* auto, .* cogvideox$"]),
        ("on", 'name = "on"\nuse_ema = true', "state", ["use_ema: False .*, True "]),
        ("on", 'name = "on"\ntarget_fps = 8', "state", []),
        ("whole", 'name = "whole"\nuse_ema = true', "weights", []),
    ],
)
def test_a_stage_must_fit_the_one_that_it_begins_from(name: str, change: str, load: str, patterns: list[str]) -> None:
    one = standing(name, TEXT.replace(f'name = "{name}"', change))
    assert one.source is not None
    assert one.load == load
    reasons = incompatibilities(one.source.config, one.config, one.load)
    assert len(reasons) == len(patterns)
    assert all(map(re.match, patterns, reasons))


def test_a_stage_that_began_from_another_run_of_the_same_weights_is_outdated() -> None:
    take_identity(standing("low").root)
    finish(PARTS)
    assert changed_stages(look_at(stages())) == []
    (standing("low").root / IDENTITY).unlink()
    assert changed_stages(look_at(stages())) == []  # of a run of before that is not known
    take_identity(standing("low").root)
    (problem,) = changed_stages(look_at(stages()))
    assert problem.where == "stage mid"


def test_a_stage_in_what_another_one_writes_is_refused() -> None:
    Path("link").symlink_to("runs/low")
    for place, is_refused in {"runs/low/checkpoints/b": True, "link/transformer/b": True, "runs/low/b": False}.items():
        with pytest.raises(ConfigError) as refused:
            plan_stages(stages(TEXT + f'output_dir = "{place}"\n'))
        found = [one for one in refused.value.problems if one.where == "stage on, --output_dir"]
        assert any(problem.kind == "occupied" for problem in found) == is_refused, refused.value
