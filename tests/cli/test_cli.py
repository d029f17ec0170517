"""The commands as a user types them: help, lists, tiny models, schemas, and errors with exit code 2."""

import json
import subprocess
import sys

import pytest

from finetrainers import __version__
from finetrainers.cli.main import main, train_command
from finetrainers.config.document import configuration_page


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


def test_train_help_teaches_every_option(capsys):
    with pytest.raises(SystemExit):
        train_command(["--help"], prog="train.py")
    text = capsys.readouterr().out
    for expected in ("--video_resolution_buckets", "--config FILE", "FxHxW", "{lora,full-finetune}", "[500]"):
        assert expected in text


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


def test_config_errors_exit_with_2_before_torch_is_imported(tmp_path, tiny_repo):
    clip_folder = tmp_path / "clips"
    clip_folder.mkdir()
    base = ["train", "--model_name", "ltx_video", "--pretrained_model_name_or_path", str(tiny_repo("ltx_video"))]
    cases = {
        ("--batch_siz", "2"): "did you mean --batch_size?",
        ("--data_root", str(clip_folder), "--video_resolution_buckets", "10x64x64"): "10 frames is not 8*k+1",
        ("--data_root", str(tmp_path / "none")): "none",
        ("--config", str(tmp_path / "none.toml")): "no such file",
        ("--data_root", str(clip_folder), "--resume_from_checkpoint", "latest", "--output_dir", str(tmp_path)): (
            "no checkpoint in"
        ),
    }
    for arguments, expected in cases.items():
        code = (
            "import sys\nfrom finetrainers.cli.main import main\n"
            f"code = main({[*base, *arguments]!r})\n"
            "assert code == 2, code\nassert 'torch' not in sys.modules\n"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        assert expected in result.stderr


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
        "greater than or equal to 1, got '0'", "did you mean --optimizer?", "set --eval_num_items",
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
        assert f"--{option}: {tmp_path / 'file'} is a file; give a directory" in capsys.readouterr().err


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
