"""Loading options from flags, files and Python: precedence, errors with places, round trips."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from refusals import refused_options

from finetrainers.config.document import configuration_page, json_schema, options_module
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.flags import parse_flags
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.root import changed_options, fields

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
BASE = {"model_name": "ltx_video", "pretrained_model_name_or_path": "repo", "data_root": "clips"}
FLAGS = ["--model_name", "ltx_video", "--pretrained_model_name_or_path", "repo", "--data_root", "clips"]


def test_precedence_is_defaults_file_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'rank = 8\nlr = 3e-4\n[model]\nmodel_name = "ltx_video"\npretrained_model_name_or_path = "repo"\n'
        '[data]\ndata_root = "clips"\n'
    )
    config, _ = parse_flags(["--config", str(file), "--rank", "4"])
    assert (config.training.rank, config.optimizer.lr, config.training.lora_alpha) == (4, 3e-4, 64)


def test_a_configuration_or_a_dictionary_is_a_source_like_a_file():
    config = load_config(
        {"model": {"pretrained_model_name_or_path": "repo"}, "data_root": Path("clips")}, method="grpo", lr=3e-4,
        transformer_id=Path("dit"), vae_dtype=torch.float16, profile_steps="3:5",
        reward=[{"name": "videoalign.vq", "options": {"path": Path("a"), "device": torch.device("cuda:1"), "n": 2}}],
    )  # fmt: skip
    assert (config.model.transformer_id, config.model.vae_dtype) == ("dit", "fp16")
    assert config.grpo.reward[0].options == {"path": "a", "device": "cuda:1", "n": "2"}
    run = config.with_chosen({"rank": 8, "train_steps": 70}, "family")  # as that of a result
    changed = load_config(run, rank=16)
    assert (changed.training.rank, changed.training.train_steps, dict(changed.chosen)) == (
        16, 70, {"train_steps": "family"},
    )  # fmt: skip
    assert load_config(config) == config
    assert load_config(run).chosen == run.chosen
    assert not load_config(config).is_given("rank")
    with refused_options(("rnk", "unknown"), ("lr", "invalid")):
        load_config(config, rnk=8, lr="much")


@pytest.mark.parametrize("text", ["{} = {{image_head = 0.2, last = 0.1}}", "[{}]\nimage_head = 0.2\nlast = 0.1"])
@pytest.mark.parametrize("name", ["frame_conditioning", "mask_ratios", "frame-conditioning"])
def test_options_with_tables_as_values_may_stand_at_the_top(name, text, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text.format(name))
    values = {"image_head": 0.2, "last": 0.1}
    for config in (load_config(file, **BASE), load_config(BASE, **{name: values}), load_config({**BASE, name: values})):
        assert config.plain()["frame_conditioning"] == "first=0.2,last=0.1"
    with refused_options(("rank", "invalid"), ("lora", "unknown"), ("other", "unknown")):
        load_config(BASE, rank={"a": 1}, lora={"rank": 1}, other={"rank": 1})


@pytest.mark.parametrize(
    "name", ["ltx_video/grpo_lora", "ltx_video/grpo_lora.toml", "examples/ltx_video/grpo_lora.toml"]
)
def test_recipes_are_found_by_name_if_no_file_has_it(name, tmp_path, monkeypatch):
    """So are the files that a recipe names."""
    monkeypatch.chdir(ROOT)
    expected = load_config("examples/ltx_video/grpo_lora.toml")
    monkeypatch.chdir(tmp_path)
    config, _ = parse_flags([name, "--rank", "4"])
    assert config.training.rank == 4
    assert config.optimizer == expected.optimizer
    assert (config.grpo.prompts, config.validation.eval_prompts) == (
        ROOT / "examples" / "prompts.txt", ROOT / "examples" / "held_out_prompts.txt",
    )  # fmt: skip
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text('pretrained_model_name_or_path = "mine"\ndata_root = "clips"\n')
    assert load_config(name).model.pretrained_model_name_or_path == "mine"


@pytest.mark.parametrize(
    ("name", "suggested"), [("ltx_video/lorra", "'ltx_video/lora'"), ("zzz", "cogvideox/full_2b, ")]
)
def test_names_of_recipes_are_suggested(name, suggested, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused_options(("--config", "invalid")) as error:
        load_config(tmp_path)
    assert f"finetrainers init {tmp_path}" in str(error.value)
    with refused_options(("--config", "not_found")) as error:
        parse_flags(["--config", name])
    assert suggested in str(error.value)


def test_data_and_prompts_are_found_beside_the_file_that_names_them(tmp_path, monkeypatch):
    """Those in the working directory win, and a prompt is not a file."""
    project = tmp_path / "project"
    project.mkdir()
    text = '[model]\npretrained_model_name_or_path = "repo"\n[data]\ndata_root = "clips"\ndataset_file = "clips.csv"\n'
    (project / "run.toml").write_text(f'{text}[validation]\nvalidation_prompts = "{"a cat " * 100}"\n')
    (project / "clips").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config("../project/run.toml")
    assert config.data.data_root == Path("../project/clips")
    assert config.data.dataset_file == Path("clips.csv")  # which is nowhere
    assert config.validation.validation_prompts == "a cat " * 100
    Path("clips").mkdir()
    assert load_config("../project/run.toml").data.data_root == Path("clips")


def test_lists_are_space_separated_and_switches_can_be_switched_off(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("pin_memory = true\n")
    config, _ = parse_flags(
        [*FLAGS, "--config", str(file), "--video_resolution_buckets", "17x64x96", "49x512x768", "--no-pin_memory"]
    )
    assert config.data.video_resolution_buckets == [(17, 64, 96), (49, 512, 768)]
    assert config.dataloader.pin_memory is False


def test_the_deepspeed_launcher_may_add_its_own_flag():
    """`deepspeed --num_gpus=1 train.py --deepspeed --config FILE` passes the rank, and sets it in the environment."""
    config, _ = parse_flags([*FLAGS, "--local_rank=0", "--deepspeed", "--zero_stage", "3"])
    assert (config.parallel.deepspeed, config.parallel.zero_stage) == (True, 3)


def test_negative_numbers_are_values():
    config, _ = parse_flags([*FLAGS, "--flow_logit_mean", "-0.5", "--flow_weighting_scheme", "logit_normal"])
    assert config.diffusion.flow_logit_mean == -0.5


def test_unknown_flags_and_bad_values_are_reported_together_with_the_nearest_name():
    with refused_options(
        ("--batch_siz", "unknown"), ("--rank", "invalid"), ("--optimizer", "unknown"), ("--lr", "invalid")
    ) as error:
        parse_flags([*FLAGS, "--batch_siz", "3", "--rank", "0", "--optimizer", "adamx", "--lr", "abc"])
    messages = {problem.where: problem.message for problem in error.value.problems}
    assert messages["--batch_siz"].endswith(" --batch_size?")
    assert messages["--rank"].endswith(" 1, got '0'")
    assert " 'adam'?" in messages["--optimizer"]
    assert "'abc'" in messages["--lr"]


def test_file_errors_name_the_line_and_the_nearest_key(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("# a run\n[training]\nrnk = 8\n\n[data]\nlr = 1e-4\n[optimiser]\nx = 1\n")
    with refused_options(
        (f"{file}:3", "unknown"), (f"{file}:6", "invalid"), (f"{file}:7", "unknown"), ("--seed", "invalid")
    ) as error:
        parse_flags([*FLAGS, "--config", str(file), "--seed", "-1"])
    messages = {problem.where: problem.message for problem in error.value.problems}
    assert messages[f"{file}:3"].endswith(" 'rank'?")
    assert "'lr' belongs in [optimizer]," in messages[f"{file}:6"]
    assert messages[f"{file}:7"].endswith(" 'optimizer'?")


def test_value_errors_from_a_file_name_its_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('\nvideo_resolution_buckets = ["49x512"]\n')
    with refused_options((f"{file}:2", "invalid")) as error:
        parse_flags([*FLAGS, "--config", str(file)])
    assert "FRAMESxHEIGHTxWIDTH" in str(error.value)


def test_an_incomplete_value_is_not_taken_for_a_missing_one():
    with refused_options(("video_resolution_buckets", "invalid")) as error:
        load_config(**BASE, video_resolution_buckets=[(9, 32)])
    assert "[9, 32]" in str(error.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rank = 4\n[data.mask_ratios]\nrandom = 0.5\n", 2),
        ("rank = 4\n[data]\nmask_ratios.random = 0.5\n", 3),
        ("rank = 4\ndata.mask_ratios = {random = 0.5}\n", 2),
        ("rank = 4\n[data]\nmax_items = 1\n'mask_ratios' = {random = 0.5}\n", 4),
    ],
)
def test_a_note_names_the_line_of_a_table_or_dotted_key(tmp_path, caplog, text, line):
    file = tmp_path / "run.toml"
    file.write_text(text)
    parse_flags([*FLAGS, "--config", str(file)])
    assert f"mask_ratios ({file}:{line})" in caplog.text


def test_broken_toml_and_missing_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("rank = \n")
    with refused_options((file, "unreadable")) as error:
        load_config(file)
    assert "line 1, column" in str(error.value)
    with refused_options(("--config", "not_found")) as error:
        load_config(tmp_path / "none.toml")
    assert "none.toml" in str(error.value)


def test_required_options_are_named():
    with refused_options(("--pretrained_model_name_or_path", "required")):
        load_config()


def test_toml_round_trip_keeps_every_option_and_no_secret(tmp_path):
    config = load_config(
        **BASE, video_resolution_buckets=["17x64x96"], lr=3e-5, hub_token="secret", report_to="wandb", train_steps=7
    )
    text = dump_toml(config)
    assert "secret" not in text
    (tmp_path / "config.toml").write_text(text)
    again = load_config(tmp_path / "config.toml")
    assert {k: v for k, v in again.flat().items() if k != "hub_token"} == {
        k: v for k, v in config.flat().items() if k != "hub_token"
    }
    assert not again.changed("rank")
    assert again.changed("lr")


def test_changed_options_are_those_that_differ_from_the_defaults_as_plain_values():
    config = load_config(**BASE, video_resolution_buckets=["17x64x96"], rank=64, lr=3e-5, hub_token="secret")
    assert changed_options(config) == {
        **BASE, "video_resolution_buckets": ["17x64x96"], "lr": 3e-5, "hub_token": "**********",
    }  # fmt: skip
    assert list(changed_options(config))[:3] == list(BASE)


def test_repr_shows_changed_options_and_evaluates_to_the_configuration():
    config = load_config(**BASE, video_resolution_buckets=["17x64x96"], output_dir="runs/a", target_fps=8)
    assert repr(config) == (
        "load_config(model_name='ltx_video', pretrained_model_name_or_path='repo', data_root='clips', "
        "video_resolution_buckets=['17x64x96'], target_fps=8.0, output_dir='runs/a')"
    )
    assert eval(repr(config), {"load_config": load_config}) == config
    assert "secret" not in repr(load_config(**BASE, hub_token="secret"))
    assert len(config.flat()) == len(fields())


def test_config_is_frozen():
    config = load_config(**BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.training.rank = 3


def test_every_option_is_described_and_documented():
    page = configuration_page()
    for name, option in fields().items():
        assert option.field.description.endswith((".", ")")), name
        assert f"`{name}`" in page


def test_the_types_of_options_are_current():
    """`finetrainers docs --types > finetrainers/config/options.py` writes them."""
    file = ROOT / "finetrainers" / "config" / "options.py"
    assert options_module() == file.read_text()


def test_schema_accepts_a_dumped_config_and_refuses_a_typo(tmp_path):
    schema = json.loads(json.dumps(json_schema()))
    document = tomllib.loads(dump_toml(load_config(**BASE, video_resolution_buckets=["17x64x96"])))
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"rnk": 8}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"rank": "many"}, schema)


def test_list_models():
    assert parse_flags(["--list_models"]) == (None, True)


def test_a_problem_that_is_a_list_is_shown_as_one() -> None:
    listed = Problem("data", "2 of 3 files cannot be used\n  - a.mp4: too short\n  - b.mp4: empty")
    assert str(ConfigError([listed])) == str(listed)
    assert str(ConfigError([listed, Problem("--lr", "too high")])).splitlines() == [
        "2 problems with this configuration:",
        "  - data: 2 of 3 files cannot be used",
        "      - a.mp4: too short",
        "      - b.mp4: empty",
        "  - --lr: too high",
    ]
