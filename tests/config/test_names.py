"""What other trainers call options: accepted where it means the same, else refused with what to use instead."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from finetrainers.config.dialects import aliases
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.flags import is_secret, parse_flags
from finetrainers.config.help import help_text
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.names import DEPENDENT, INSTEAD, SAME, VALUES, suggest_option, unknown_option
from finetrainers.config.root import fields, former_names
from finetrainers.config.shape import choices
from finetrainers.rundir.run_dir import without_secrets

BASE = {"model_name": "m", "pretrained_model_name_or_path": "repo", "data_root": "clips"}
FLAGS = [part for name, value in BASE.items() for part in (f"--{name}", value)]


def problems(*flags: str) -> list[Problem]:
    with pytest.raises(ConfigError) as error:
        parse_flags([*FLAGS, *flags])
    return error.value.problems


def test_the_tables_name_options_that_exist_and_no_name_twice():
    assert not SAME.keys() & INSTEAD.keys()
    assert not (SAME.keys() | INSTEAD.keys()) & {*fields(), *DEPENDENT}
    assert set(SAME.values()) <= fields().keys()
    for sentence in (*INSTEAD.values(), *DEPENDENT.values()):
        assert set(re.findall(r"--(\w+)", sentence)) <= {*fields(), *former_names(), "config", "presets"}, sentence
    for option, values in VALUES.items():
        assert set(values.values()) <= set(choices(fields()[option].field.annotation))
    assert len(SAME) + len(INSTEAD) > 200


@pytest.mark.parametrize(
    ("given", "option", "expected"),
    [
        (["--lora_rank", "8"], "rank", 8),
        (["--lora-rank=8"], "rank", 8),
        (["--network_dim", "8", "--network_alpha", "4"], "lora_alpha", 4.0),
        (["--learning_rate", "3e-4"], "lr", 3e-4),
        (["--max_train_steps", "7"], "train_steps", 7),
        (["--train_batch_size", "2"], "batch_size", 2),
        (["--num_train_epochs", "2"], "train_epochs", 2),
        (["--trigger_word", "sks"], "id_token", "sks"),
        (["--enable_gradient_checkpointing"], "gradient_checkpointing", True),
        (["--use_8bit_adam"], "use_8bit_bnb", True),
        (["--lora_target_modules", "to_q", "to_k"], "target_modules", ["to_q", "to_k"]),
        (["--resume", "latest"], "resume_from_checkpoint", "latest"),
        (["--attn_provider_training", "transformer:_native_cudnn"], "attn_backend", "_native_cudnn"),
        (
            ["--attn_provider_training", "flash", "--attn_provider_inference", "transformer:flash"],
            "attn_backend",
            "flash",
        ),
        (["--attn_provider_inference", "transformer:auto"], "attn_backend", "auto"),
        (["--compile_modules", "transformer"], "compile", "regional"),
        (["--no-pin-memory"], "pin_memory", False),
        (["--no_pin_memory"], "pin_memory", False),
    ],
)
def test_names_that_mean_the_same_are_accepted(given, option, expected):
    config, _ = parse_flags([*FLAGS, *given])
    assert config.get(option) == expected


def test_what_is_accepted_is_said_once(caplog, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nnetwork-dim = 8\n")
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config, _ = parse_flags([*FLAGS, "--config", str(file), "--learning_rate", "1e-3", "--max_steps", "5"])
    assert (config.training.rank, config.optimizer.lr, config.training.train_steps) == (8, 1e-3, 5)
    notes = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert notes[0].startswith(f"network_dim ({file}:2) as rank; ")
    assert notes[0].endswith(" of --lora_alpha")
    assert notes[1:] == ["--learning_rate as --lr, --max_steps as --train_steps"]


def test_framepack_turns_windows_on(tmp_path, caplog):
    windows = ("--framepack_window_size", "33", "--framepack_window_stride", "4")
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config, _ = parse_flags([*FLAGS, "--framepack", *windows])
    assert (config.data.sliding_window_size, config.data.sliding_window_stride) == (33, 4)
    assert caplog.messages[-1].startswith("--framepack cuts ")
    assert load_config(BASE, framepack=False).data.sliding_window_size is None
    file = tmp_path / "run.toml"
    file.write_text("[data]\nframepack = true\n")
    config, _ = parse_flags([*FLAGS, "--config", str(file), *windows])
    assert config.data.sliding_window_size == 33
    assert caplog.messages[-1].startswith(f"{file}:2: framepack cuts ")
    for given, kind in (([], "required"), (["false", *windows], "conflict"), (["maybe", *windows], "invalid")):
        [problem] = problems("--framepack", *given)
        assert (problem.where, problem.kind) == ("--framepack", kind)


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("framepack", ["sliding_window_size", "sliding_window_stride", "sliding_window_batching"]),
        ("decord", ["video_backend"]),
        ("wandb", ["report_to"]),
        ("rl_algorithm", ["method"]),
    ],
)
def test_help_finds_values_and_names_that_depend_on_others(word, options):
    assert re.findall(r"^  --(\w+)", help_text("train", word), re.MULTILINE) == options


def test_flags_win_over_the_file_by_whatever_name(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("learning_rate = 1e-3\nrank = 4\n")
    config, _ = parse_flags([*FLAGS, "--config", str(file), "--lr", "2e-3", "--lora_rank", "8"])
    assert (config.optimizer.lr, config.training.rank) == (2e-3, 8)


def test_two_names_of_one_option_in_one_place_contradict_each_other():
    [problem] = problems("--lr", "1e-3", "--learning_rate", "1e-4")
    assert (problem.where, problem.kind) == ("--learning_rate", "conflict")
    assert problem.message.startswith("learning_rate and lr (--lr) ")


def test_with_reward_finetuning_the_same_words_have_another_meaning(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = {"model_name": "m", "pretrained_model_name_or_path": "repo", "max_train_steps": 3, "train_batch_size": 2}
    config = load_config(**options, method="grpo", updates_per_rollout=4, learning_rate=1e-5, lora_rank=8)
    assert (config.training.train_steps, config.grpo.prompts_per_step) == (12, 4)
    assert (config.dataloader.batch_size, config.optimizer.lr, config.training.rank) == (1, 1e-5, 8)
    config = load_config(**options)
    assert (config.training.train_steps, config.dataloader.batch_size) == (3, 2)
    shared = [name for name in SAME if name in aliases.FOREIGN]
    assert {"learning_rate", "train_batch_size", "max_train_steps", "num_train_epochs"} <= set(shared)


@pytest.mark.parametrize(
    ("given", "where", "kind", "value"),
    [
        (["--width", "512"], "--width", "unknown", "--video_resolution_buckets FRAMESxHEIGHTxWIDTH"),
        (["--instance_prompt", "a cat"], "--instance_prompt", "unknown", "--id_token"),
        (["--caption_ext", ".txt"], "--caption_ext", "unknown", ".txt files"),
        (["--data-path", "a.csv"], "--data_path", "unknown", "--dataset_file"),
        (["--height_buckets", "256"], "--height_buckets", "unknown", "--video_resolution_buckets"),
        (["--image_to_video"], "--image_to_video", "unknown", "--model_name"),
        (["--remote_video"], "--remote_video", "unknown", "this machine"),
        (["--use_deepspeed"], "--use_deepspeed", "unknown", " --deepspeed?"),
        (["--load_tensors"], "--load_tensors", "unknown", "--precompute_conditions"),
        (["--use_torchao"], "--use_torchao", "unknown", "--optimizer adamw-torchao-8bit"),
        (["--cache_latents"], "--cache_latents", "unknown", "--precompute_conditions"),
        (["--xformers"], "--xformers", "unknown", "--attn_backend flash"),
        (["--compile_scopes", "full"], "--compile_scopes", "unknown", "--compile regional"),
        (["--compile", "full"], "--compile", "unknown", "'full'; valid: none, regional"),
        (["--attn_backend", "flash3"], "--attn_backend", "unknown", " '_flash_3_hub'?"),
        (["--attn_backend", "flexx"], "--attn_backend", "unknown", " 'flex'?"),
        (["--attn_backend", "sage"], "--attn_backend", "unsupported", "sage has "),
        (["--attn_backend", "_native_npu"], "--attn_backend", "unsupported", "_native_npu "),
        (["--attn_provider_training", "vae:flash"], "--attn_provider_training", "unsupported", "'vae:flash'"),
        (
            ["--attn_backend", "flash", "--attn_provider_inference", "sage"],
            "--attn_provider_inference", "unsupported", "flash; ",
        ),
        (["--optimizer_args", "weight_decay=0.1", "betas=0.9,0.99"], "--optimizer_args", "unknown", "use --beta1"),
        (["--optimizer", "adamw8bit"], "--optimizer", "unknown", " 'adamw-bnb-8bit'?"),
        (["--optimizer", "PagedAdamW8bit"], "--optimizer", "unknown", "'adamw-bnb-8bit-paged'?"),
        (["--optimizer_type", "AdamW"], "--optimizer_type", "unknown", "'adamw'?"),
        (["--training_type", "full"], "--training_type", "unknown", "'full-finetune'?"),
        (["--mixed_precision", "bfloat16"], "--mixed_precision", "unknown", "'bf16'?"),
    ],
)  # fmt: skip
def test_other_names_say_what_to_do_instead(given, where, kind, value):
    [problem] = problems(*given)
    assert (problem.where, problem.kind) == (where, kind)
    assert value in problem.message


def test_a_file_says_the_same(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("\nwidth = 512\n[training]\nrnk = 3\n")
    typo, width = problems("--config", str(file))
    assert (typo.where, typo.kind) == (f"{file}:4", "unknown")
    assert typo.message.endswith(" 'rank'?")
    assert (width.where, width.kind) == (f"{file}:2", "unknown")
    assert width.message.endswith(f" 'width'; {INSTEAD['width']}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("dpo.bta", "dpo.beta"),
        ("grpo.etta", "eta"),
        ("rnk", "rank"), ("batch_siz", "batch_size"), ("learning_rat", "lr"), ("lora_rnk", "rank"),
        ("optimize", "optimizer"),
        ("video_resolution_bucket", "video_resolution_buckets"),
    ],
)  # fmt: skip
def test_slips_of_the_pen_are_recognised(name, meant):
    problem = unknown_option(name, f"--{name}")
    assert (problem.where, problem.kind, problem.about) == (f"--{name}", "unknown", (meant,))
    assert problem.message.endswith(f" --{meant}?")


@pytest.mark.parametrize(
    "name", ["caption_ex", "max_item_count", "prompt_strength", "sampler_name", "noise", "foo", "lora_scale"]
)
def test_names_that_are_like_none_get_no_hint(name):
    problem = unknown_option(name, f"--{name}")
    assert (problem.where, problem.kind, problem.about) == (f"--{name}", "unknown", ())
    assert "?" not in problem.message


def test_options_that_were_meant_are_not_missed_too():
    with pytest.raises(ConfigError) as error:
        load_config(model_name="m", pretrained_model_name_or_path="repo", train_data_dir="clips", batchsize=2)
    assert {"data_root", "batch_size"} <= error.value.wrong


@pytest.mark.parametrize("flag", ["--hub_token", "--hub-token", "--hf_token", "--wandb_api_key", "--wandb-api-key"])
def test_no_secret_is_written_down_whatever_it_is_called(flag):
    assert is_secret(flag)
    assert without_secrets(["train", flag, "abc", "--rank", "4"]) == ["train", flag, "***", "--rank", "4"]
    assert without_secrets(["train", f"{flag}=abc"]) == ["train", f"{flag}=***"]
    assert not is_secret("--id_token")


def test_a_secret_of_the_wrong_type_is_not_shown(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("hub_token = 123456\n")
    [problem] = problems("--config", str(file))
    assert (problem.where, problem.kind) == (f"{file}:1", "invalid")
    assert problem.message.startswith("hub_token: ")
    assert "123456" not in problem.message


# ---- Open-Sora's three ways of loading a checkpoint, as flags and in files ------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--ckpt-path", "old/step-4"], (None, [], "old/step-4")),
        (["--load", "old/step-4"], ("old/step-4", [], None)),
        (["--load", "old/step-4", "--start-from-scratch"], ("old/step-4", ["data"], None)),
        (["--start_from_scratch", "--load=latest"], ("latest", ["data"], None)),
        (["--load", "latest", "--start-from-scratch", "false"], ("latest", [], None)),
        (["--ckpt_path", "a", "--load", "auto"], ("auto", [], "a")),
    ],
)
def test_each_becomes_ours(given: list[str], expected: tuple) -> None:
    config, _ = parse_flags([*FLAGS, *given])
    assert config is not None
    training = config.training
    assert (training.resume_from_checkpoint, training.reset, training.init_from) == expected


def test_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model_name = "m"\npretrained_model_name_or_path = "r"\nload = "x"\nstart_from_scratch = true\n')
    config = load_config(path)
    assert config.training.resume_from_checkpoint == "x"
    assert config.training.reset == ["data"]
    # What an invocation asked for is not what the run is; where its weights came from is.
    dumped = dump_toml(load_config(path, init_from="stage1"))
    assert "reset" not in dumped
    assert "resume_from" not in dumped
    assert 'init_from = "stage1"' in dumped


@pytest.mark.parametrize(
    ("given", "where", "kind", "value"),
    [
        (["--start-from-scratch"], "--start_from_scratch", "required", "set --load"),
        (["--load", "a", "--resume_from_checkpoint", "b"], "--load", "conflict", "load and resume_from_checkpoint "),
        (
            ["--load", "a", "--start-from-scratch", "--reset", "rng"],
            "--start_from_scratch", "conflict", "start_from_scratch and reset (--reset) ",
        ),
        (["--load", "a", "--start-from-scratch", "perhaps"], "--start_from_scratch", "invalid", "got 'perhaps'"),
        (["--reset", "dat", "--load", "a"], "--reset", "unknown", "'data'?"),
        (["--load", "a", "b"], "--load", "invalid", "resume_from_checkpoint: "),
        (["--ckpt_path", "--rank", "0"], "--ckpt_path", "invalid", "init_from: "),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(given: list[str], where: str, kind: str, value: str) -> None:
    [problem] = [problem for problem in problems(*given) if problem.where != "--rank"]
    assert (problem.where, problem.kind) == (where, kind)
    assert value in problem.message


def test_one_edit_is_a_typo_in_short_names_too() -> None:
    typos = {
        "rnak": "rank", "rak": "rank", "ranks": "rank", "rang": "rank", "sede": "seed", "lrr": "lr",
        "network_dmi": "rank", "train_stpes": "train_steps", "bet": None, "l": None, "kanr": None, "rnka_": None,
    }  # fmt: skip
    assert {name: suggest_option(name, fields()) for name in typos} == typos
