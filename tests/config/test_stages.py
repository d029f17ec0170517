"""Files of stages: options of each, what they begin from, and every mistake of every stage at once."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path

import jsonschema
import pytest
from refusals import refused_options

from finetrainers.config.document import json_schema
from finetrainers.config.given import RawOptions
from finetrainers.config.stages import Init, Stage, _stage_lines, read_stages
from finetrainers.utils.failures import Kind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHARED = """\
output_dir = "runs/look"
[model]
pretrained_model_name_or_path = "demo://ltx"
[training]
lr = 1e-5
"""


def read(folder: Path, text: str, **flags: object) -> list[Stage]:
    """The stages of a file with this text; `lr` is in the wrong table unless the text says otherwise."""
    path = folder / "stages.toml"
    path.write_text(text)
    return read_stages(path, RawOptions(dict(flags), {name: f"--{name}" for name in flags}))


def kinds(folder: Path, stage: Stage) -> list[tuple[str, str]]:
    """Return place, without the folder of the file, and kind of the problems of a stage."""
    return [(problem.where.replace(f"{folder}/", ""), problem.kind) for problem in stage.problems]


GOOD = """\
output_dir = "runs/look"
lr = 1e-5
data.max_items = 8
[model]
pretrained_model_name_or_path = "demo://ltx"

[[stage]]
name = "low"
training_type = "full-finetune"
train_steps = 100

[stage.optimizer]
weight_decay = 0.01

[[stage]]
name = "mid"
init = { stage = "low" }
lr = 2e-5

[[stage]]
name = "more"
init = { stage = "mid" }
output_dir = "elsewhere"

[[stage]]
name = "whole"
init = { stage = "more", load = "weights" }
training_type = "full-finetune"

[[stage]]
name = "on"
init = { stage = "whole", load = "state" }
training_type = "full-finetune"
"""


def test_a_stage_has_its_options_over_those_of_all(tmp_path: Path) -> None:
    stages = read(tmp_path, GOOD)
    assert [(stage.name, stage.init) for stage in stages] == [
        ("low", None),
        ("mid", Init("low", "weights")),
        ("more", Init("mid", "lora")),
        ("whole", Init("more", "weights")),
        ("on", Init("whole", "state")),
    ]
    configs = [stage.config for stage in stages]
    assert all(configs)
    assert [stage.problems for stage in stages] == [[]] * 5
    found = [config for config in configs if config is not None]
    assert [config.optimizer.lr for config in found] == [1e-5, 2e-5, 1e-5, 1e-5, 1e-5]
    assert [config.optimizer.weight_decay for config in found] == [0.01, *[1e-4] * 4]
    assert [config.data.max_items for config in found] == [8] * 5
    assert [str(config.run.output_dir) for config in found] == [
        "runs/look/low", "runs/look/mid", "elsewhere", "runs/look/whole", "runs/look/on",
    ]  # fmt: skip
    # Of `more`, whose LoRA `whole` takes as a part of all weights, these are written.
    assert [config.run.export_formats for config in found] == [[], [], ["merged"], [], []]


def test_the_schema_for_editors_knows_stages() -> None:
    schema, document = json_schema(), tomllib.loads(GOOD)
    jsonschema.validate(document, schema)
    for wrong in ({"rnk": 8}, {"name": 1}, {"init": {"stage": "low", "load": "all"}}):
        document["stage"][1] = {**document["stage"][1], **wrong}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document, schema)
        document = tomllib.loads(GOOD)


def test_flags_override_every_stage(tmp_path: Path) -> None:
    stages = read(tmp_path, GOOD, lr="3e-5", output_dir="there")
    found = [(stage.config.optimizer.lr, str(stage.config.run.output_dir)) for stage in stages if stage.config]
    assert found == [(3e-5, f"there/{name}") for name in ("low", "mid", "more", "whole", "on")]


def test_a_stage_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text("lr = 7e-5\nrank = 8\n")
    shared = SHARED.replace("[training]", "[optimizer]")
    text = f'{shared}[[stage]]\nname = "a"\nconfig = "{tmp_path}/one.toml"\nrank = 4\n'
    (stage,) = read(tmp_path, text)
    assert stage.config is not None
    assert (stage.config.optimizer.lr, stage.config.training.rank) == (7e-5, 4)
    (missing,) = read(tmp_path, text.replace("one.toml", "two.toml"))
    assert kinds(tmp_path, missing) == [("--config", "not_found")]
    assert f"{tmp_path}/two.toml" in missing.problems[0].message


WRONG = """\
output_dir = "runs/look"
learning_rat = 1e-5

[model]
pretrained_model_name_or_path = "demo://ltx"

[[stage]]
name = "low"
rank = 0

[[stage]]
init = { stage = "lo" }
[stage.training]
trian_steps = 3

