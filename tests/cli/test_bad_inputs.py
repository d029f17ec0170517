"""Inputs that no file, path, size or command may be, through the commands: refused with kind and place, at once."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from diffusers import (
    AutoencoderKLWan,
    CogVideoXDDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    LTXVideoTransformer3DModel,
)
from safetensors.numpy import save_file
from transformers import CLIPTextModel, LlamaModel

import finetrainers
from finetrainers.cli import main
from finetrainers.config.arguments import display_name
from finetrainers.config.sections import ModelSection
from finetrainers.models.common import load_scheduler
from finetrainers.models.files.weights import check_numbers, network_on_meta
from finetrainers.plan.initial_weights import read_lora_header
from finetrainers.utils.failures import FileError, InputError, Kind, error_kind
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.reading import (
    MAX_DEPTH,
    MAX_DIGITS,
    expect,
    find_json_object,
    parse_json,
    parse_toml,
    parse_yaml,
    read_bytes,
    read_json_object,
    read_jsonl,
    read_text,
    read_toml,
)
from tests.refusals import refused, refused_command

MODEL = ("--model_name", "ltx_video", "--pretrained_model_name_or_path", "demo://ltx", "--dry_run")
DEEP, LONG = "[" * 100_000, "9" * 5000


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a named pipe, a link to itself, and a link to an endless device."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("zero").symlink_to("/dev/zero")
    return tmp_path


PATHS = ("x" * 300, "loop", "~nosuchuser/x", "")
#: Commands with a path at the end, and the place of its problem.
TAKING_PATHS = [
    (["report"], "RUN"), (["plot"], "RUN"), (["ckpt", "ls"], "RUN"), (["ckpt", "verify"], "PATH"),
    (["cache", "ls"], "DIR"), (["watch"], "RUN"), (["tiny", "ltx_video"], "directory"), (["demo", "data"], "directory"),
    (["doctor", "--hosts"], "--hosts"), (["estimate", *MODEL[:4], "--accelerate_config"], "--accelerate_config"),
    (["train", *MODEL, "--init_from"], "--init_from"), (["train", "--config"], "--config"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "place"), TAKING_PATHS, ids=[" ".join(c[:2]) for c, _ in TAKING_PATHS])
def test_paths_that_no_file_can_have(odd: Path, command: list[str], place: str) -> None:
    for path in PATHS:
        code, problems = refused_command([*command, path])
        assert (code, place) in [(2, where) for where, _ in problems], (path, problems)


#: Commands with a path to write to at the end, and the option; as they refuse places in which nothing can be made.
WRITING = [
    ["train", *MODEL, "--output_dir"], ["sample", "demo://ltx", "--prompts", "a", "--output_dir"],
    ["export", "none", "--format", "peft", "--output_dir"], ["report", ".", "--output"],
    ["check", "--data_root", ".", "--json"], ["search-batch", *MODEL[:4], "--output"],
]  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="has no /proc")
def test_places_in_which_nothing_can_be_made(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in WRITING:
        name = "/proc/x.html" if command[-1] == "--output" and command[0] == "report" else "/proc/x"
        code, problems = refused_command([*command, name])
        assert (code, command[-1]) in [(2, where) for where, _ in problems], (command, problems)
    for name in ("pipe", "none"):
        assert ("--text_encoder_id", "not_found") in refused_command(["train", *MODEL, "--text_encoder_id", name])[1]
    Path("broken").symlink_to("none")
    command = ["train", *MODEL, "--data_root", ".", "--output_dir", "broken/x"]
    assert ("--output_dir", "invalid") in refused_command(command)[1]
    assert refused_command(["tiny", "ltx_video", "broken/x"]) == (2, [("directory", "invalid")])
    monkeypatch.setattr(tempfile, "mkdtemp", mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    assert refused_command(["plot", "."]) == (2, [("RUN", "unavailable")])


#: Commands with a file at the end.
TAKING_FILES = [
    ["run", "--plan"], ["train", "--config"], ["train", *MODEL, "--dataset"], ["doctor", "--hosts"],
    ["estimate", *MODEL[:4], "--accelerate_config"], ["train", *MODEL, "--init_from"],
]  # fmt: skip


@pytest.mark.parametrize("command", TAKING_FILES, ids=[" ".join(command[::4]) for command in TAKING_FILES])
def test_what_is_not_a_regular_file_is_not_read(odd: Path, command: list[str]) -> None:
    for name in ("pipe", "zero"):
        code, problems = refused_command([*command, name])
        assert code in (2, 65), name
        assert problems


def test_content_of_files(odd: Path) -> None:
    """Nesting, digits, encodings: at the place of the file, in every format."""
    for value in (DEEP, LONG, "[" * 200 + "]" * 200, "9" * (MAX_DIGITS + 1)):
        write_text_atomic(Path("a.toml"), f"lr = {value}")
        write_text_atomic(Path("a.jsonl"), f'{{"prompt": {value}}}\n')
        write_text_atomic(Path("a.yaml"), f"num_processes: {value}")
        assert refused_command(["train", "--config", "a.toml"]) == (2, [("a.toml", "unreadable")])
        assert refused_command(["run", "--plan", "a.toml"]) == (2, [("a.toml", "unreadable")])
        _, problems = refused_command(["train", *MODEL, "--validation_prompts", "a.jsonl"])
        assert ("a.jsonl", "unreadable") in problems
        _, problems = refused_command(["estimate", *MODEL[:4], "--accelerate_config", "a.yaml"])
        assert ("--accelerate_config", "unreadable") in problems
    Path("a.toml").write_bytes("lr = 1".encode("utf-16"))
    assert refused_command(["train", "--config", "a.toml"]) == (2, [("--config", "unreadable")])


def all_commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command and its parser, by the table of commands; those of commands in the place of commands with parts."""
    parts = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not parts:
        yield words, parser
    for part in parts:
        for name, inner in part.choices.items():
            yield from all_commands(inner, (*words, name))


