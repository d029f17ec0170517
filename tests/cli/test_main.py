"""The commands as a user types them: help, lists, tiny models, schemas, and errors with exit code 2."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused_command

from finetrainers import __version__
from finetrainers.cli.main import _parser, main, train_command
from finetrainers.config.document import configuration_page
from finetrainers.config.errors import ConfigError
from finetrainers.config.flags import parse_flags
from finetrainers.config.load import load_config
from finetrainers.config.root import fields
from finetrainers.config.shape import is_list
from finetrainers.demo import quickstart, rewarded, scratch
from finetrainers.models.registry import families
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
        "main([]); main(['models']); main(['schema'])\n"
        "assert 'av' not in sys.modules; main(['docs'])\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'accelerate'} & set(sys.modules)\n"
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
        "polynomial, bump",
    ):
        assert expected in text
    options = re.findall(r"^  --(?!help)(\w+)", text, flags=re.MULTILINE)
    assert options[:2] == ["config", "list_models"]
    assert len(options[2:]) == 29
    assert {"memory_budget", "quantize_frozen", "blocks_to_swap", "eval_num_items"} <= set(options)
    assert set(options[2:]) <= set(fields())
    assert len(text.splitlines()) < 150
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
        ("rank", ["rank"], "Also accepted: --lora_rank,"),
        ("Lora-Rank", ["rank"], "Rank of the LoRA"),
        ("lr_scheduler", ["lr_scheduler"], "One of: constant, constant_with_warmup,"),
        ("parallel", None, "--fsdp"),
        ("optimizer", None, "--max_grad_norm X"),
        ("upcasting", None, "--layerwise_upcasting_modules"),
        ("nccl_timeut", ["nccl_timeout"], "stuck collective"),
        ("block_swap", ["blocks_to_swap"], "--blocks_to_swap {auto,N}"),
        ("memory", None, "--gradient_checkpointing"),
        ("vram", ["memory_budget", "gradient_checkpointing", "quantize_frozen", "blocks_to_swap"], "memory.md"),
        ("activation_memory", ["activation_memory"], "offload, auto."),
        ("preset", None, "--grpo_preset few-steps: one GPU; 32 clips;"),
    ],
)
@pytest.mark.usefixtures("narrow")
def test_help_on_a_word(word, shown, said, capsys):
    text = helped(capsys, "train", "--help", word)
    assert said in " ".join(text.split())
    assert "usage:" not in text
    if shown is not None:
        assert re.findall(r"^  --(\w+)", text, flags=re.MULTILINE) == shown


@pytest.mark.usefixtures("narrow")
def test_help_lists_the_recipes_and_where_they_are(capsys):
    text = helped(capsys, "train", "--help", "recipes")
    root = Path(__file__).parents[2]
    recipes = [f"{path.parent.name}/{path.stem}" for path in sorted((root / "examples").glob("*/*.toml"))]
    assert re.findall(r"^  ([a-z]\S+)  ", text, flags=re.MULTILINE) == recipes
    assert f"{root / 'examples'}" in text
    assert f"{root / 'accelerate_configs'}" in text


def test_help_on_what_does_not_exist(capsys):
    assert main(["train", "--help", "zzz"]) == 2
    said = capsys.readouterr().err
    assert "'zzz'" in said
    assert "model data" in said


@pytest.mark.usefixtures("narrow")
def test_the_commands_are_grouped_by_task(capsys):
    text = helped(capsys, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert [line for line in text.splitlines() if re.fullmatch(r"[a-z ]+:", line)] == [
        "get started:",
        "train:",
        "evaluate:",
        "export:",
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
        ("generate", "`sample RUN --prompts PROMPTS` generates clips"),
        ("resume", "--resume_from_checkpoint latest"),
        ("lora", "`train` trains"),
        ("trian", "'train'?"),
        ("caption", "`check`"),
        ("gui", "`report RUN`"),
        ("stop", "control/stop"),
        ("status", "`ckpt ls RUN`"),
        ("upload", "--push_to_hub"),
        ("vram", "`estimate "),
        ("inference-server", "`watch RUN`"),
        ("nvtop_all.py", "published-commands.md"),
        ("frobnicate", "train, prepare"),
    ],
)
def test_commands_that_do_not_exist_say_what_to_use(command, said, capsys):
    assert main([command, "--anything"]) == 2
    assert said in capsys.readouterr().err


def test_no_arguments_point_to_the_quickstart(capsys):
    assert main(["train"]) == 2
    said = capsys.readouterr().err
    assert "finetrainers train --help" in said
    assert "finetrainers quickstart" in said


def test_the_file_of_options_may_come_first(tmp_path):
    (tmp_path / "run.toml").write_text('model_name = "m"\npretrained_model_name_or_path = "r"\nrank = 4\n')
    config, _ = parse_flags([str(tmp_path / "run.toml"), "--rank", "8"])
    assert config.training.rank == 8


def test_models(capsys):
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert train_command(["--list_models"], prog="train.py") == 0
    assert capsys.readouterr().out == listed
    assert set(families()) <= set(listed.split())


def test_schema_and_docs(capsys):
    assert main(["schema"]) == 0
    assert "rank" in json.loads(capsys.readouterr().out)["properties"]
    assert main(["docs"]) == 0
    assert capsys.readouterr().out == configuration_page()


def test_tiny_writes_a_loadable_repository(tmp_path, capsys):
    assert main(["tiny", "ltx_video", str(tmp_path / "ltx")]) == 0
    assert (tmp_path / "ltx" / "model_index.json").is_file()
    assert str(tmp_path / "ltx") in capsys.readouterr().out
    assert refused_command(["tiny", "ltx_vido", tmp_path / "x"]) == (2, [("family", "unknown")])
    assert "'ltx_video'" in capsys.readouterr().err
    again = ["tiny", "ltx_video", tmp_path / "ltx", "--version", "i2v"]
    assert refused_command(again) == (2, [("directory", "occupied"), ("--version", "unknown")])


#: Mistakes in every command. For each: the places of its problems, and values and names that a message must contain.
MISTAKES = {
    "export": ["SOURCE", "--format"],
    "export run --fromat comfyui": ["--fromat --format"],
    "export nowhere --format comfy --lora_scale nan --output_dir file": [
        "--format 'comfy'", "--lora_scale nan", "--output_dir file", "SOURCE 'nowhere'",
    ],
    "report nowhere run --videos x --output file": ["--videos 'x'", "RUN nowhere", "RUN run", "--output .html"],
    "sync nowhere file --every 0": ["--every '0'", "RUN nowhere", "TARGET file"],
    "sync --evrey 5 run x": ["--evrey --every"],
    "doctor none.toml --hosts nowhere --timeout 0 --disk_mib x": ["--timeout '0'", "--disk_mib 'x'", "--hosts nowhere"],
    "doctor --python /usr/bin/python3": ["--python --hosts"],
    "ckpt lss run": ["ACTION 'lss' 'ls'"],
    "ckpt ls nowhere": ["RUN nowhere"],
    "ckpt verify nowhere run": ["PATH nowhere", "PATH run"],
    "ckpt diff nowhere run": ["A nowhere", "B run: manifest.json"],
    "cache prune nowhere --older_than -1": ["--older_than -1", "DIR nowhere"],
    "cache ls": ["DIR"],
    "plot": ["RUN"],
    "serve-reward brightness=2 --port x --max_mib 0": ["--port 'x'", "--max_mib '0'", "reward weight"],
    "tiny ltx_vido": ["directory"],
    "demo vae file --stpes 3": ["--stpes"],
    "quickstart --steps 0 x y": ["--steps '0'", "unexpected 'y'"],
    "models --jsn": ["--jsn"],
    "watch nowhere --presets lo4s --num 0": ["--num '0'", "RUN nowhere"],
    "watch run --onec": ["--onec --once"],
    "sample nowhere --lora_scale x --compare bsae": ["--lora_scale 'x'", "--compare 'bsae'", "TARGET 'nowhere'"],
    "sample run --num": ["--num seeds"],
    "sample run --steps 9": ["--steps --num_inference_steps"],
    "check none.toml --decode ful --decod full": ["--decode 'ful'", "--decod --decode", "--config none.toml"],
    "estimate --gpu 24XB --rank x --num_processes 3 --num_machines 2": [
        "--gpu '24XB'", "--rank 'x'", "--num_processes 3 2", "--pretrained_model_name_or_path",
    ],
    "search-batch --gpu 24XB --margin 95 --timed_steps 0 --rank x --estimate_onyl": [
        "--gpu '24XB'", "--margin '95'", "--timed_steps '0'", "--rank 'x'", "--estimate_onyl --estimate_only",
    ],
    "train --lr --rank x --enable_tiling=maybe -vae_dtype fp16": [
        "--lr", "--rank 'x'", "--enable_tiling 'maybe'", "-vae_dtype --vae_dtype",
    ],
}  # fmt: skip


def test_config_errors_exit_with_2_or_65_before_torch_is_imported(tmp_path, tiny_repo):
    """In one process for all; no process may hang."""
    for folder in ("clips", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("")
    base = ["train", "--model_name", "ltx_video", "--pretrained_model_name_or_path", str(tiny_repo("ltx_video"))]
    cases = {
        ("--batch_siz", "2"): "--batch_siz --batch_size",
        ("--data_root", "clips", "--video_resolution_buckets", "10x64x64"): "--video_resolution_buckets 10 8*k+1",
        ("--data_root", "none"): "data none",
        ("--config", "none.toml"): "--config none.toml",
        ("--data_root", "clips", "--resume_from_checkpoint", "latest", "--output_dir", "."): "--resume_from_checkpoint",
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
        "    for place, *values in map(str.split, expected):\n"
        "        problems = [one for one in text.splitlines() if one.startswith(f'  - {place}')]\n"
        "        assert any(all(value in one for value in values) for one in problems), (line, place, values, text)\n"
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
        "--rank: .*'0'", "--optimzer: .*--optimizer", "--eval_steps: .*--eval_num_items",
        r"--video_resolution_buckets: .*10.*8\*k\+1", "--lr_scheduler: .*'cosine'", "captions",
    ):  # fmt: skip
        assert re.search(expected, shown)


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(tmp_path, capsys):
    code = train_command(
        ["--model_name", "ltx_video", "--pretrained_model_name_or_path", "./none", "--data_root", str(tmp_path)],
        prog="train.py",
    )
    assert code == 2
    said = capsys.readouterr().err
    assert "--pretrained_model_name_or_path: " in said
    assert "found: ./none" in said


def test_without_a_family_the_model_must_be_there(tmp_path, tiny_repo, capsys):
    for model, place in (("./none", "--pretrained_model_name_or_path"), ("some/model", "--model_name")):
        assert main(["train", "--pretrained_model_name_or_path", model, "--data_root", str(tmp_path)]) == 2
        assert re.search(rf"- {place}: .*{model}", capsys.readouterr().err)
    assert main(["train", "--pretrained_model_name_or_path", str(tiny_repo("cogvideox")), "--flow_shift", "3"]) == 2
    assert re.search("- --flow_shift: .*cogvideox", capsys.readouterr().err)


def test_unknown_family_names_the_nearest(tmp_path, capsys):
    arguments = ["--model_name", "ltxvideo", "--pretrained_model_name_or_path", "x", "--data_root", str(tmp_path)]
    assert train_command(arguments, prog="train.py") == 2
    assert re.search("- --model_name: .*'ltx_video'", capsys.readouterr().err)


def test_flags_of_an_inference_server_are_answered_by_watch(tmp_path, capsys):
    assert main(["watch", str(tmp_path), "--expnums", "656"]) == 2
    [problem] = [line for line in capsys.readouterr().err.splitlines() if "--expnums" in line]
    assert "--presets " in problem


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
        assert shown.splitlines()[1].startswith("  - WORLD_SIZE: ")
        assert "'abc'" in shown


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
        assert f"--{option}: {tmp_path / 'file'} " in capsys.readouterr().err


def test_names_that_are_read_as_others_are_noted_by_the_first_process_alone(python, tmp_path):
    names = ("--network_dim", "8", "--load", "latest", "--framepack_window_size", "9")
    arguments = (str(ROOT / "train.py"), "--pretrained_model_name_or_path", "demo://ltx", *names)
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    first, second = (python(*arguments, cwd=tmp_path, **launched, RANK=rank) for rank in "01")
    assert (first.wait(), second.wait()) == (2, 2)
    notes, _ = first.stderr.split("error: ")
    earlier, other = notes.splitlines()
    assert earlier.endswith(": --framepack_window_size as --sliding_window_size")
    assert ": --network_dim as --rank, --load as --resume_from_checkpoint; " in other
    assert other.endswith(" of --lora_alpha")
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
        (b"learning_rate: 1e-4\nrank: 8\n", "YAML"),
        (b'{"rank": 8}', "JSON"),
        ("rank = 8\nid_token = 'caf\u00e9'\n".encode("latin-1"), "run.toml:2: "),
        ("rank = 8\n".encode("utf-16"), "UTF-16"),
        (b"rank = \n", "valid TOML"),
    ],
)
def test_config_files_of_another_kind_are_refused(content, said, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    assert train_command(["--config", str(file)], prog="train.py") == 2
    assert said in capsys.readouterr().err


def test_config_files_that_cannot_be_read_are_refused(tmp_path, capsys):
    for path, said in (
        (tmp_path, "finetrainers init "),
        (tmp_path / ("x" * 300), "too long"),
        ("a\0b", "NUL"),
        ("configs/opensora-v1-2/lambda/stage1.py", "published-commands.md"),
        ("scripts/finetune/finetune_hunyuan_grpo_6gpus.sh", "published-commands.md"),
    ):
        assert train_command(["--config", str(path)], prog="train.py") == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["schema", "train --help all"])
def test_output_that_nobody_reads_any_more_is_no_failure(command: str) -> None:
    """As with `finetrainers schema | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "finetrainers", *command.split()]
    done = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="not here")
def test_help_that_cannot_be_written_is_a_failure() -> None:
    with open("/dev/full", "wb") as full:
        program = [sys.executable, "-m", "finetrainers", "--help"]
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
