"""The commands as a user types them: help, lists, tiny models, schemas, and errors with exit code 2."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finetrainers import __version__
from finetrainers.cli.main import _parser, main, train_command
from finetrainers.config.document import configuration_page
from finetrainers.config.errors import ConfigError
from finetrainers.config.flags import parse_flags
from finetrainers.config.load import load_config
from finetrainers.config.root import fields
from finetrainers.config.shape import is_list
from finetrainers.demo import quickstart, rewarded, scratch
from finetrainers.plan.preflight import preflight

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "finetrainers", *arguments], capture_output=True, text=True, timeout=120
    )


def test_help_and_version_are_instant_in_that_they_import_no_torch():
    code = (
        "import sys\nfrom finetrainers.cli.main import main\n"
        "for argv in (['--help'], ['train', '--help'], ['--version']):\n"
        "    try: main(argv)\n    except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "main([]); main(['models']); main(['schema']); main(['docs'])\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'accelerate', 'av'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert __version__ in result.stdout


def helped(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*argv])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("narrow")
def test_train_help_shows_what_most_people_set(capsys):
    text = helped(capsys, "train", "--help")
    assert text.startswith("usage: finetrainers train [--config FILE] [options]\n\nFinetune")
    for expected in (
        "--video_resolution_buckets",
        "--config FILE",
        "SIZE [SIZE ...]",
        "{lora,full-finetune}",
        "[500]",
        "examples:",
    ):
        assert expected in text
    options = re.findall(r"^  --(?!help)(\w+)", text, flags=re.MULTILINE)
    assert options[:2] == ["config", "list_models"]
    assert len(options[2:]) == 25
    assert set(options[2:]) <= set(fields())
    assert len(text.splitlines()) < 140
    assert max(map(len, text.splitlines())) <= 80
    assert helped(capsys, "train", "-h") == text


@pytest.mark.usefixtures("narrow")
def test_all_options_are_a_word_away(capsys):
    text = helped(capsys, "train", "--help", "all")
    assert re.findall(r"^  --(?!help)([\w.]+)", text, flags=re.MULTILINE) == ["config", "list_models", *fields()]
    prepare = helped(capsys, "prepare", "--help")
    assert "precompute_batch_size" in prepare
    assert "--lr " not in prepare
    assert len(prepare.splitlines()) < len(text.splitlines()) / 4


@pytest.mark.parametrize(
    ("word", "shown", "said"),
    [
        ("rank", ["rank"], "Also accepted: --lora_rank, --network_dim,"),
        ("Lora-Rank", ["rank"], "Rank of the LoRA"),
        ("lr_scheduler", ["lr_scheduler"], "One of: constant, constant_with_warmup,"),
        ("parallel", None, "How several processes share the work"),
        ("optimizer", None, "--max_grad_norm X"),
        ("upcasting", None, "--layerwise_upcasting_modules"),
        ("nccl_timeut", ["nccl_timeout"], "stuck collective"),
        ("block_swap", ["blocks_to_swap"], "--blocks_to_swap {auto,N}"),
        ("memory", None, "--gradient_checkpointing"),
    ],
)
@pytest.mark.usefixtures("narrow")
def test_help_on_a_word(word, shown, said, capsys):
    text = helped(capsys, "train", "--help", word)
    assert said in text.replace("\n                        ", " ").replace("\n               ", " ")
    assert "usage:" not in text
    if shown is not None:
        assert re.findall(r"^  --(\w+)", text, flags=re.MULTILINE) == shown


def test_help_on_what_does_not_exist(capsys):
    assert main(["train", "--help", "zzz"]) == 2
    assert "no option is called 'zzz', nor a part of one; sections: model data" in capsys.readouterr().err


@pytest.mark.usefixtures("narrow")
def test_the_commands_are_grouped_by_task(capsys):
    text = helped(capsys, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert [line for line in text.splitlines() if re.fullmatch(r"\w+:", line)] == [
        "start:",
        "train:",
        "look:",
        "use:",
        "tools:",
        "examples:",
    ]
    for command in _parser().commands.choices:
        assert re.search(rf"^  {command} ", text, flags=re.MULTILINE), command
    assert main([]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("command", ["quickstart", "models", "tiny", "plot", "ckpt", "demo", "demo reward"])
def test_commands_say_how_they_are_called(command, capsys):
    text = helped(capsys, *command.split(), "--help")
    assert f"examples:\n  finetrainers {command}" in text


def test_default_lengths_of_the_demonstrations_are_those_of_the_help(capsys):
    for command, steps in (
        ("quickstart", quickstart.DEFAULT_STEPS),
        ("demo reward", rewarded.DEFAULT_STEPS),
        ("demo scratch", scratch.DEFAULT_STEPS),
    ):
        assert f"optimizer steps [{steps}]" in helped(capsys, *command.split(), "--help")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("generate", "`sample RUN --prompts PROMPTS` draws clips"),
        ("resume", "--resume_from_checkpoint latest"),
        ("lora", "`train` trains"),
        ("trian", "did you mean 'train'?"),
        ("frobnicate", "there are: train, prepare"),
    ],
)
def test_commands_that_do_not_exist_say_what_to_use(command, said, capsys):
    assert main([command, "--anything"]) == 2
    assert said in capsys.readouterr().err


def test_no_arguments_point_to_the_quickstart(capsys):
    assert main(["train"]) == 2
    assert "finetrainers train --help lists the options. New here? finetrainers quickstart" in capsys.readouterr().err


def test_the_file_of_options_may_come_first(tmp_path):
    (tmp_path / "run.toml").write_text('model_name = "m"\npretrained_model_name_or_path = "r"\nrank = 4\n')
    config, _ = parse_flags([str(tmp_path / "run.toml"), "--rank", "8"])
    assert config.training.rank == 8


def test_models(capsys):
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert train_command(["--list_models"], prog="train.py") == 0
    assert capsys.readouterr().out == listed
    assert {"ltx_video", "hunyuan_video", "cogvideox"} <= set(listed.split())


def test_schema_and_docs(capsys):
    assert main(["schema"]) == 0
    assert "rank" in json.loads(capsys.readouterr().out)["properties"]
    assert main(["docs"]) == 0
    assert capsys.readouterr().out == configuration_page()


def test_tiny_writes_a_loadable_repository(tmp_path, capsys):
    assert main(["tiny", "ltx_video", str(tmp_path / "ltx")]) == 0
    assert (tmp_path / "ltx" / "model_index.json").is_file()
    assert "wrote a tiny random ltx_video" in capsys.readouterr().out
    assert main(["tiny", "ltx_vido", str(tmp_path / "x")]) == 2
    assert "did you mean 'ltx_video'?" in capsys.readouterr().err


#: Mistakes in every command, and all that is said of them.
MISTAKES = {
    "export": ["SOURCE: is required", "--format: is required"],
    "export run --fromat comfyui": ["--fromat: unknown flag; did you mean --format?"],
    "export nowhere --format comfy --lora_scale nan --output_dir file": [
        "--format: unknown value 'comfy'", "--lora_scale: not a finite number", "--output_dir: file is a file",
        "'nowhere'",
    ],
    "report nowhere run --videos x --output file": ["--videos: 'x'", "RUN: nowhere does not exist",
        "--output: file would not be opened"],
    "sync nowhere file --every 0": ["--every: not a number of seconds", "RUN: nowhere", "TARGET: file is a file"],
    "sync --evrey 5 run x": ["--evrey: unknown flag; did you mean --every?"],
    "doctor none.toml --hosts nowhere --timeout 0 --disk_mib x": ["--timeout: not a number", "--disk_mib: not a whole",
        "nowhere does not exist"],
    "doctor --python /usr/bin/python3": ["--python: is for --hosts, which is not given"],
    "ckpt lss run": ["ACTION: unknown value 'lss'; did you mean 'ls'?"],
    "ckpt ls nowhere": ["RUN: nowhere does not exist"],
    "ckpt verify nowhere run": ["PATH: nowhere does not exist", "PATH: run is neither"],
    "ckpt diff nowhere run": ["A: nowhere does not exist", "B: run: manifest.json is missing"],
    "cache prune nowhere --older_than -1": ["--older_than: -1 is no number of days", "DIR: nowhere holds no cache"],
    "cache ls": ["DIR: is required"],
    "plot": ["RUN: is required"],
    "serve-reward brightness=2 --port x --max_mib 0": ["--port: must be", "--max_mib: must be", "weight is said where"],
    "tiny ltx_vido": ["directory: is required"],
    "demo vae file --stpes 3": ["--stpes: unknown flag"],
    "quickstart --steps 0 x y": ["--steps: must be", "unexpected 'y'"],
    "models --jsn": ["--jsn: unknown flag"],
    "watch nowhere --presets lo4s --num 0": ["--num: must be at least 1, got '0'", "RUN: nowhere does not exist"],
    "watch run --onec": ["--onec: unknown flag; did you mean --once?"],
    "sample nowhere --lora_scale x --compare bsae": ["--lora_scale: not a number", "--compare: unknown value",
        "'nowhere'"],
    "sample run --num": ["--num: needs a value: seeds for each prompt"],
    "check none.toml --decode ful --decod full": ["--decode: unknown", "did you mean --decode?",
        "no such file: none.toml"],
    "estimate --gpu 24XB --rank x --num_processes 3 --num_machines 2": [
        "--gpu: expected a memory size", "--rank: not a whole", "--num_processes: 3 processes do not",
        "--pretrained_model_name_or_path: is req",
    ],
    "search-batch --gpu 24XB --margin 95 --timed_steps 0 --rank x --estimate_onyl": [
        "--gpu: expected a memory size", "--margin: must be a number of percent", "--timed_steps: must be a whole",
        "--rank: not a whole",
        "--estimate_onyl: unknown flag; did you mean --estimate_only?",
    ],
    "train --lr --rank x --enable_tiling=maybe -vae_dtype fp16": [
        "--lr: needs a value", "--rank: not a", "--enable_tiling: takes no value",
        "-vae_dtype: unknown flag; did you mean --vae_dtype?",
    ],
}  # fmt: skip


def test_config_errors_exit_with_2_or_65_before_torch_is_imported(tmp_path, tiny_repo):
    """In one process for all; no process may hang."""
    for folder in ("clips", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("")
    base = ["train", "--model_name", "ltx_video", "--pretrained_model_name_or_path", str(tiny_repo("ltx_video"))]
    cases = {
        ("--batch_siz", "2"): "did you mean --batch_size?",
        ("--data_root", "clips", "--video_resolution_buckets", "10x64x64"): "10 frames is not 8*k+1",
        ("--data_root", "none"): "none",
        ("--config", "none.toml"): "no such file",
        ("--data_root", "clips", "--resume_from_checkpoint", "latest", "--output_dir", "."): "no checkpoint in",
    }
    lines = [([*base, *arguments], [said]) for arguments, said in cases.items()]
    lines += [(line.split(), said) for line, said in MISTAKES.items()]
    code = (
        "import contextlib, io, sys\nfrom finetrainers.cli.main import main\n"
        f"for line, expected in {lines!r}:\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stderr(said):\n"
        "        code = main(line)\n"
        "    text = said.getvalue()\n"
        "    wanted = 65 if line[-2:] == ['--data_root', 'none'] else 2\n"
        "    assert code == wanted and text.startswith('error: '), (line, code, text)\n"
        "    assert [one for one in expected if one not in text] == [], (line, text)\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_wrong_values_and_wrong_combinations_are_reported_together(tmp_path, tiny_repo, capsys):
    (tmp_path / "clips").mkdir()
    arguments = [
        "--model_name", "ltx_video", "--pretrained_model_name_or_path", str(tiny_repo("ltx_video")),
        "--data_root", str(tmp_path / "clips"), "--rank", "0", "--optimzer", "lion", "--eval_steps", "5",
        "--video_resolution_buckets", "10x64x64", "--lr_scheduler", "cosin",
    ]  # fmt: skip
    assert train_command(arguments, prog="train.py") == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: 6 problems")
    for expected in (
        "must be at least 1, got '0'", "did you mean --optimizer?", "set --eval_num_items",
        "10 frames is not 8*k+1", "did you mean 'cosine'?", "captions",
    ):  # fmt: skip
        assert expected in shown


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(tmp_path, capsys):
    code = train_command(
        ["--model_name", "ltx_video", "--pretrained_model_name_or_path", "./none", "--data_root", str(tmp_path)],
        prog="train.py",
    )
    assert code == 2
    assert "no such directory: ./none" in capsys.readouterr().err


def test_without_a_family_the_model_must_be_there(tmp_path, tiny_repo, capsys):
    for place, said in (
        ("./none", "no such directory: ./none"),
        ("some/model", "no config of some/model on this disk"),
    ):
        assert main(["train", "--pretrained_model_name_or_path", place, "--data_root", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    assert main(["train", "--pretrained_model_name_or_path", str(tiny_repo("cogvideox")), "--flow_shift", "3"]) == 2
    assert "cogvideox is not a flow-matching model" in capsys.readouterr().err


def test_unknown_family_names_the_nearest(tmp_path, capsys):
    arguments = ["--model_name", "ltxvideo", "--pretrained_model_name_or_path", "x", "--data_root", str(tmp_path)]
    assert train_command(arguments, prog="train.py") == 2
    assert "did you mean 'ltx_video'?" in capsys.readouterr().err


def test_public_names_load_lazily():
    import finetrainers

    assert finetrainers.load_config.__module__ == "finetrainers.config.load"
    assert set(finetrainers.__all__) <= set(dir(finetrainers))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        finetrainers.trian  # noqa: B018


def test_module_entry_point():
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout.strip() == f"finetrainers {__version__}"


def test_what_a_launcher_left_behind_is_a_clear_error(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    for command in ("train", "prepare"):
        assert main([command, "--model_name", "ltx_video", "--bestofn", "3", "--method", "grpo"]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error: 1 problem with this environment:\n  - WORLD_SIZE: must be a whole number")


@pytest.mark.parametrize("option", ["output_dir", "precompute_dir", "probe_dir", "cache_dir"])
def test_folders_that_are_files_are_refused_before_anything_is_loaded(option, tmp_path, tiny_repo, capsys):
    (tmp_path / "clips").mkdir()
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        arguments = [
            "--model_name", "ltx_video", "--pretrained_model_name_or_path", str(tiny_repo("ltx_video")),
            "--data_root", str(tmp_path / "clips"), f"--{option}", str(place),
        ]  # fmt: skip
        assert train_command(arguments, prog="train.py") == 2
        assert f"--{option}: {tmp_path / 'file'} is a file; give a folder" in capsys.readouterr().err


def test_names_that_are_read_as_others_are_noted_by_the_first_process_alone(python, tmp_path):
    names = ("--network_dim", "8", "--load", "latest", "--framepack_window_size", "9")
    arguments = (str(ROOT / "train.py"), "--pretrained_model_name_or_path", "demo://ltx", *names)
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    first, second = (python(*arguments, cwd=tmp_path, **launched, RANK=rank) for rank in "01")
    assert (first.wait(), second.wait()) == (2, 2)
    notes, _ = first.stderr.split("error: ")
    assert notes.splitlines() == [
        "note: names of earlier versions are accepted: --framepack_window_size as --sliding_window_size",
        "note: names of other trainers are accepted: --network_dim as --rank, --load as --resume_from_checkpoint; with "
        "network_dim alone sd-scripts has an alpha of 1, here it is --lora_alpha 64",
    ]
    assert second.stderr == first.stdout == ""


TEXTS = [name for name, option in fields().items() if re.search(r"\b(str|Path)\b", str(option.field.annotation))]


def test_odd_texts_are_refused_by_name_or_do_no_harm(tmp_path, tiny_repo, monkeypatch):
    """Whatever text an option has, the answer is a ConfigError or a run that could start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips").mkdir()
    base = {"pretrained_model_name_or_path": str(tiny_repo("ltx_video")), "data_root": "clips"}
    assert len(TEXTS) > 30
    for name in TEXTS:
        for text in ("x" * 300, "/dev/null/x"):
            with contextlib.suppress(ConfigError):
                preflight(load_config(**{**base, name: [text] if is_list(fields()[name].field) else text}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"learning_rate: 1e-4\nrank: 8\n", "is YAML, and config files are TOML"),
        (b'{"rank": 8}', "is JSON, and config files are TOML"),
        ("rank = 8\nid_token = 'caf\u00e9'\n".encode("latin-1"), ":2: the file is not UTF-8; save it as UTF-8 text"),
        ("rank = 8\n".encode("utf-16"), "the file is UTF-16; save it as UTF-8 text"),
        (b"rank = \n", "not valid TOML"),
    ],
)
def test_config_files_of_another_kind_are_refused(content, said, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    assert train_command(["--config", str(file)], prog="train.py") == 2
    assert said in capsys.readouterr().err


def test_config_files_that_cannot_be_read_are_refused(tmp_path, capsys):
    for path, said in (
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / ("x" * 300), "too long"),
        ("a\0b", "NUL"),
    ):
        assert train_command(["--config", str(path)], prog="train.py") == 2
        assert said in capsys.readouterr().err


def test_output_that_nobody_reads_any_more_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `finetrainers schema | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["schema"]) == 0