COMMANDS = dict(all_commands(main._parser()))
TEXTS, NUMBERS = ("", " ", "a\0b", "a\udcff", "x" * 5000), ("nan", "inf", LONG, "9" * 30)


def bad_values(action: argparse.Action) -> tuple[str, ...]:
    """Values that an argument must not have, by its declaration."""
    if action.nargs == 0 or action.help == argparse.SUPPRESS or action.type is str:  # or sections judge them
        return ()
    if action.choices is not None:
        return ("", "nosuch")
    if action.type in (int, float):
        return NUMBERS
    below = ("file/below",) if getattr(action.type, "check", None) is not None else ()
    return (*TEXTS, *below)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_argument_of_every_command_refuses_what_it_cannot_be(odd: Path, command: tuple[str, ...]) -> None:
    Path("file").write_text("text")
    parser = COMMANDS[command]
    for action in parser._actions:
        place = display_name(action)
        for value in bad_values(action):
            words = [f"{place}={value}"] if action.option_strings else []
            for other in parser._actions:
                if not other.option_strings and (other is action or other.nargs not in ("?", "*")):
                    words.append(value if other is action else "x")
            code, problems = refused_command([*command, *words])
            assert (code, place) in [(2, where) for where, _ in problems], (place, value[:20], problems)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_thousands_of_unknown_flags_are_counted(
    odd: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    count = 400
    assert refused_command([*command, *(f"--nosuch{number}" for number in range(count))])[0] == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) < 100
    assert f"{count - 50}" in "".join(lines)