[[stage]]
name = "low"
init = { stage = "low", load = "lroa", from = 1 }
resume_from_checkpoint = "latest"
[stage.dta]
max_items = 3
"""


def test_every_mistake_of_every_stage_is_found(tmp_path: Path) -> None:
    low, unnamed, third = read(tmp_path, WRONG)
    shared = ("stages.toml:2", "unknown")
    assert kinds(tmp_path, low) == [shared, ("stages.toml:9", "invalid")]
    assert kinds(tmp_path, unnamed) == [
        ("stages.toml:11", "required"),
        ("stages.toml:12", "unknown"),
        shared,
        ("stages.toml:14", "unknown"),
    ]
    messages = [problem.message for problem in unnamed.problems]
    assert "stage 2 " in messages[0]
    suggestions = [" 'low'?", " 'lr'?", " 'train_steps'?"]
    for message, suggestion in zip(messages[1:], suggestions, strict=True):
        assert message.endswith(suggestion)
    assert kinds(tmp_path, third) == [
        ("stages.toml:17", "duplicate"),
        ("stages.toml:18", "unknown"),
        ("stages.toml:18", "unknown"),
        ("stages.toml:19", "unsupported"),
        shared,
        ("stages.toml:20", "unknown"),
    ]
    for message, value in zip(
        (problem.message for problem in third.problems),
        ("'low'", "'from'", "'lroa'", "resume_from_checkpoint: ", "'learning_rat'", "[dta]"),
        strict=True,
    ):
        assert value in message
    # The rest of a stage can be checked: rules between its other options are reported together with these.
    assert low.config is not None
    assert low.wrong == {"rank", "lr"}


@pytest.mark.parametrize(
    ("old", "new", "line", "kind", "value"),
    [
        ('name = "mid"', 'name = "a/b"', 16, "invalid", "'a/b'"),
        ('{ stage = "low" }', '"low"', 17, "required", 'init = { stage = "low" }'),
        ('stage = "low"', 'stage = "on"', 17, "unknown", "'on'"),
        ('{ stage = "low" }', '{ stage = "low", load = "lora" }', 17, "conflict", 'load = "weights"'),
        ("lr = 2e-5", 'init_from = "x"', 18, "conflict", "stage low;"),
        ('output_dir = "elsewhere"', 'output_dir = "runs/look/mid"', 23, "duplicate", "runs/look/mid "),
        ('output_dir = "elsewhere"', 'output_dir = "runs/x/../look/mid"', 23, "duplicate", "runs/x/../look/mid "),
    ],
)
def test_refused(tmp_path: Path, old: str, new: str, line: int, kind: str, value: str) -> None:
    assert old in GOOD
    stages = read(tmp_path, GOOD.replace(old, new, 1))
    problem = next(problem for stage in stages for problem in stage.problems)
    assert (problem.where, problem.kind) == (f"{tmp_path}/stages.toml:{line}", kind)
    assert value in problem.message


def test_lines_of_many_stages(tmp_path: Path) -> None:
    """Each stage has its own lines alone, whatever lies between them."""
    text = "a = 1\n" + "".join(f"[[stage]]\nb = {number}\n[x]\n[stage.data]\nc = 1\n" for number in range(2000))
    tracemalloc.start()
    lines = _stage_lines(text)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert lines[1999] == (1 + 1999 * 5, "[[stage]]\nb = 1999\n\n[stage.data]\nc = 1")
    assert lines[None][1].startswith("a = 1\n\n\n[x]\n")


def test_a_link_to_the_directory_of_another_stage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    text = GOOD.replace('"runs/look"', f'"{tmp_path}/runs"').replace('"elsewhere"', f'"{tmp_path}/link/mid"')
    _, _, more, *_ = read(tmp_path, text)
    assert kinds(tmp_path, more) == [("stages.toml:23", "duplicate")]
    assert more.problems[0].message.startswith(f"{tmp_path}/link/mid ")


@pytest.mark.parametrize(("text", "kind"), [(SHARED, "required"), ('[stage]\nname = "a"\n', "invalid")])
def test_without_stages(tmp_path: Path, text: str, kind: Kind) -> None:
    with refused_options((tmp_path / "stages.toml", kind)) as caught:
        read(tmp_path, text)
    assert "[[stage]]" in str(caught.value)


def test_stage_files_and_stages_may_be_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "stages.toml").write_text(
        'output_dir = "runs"\nvalidation_prompts = "more.txt"\n'
        '[[stage]]\nname = "a"\nconfig = "ltx_video/lora"\ndata_root = "clips"\n[[stage]]\nname = "b"\n'
    )
    (tmp_path / "project" / "clips").mkdir()
    (tmp_path / "project" / "more.txt").write_text("a cat\n")
    flags = {"pretrained_model_name_or_path": "demo://ltx"}
    [first, second] = read_stages(Path("project/stages.toml"), RawOptions(flags, dict.fromkeys(flags, "flag")))
    assert first.config is not None
    assert first.config.training.rank == 32
    assert first.config.data.data_root == Path("project/clips")
    assert second.config is not None
    assert second.config.validation.validation_prompts == "project/more.txt"
    assert len(read_stages(Path("examples/stages.toml"), RawOptions())) == 7