def test_levels_of_the_log_are_known(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETRAINERS_LOG_LEVEL", "loud")
    for command in (["models"], ["doctor"], ["train"], ["check"], ["sample"], ["ckpt", "ls", "x"]):
        assert refused_command(command) == (2, [("FINETRAINERS_LOG_LEVEL", "unknown")])
    monkeypatch.setenv("FINETRAINERS_LOG_LEVEL", "warning")
    assert refused_command(["models"]) == (0, [])


def test_arguments_that_say_nothing(odd: Path) -> None:
    Path("run").mkdir()
    Path("text").write_text("text")
    save_file({"x": np.zeros(2, np.float32)}, "x.safetensors")
    measure = ["demo", "measure", "new", "--lora"]
    expected: list[tuple[list[str], tuple[str, Kind]]] = [
        (["report", "run", "./run"], ("RUN", "duplicate")),
        (["plot", "run", "run"], ("RUN", "duplicate")),
        (["doctor", "--output_dir", "text/below"], ("--output_dir", "invalid")),
        (["doctor", "text/below"], ("CONFIG", "unreadable")),
        (["quickstart", "text/below"], ("directory", "invalid")),
        (["demo", "build", "text/below"], ("directory", "invalid")),
        (["tiny", "ltx_video", "new", "--version", "nosuch"], ("--version", "unknown")),
        (["serve-reward", "clipscore", "--device", "cuda:99"], ("--device", "unavailable")),
        (["init", "run", "--trigger_word", "x" * 300], ("--trigger_word", "too_large")),
        ([*measure, "run"], ("--lora", "not_found")),
        ([*measure, "text"], ("--lora", "unreadable")),
        ([*measure, "x.safetensors"], ("--lora", "mismatch")),
    ]
    for command, problem in expected:
        code, problems = refused_command(command)
        assert (code, problem) in [(2, one) for one in problems], (command, problems)


def test_thousands_of_unknown_keys(odd: Path) -> None:
    """Take time in proportion to their number, each at its line."""
    Path("a.toml").write_text("[data]\n" + "".join(f"max_item{i} = 1\n" for i in range(4000)), encoding="utf-8")
    start = time.process_time()
    code, problems = refused_command(["train", "--config", "a.toml"])
    assert time.process_time() - start < 3
    assert (code, problems[0], problems[3999]) == (2, ("a.toml:2", "unknown"), ("a.toml:4001", "unknown"))


LAUNCHER_FILES: dict[str, Kind] = {
    "num_processes: abc": "invalid", "num_processes: 1.5": "invalid", "num_processes: null": "invalid",
    "num_processes: [1]": "invalid", "distributed_type: [a]": "invalid", "mixed_precision: [a]": "invalid",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 9}": "unknown",
    "distributed_type: DEEPSPEED\ndeepspeed_config: 5": "invalid",
    "distributed_type: FSDP\nfsdp_config: {'a=b': 1}": "invalid",
    "distributed_type: FSDP\nfsdp_config: {'': 1}": "invalid",
    'distributed_type: FSDP\nfsdp_config: {fsdp_x: "a\\0b"}': "invalid",
    "num_processes: 2020-99-99": "unreadable", "a: &a [1]\nb: *a": "unreadable", "[1, 2]": "unreadable",
    'mixed_precision: "\\ud800"': "invalid",
}  # fmt: skip


def test_launcher_files(odd: Path) -> None:
    for text, kind in LAUNCHER_FILES.items():
        Path("a.yaml").write_text(text, encoding="utf-8")
        refusal = refused_command(["estimate", *MODEL[:4], "--accelerate_config", "a.yaml"])
        assert refusal == (2, [("--accelerate_config", kind)]), text


SIZES = ("9x00x64", "9x-64x64", f"9x{LONG}x64", "0x64x64", "9x\u0666\u0664x64", "9x64.5x64", "")


@pytest.mark.parametrize("size", SIZES, ids=[size[:9] or "empty" for size in SIZES])
def test_sizes_have_one_parser(odd: Path, size: str) -> None:
    Path("a.toml").write_text(f'[[prompts]]\nprompt = "a"\nsize = "{size}"\n', encoding="utf-8")
    Path("d.toml").write_text(
        f'[[dataset]]\ndata_root = "x"\nvideo_resolution_buckets = ["{size}"]\n', encoding="utf-8"
    )
    options = {
        "--video_resolution_buckets": size, "--bucket_batch_sizes": f"{size}=2", "--bucket_keep_prob": f"{size}=0.5",
        "--rollout_size": size,
    }  # fmt: skip
    for option, value in options.items():
        assert (option, "invalid") in refused_command(["train", *MODEL, option, value])[1]
    assert refused_command(["train", *MODEL, "--validation_prompts", "a.toml"])[1][0] == ("a.toml entry 1", "invalid")
    assert ("--size", "invalid") in refused_command(["sample", "demo://ltx", "--prompts", "a", "--size", size])[1]
    assert refused_command(["train", *MODEL, "--dataset", "d.toml"])[0] == 65


def test_commands_and_stages(odd: Path) -> None:
    Path("hosts").write_text("localhost\n", encoding="utf-8")
    Path("a.toml").write_text("stage = []\n", encoding="utf-8")
    for command in ('a "b', "/nope/ssh", ""):
        assert refused_command(["doctor", "--hosts", "hosts", "--rsh", command]) == (2, [("--rsh", "invalid")])
        assert ("--launcher", "invalid") in refused_command(["run", "a.toml", "--plan", "--launcher", command])[1]
    assert refused_command(["run", "a.toml", "--plan"]) == (2, [("a.toml", "required")])
    Path("hosts").write_text(f"localhost slots={LONG}\n", encoding="utf-8")
    assert refused_command(["doctor", "--hosts", "hosts"]) == (2, [("hosts:1", "invalid")])
    deep = "{'first': " + "-" * 50_000 + "1}"
    assert ("--frame_conditioning", "invalid") in refused_command(["train", *MODEL, "--frame_conditioning", deep])[1]


#: File of a model, key and value; `refused_command` sees each at the option that names the model.
CONFIGS: list[tuple[str, str, object]] = [
    ("transformer/config.json", "num_layers", 10**12), ("transformer/config.json", "patch_size", 0),
    ("transformer/config.json", "patch_size_t", None), ("transformer/config.json", "attention_head_dim", None),
    ("vae/config.json", "temporal_compression_ratio", [1]),
    ("vae/config.json", "block_out_channels", []),
    ("text_encoder/config.json", "d_kv", "x"), ("text_encoder/config.json", "relative_attention_max_distance", -1),
    ("scheduler/scheduler_config.json", "num_train_timesteps", 0),
    ("scheduler/scheduler_config.json", "_class_name", [1]),
    ("vae/config.json", "scaling_factor", 1e308),
]  # fmt: skip


def test_configs_of_models(odd: Path) -> None:
    model = odd / "model"
    shutil.copytree(Path(finetrainers.__file__).parent / "demo" / "weights" / "ltx", model)
    for file, key, value in CONFIGS:
        text = (model / file).read_text(encoding="utf-8")
        write_text_atomic(model / file, json.dumps({**json.loads(text), key: value}))
        command = ["train", "--model_name", "ltx_video", "--pretrained_model_name_or_path", str(model), "--dry_run"]
        code, problems = refused_command([*command, "--data_root", "none"])
        assert (code, ("--pretrained_model_name_or_path", "invalid") in problems) == (2, True), (file, key, problems)
        write_text_atomic(model / file, text)
    write_text_atomic(model / "scheduler/scheduler_config.json", '{"_class_name": "DDIMScheduler", "beta_end": -1}')
    with refused("invalid", "scheduler_config.json", "beta_end"):
        load_scheduler(ModelSection(pretrained_model_name_or_path=str(model)))


def test_numbers_that_only_a_forward_pass_reads() -> None:
    settings = {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 4, "cross_attention_dim": 4}
    network_on_meta(LTXVideoTransformer3DModel, {**settings, "norm_eps": 1}, "a config")
    for key, value in (
        ("norm_eps", "x"),
        ("norm_eps", [1e-6]),
        ("attention_bias", {}),
        ("norm_eps", -1),
        ("patch_size_t", 1e9),
    ):
        with pytest.raises(InputError, match=key):
            network_on_meta(LTXVideoTransformer3DModel, {**settings, key: value}, "a config")
    signs: list[tuple[type, str, object, bool]] = [
        (LTXVideoTransformer3DModel, "norm_eps", 0, True), (FlowMatchEulerDiscreteScheduler, "shift", 0, False),
        (FlowMatchEulerDiscreteScheduler, "base_shift", -0.5, True),  # an exponent
        (CogVideoXDDIMScheduler, "snr_shift_scale", -1, False), (AutoencoderKLWan, "latents_std", [1, 0.0], False),
        (AutoencoderKLWan, "latents_mean", [-1, 0], True), (CLIPTextModel, "bos_token_id", 0, True),
        (CLIPTextModel, "layer_norm_eps", -1, False), (LlamaModel, "rope_parameters", {"rope_theta": 0}, False),
        (LlamaModel, "rope_theta", -1.0, False), (LlamaModel, "num_hidden_layers", 0, True),
    ]  # fmt: skip
    for cls, key, value, is_valid in signs:
        with nullcontext() if is_valid else pytest.raises(InputError, match=r"a config .*: \w+ must be"):
            check_numbers(cls, {key: value}, "a config")


SETTINGS = {
    "r": ["z", 0, 1.5], "lora_alpha": [[1], math.nan, 1e999, "x"], "rank_pattern": [5, {"a": "b"}],
    "alpha_pattern": [["("]], "target_modules": [7], "use_rslora": [[]], "eva_config": ["x"], "bias": [[], "some"],
    "lora_dropout": [2, "x"], "init_lora_weights": [-1], "modules_to_save": [3],
}  # fmt: skip


def test_settings_of_loras(odd: Path) -> None:
    """In a header, and next to a file in PEFT's format."""
    (odd / "peft").mkdir()
    weights = {f"to_q.lora_{side}.weight": np.zeros((4, 4), np.float32) for side in "AB"}
    save_file({f"base_model.model.{name}": value for name, value in weights.items()}, odd / "peft/a.safetensors")
    for key, values in SETTINGS.items():
        for value in values:
            header = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value})}
            save_file(
                {f"transformer.{name}": tensor for name, tensor in weights.items()}, odd / "a.safetensors", header
            )
            write_text_atomic(odd / "peft" / "adapter_config.json", json.dumps({key: value}))
            for path, place in (("a.safetensors", "lora_adapter_metadata"), ("peft/a.safetensors", "adapter_config")):
                with refused("invalid", place, key):
                    read_lora_header(Path(path))


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def errors() -> Iterator[tuple[str, ValueError]]:
    for name, parse, text in (
        ("json", parse_json, "{}"),
        ("toml", parse_toml, "a = {}"),
        ("yaml", parse_yaml, "a: {}"),
    ):
        for value in (nested(MAX_DEPTH + 1), "[" * 100_000, "9" * (MAX_DIGITS + 1), LONG):
            with pytest.raises(ValueError) as caught:
                parse(text.replace("{}", value))
            yield name, caught.value
        assert parse(text.replace("{}", "9" * MAX_DIGITS))
        assert parse(text.replace("{}", nested(MAX_DEPTH - 1)))


def test_texts_have_bounds(tmp_path: Path) -> None:
    assert len(list(errors())) == 12
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json('{"[": ' + nested(MAX_DEPTH + 1) + "}")
    assert caught.value.pos == 6 + MAX_DEPTH - 1  # brackets in texts do not count
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json(b'{"a": "\xff"}')
    assert caught.value.pos == 7
    assert parse_json('"' + "9" * 400 + '"') == "9" * 400  # a text, not a number
    assert parse_json("[" + ",".join(["[1]"] * 1000) + "]")[-1] == [1]


def test_files_have_bounds(odd: Path) -> None:
    large = odd / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    cases: dict[Kind, tuple[str, ...]] = {
        "unreadable": ("pipe", "zero", "loop", ".", "x" * 300), "not_found": ("none",), "too_large": ("large",),
    }  # fmt: skip
    for kind, names in cases.items():
        for name in names:
            for read in (read_bytes, read_text, read_json_object, read_toml, read_jsonl):
                with refused(kind, str(odd / name)[:200], error=FileError):
                    read(odd / name)
            assert find_json_object(odd / name) == {}
    with pytest.raises(FileNotFoundError):
        read_text(odd / "none")
    (odd / "small").write_bytes(b"{}")
    tracemalloc.start()
    assert read_bytes(odd / "small", limit=2 << 30) == b"{}"
    assert tracemalloc.get_traced_memory()[1] < 16 << 20  # not the limit
    tracemalloc.stop()
    with pytest.raises(OSError) as caught:
        read_text(odd / "loop")
    assert caught.value.errno is not None
    (odd / "lines").write_bytes(b'{"a": 1}\n[2]\n{"b": ' + b"[" * 1000 + b'\n\xff\n{"a": 3}\n')
    records, damaged = read_jsonl(odd / "lines")
    assert ([record["a"] for record in records], len(damaged)) == ([1, 3], 3)


def test_values_have_types() -> None:
    assert expect({"a": 1}, dict, "x") == {"a": 1}
    assert expect(3, float, "x") == 3
    for value, kind in ((True, int), (True, float), ("3", int), (None, dict), ([1], str), ("\x1b[31m", int)):
        with pytest.raises(InputError) as caught:
            expect(value, kind, "a.json: key")
        assert error_kind(caught.value) == "invalid"
        assert str(caught.value).startswith("a.json: key: expected ")
        assert str(caught.value).isprintable()
