"""`finetrainers init`: its answers, its file, and that the file is checked and trained as it stands."""

from __future__ import annotations

import hashlib
import io
import re
import shlex
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_family import FAMILIES
from mixed_clips import CAPTION, write_mixed
from refusals import refused_command

from finetrainers.cli.main import main
from finetrainers.config.load import load_config
from finetrainers.config.prompts import parse_validation_prompts
from finetrainers.config.root import TrainConfig
from finetrainers.data.reading.datasets import read_datasets
from finetrainers.memory.advice import MEMORY_OPTIONS
from finetrainers.models.registry import families
from finetrainers.plan.check import check
from finetrainers.plan.preflight import preflight
from finetrainers.tools.init.choose import choose_prompts
from finetrainers.utils import exit_codes
from finetrainers.utils.video import write_mp4

DEMO = "demo://ltx"
#: Less than the demo model takes.
SMALL = "0.0185GiB"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], list[str]]:
    """`terminal(lines)`: a terminal on which these lines are typed, then Ctrl-D; returns the list of what is asked."""

    def type_lines(lines: list[str]) -> list[str]:
        typed, prompts = iter(lines), []

        def answer(prompt: str) -> str:
            prompts.append(prompt)
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        stdin = io.StringIO()
        stdin.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr("builtins.input", answer)
        return prompts

    return type_lines


def sampled(config: TrainConfig) -> list[str]:
    return [prompt.prompt for prompt in parse_validation_prompts(config.validation)]


def uncommented(path: Path) -> Path:
    """A copy of a file in which the options that are comments are set."""
    lines = [
        line.removeprefix("# ") if line.startswith("# ") and line.split()[2:3] == ["="] else line
        for line in path.read_text().splitlines()
    ]
    copy = path.with_name("set.toml")
    copy.write_text("\n".join(lines))
    return copy


def test_missing_captions_are_counted_before_training(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(*arguments: str) -> list[str]:
        assert main([*arguments]) == exit_codes.DONE
        return capsys.readouterr().out.splitlines()

    def warnings(lines: list[str]) -> list[str]:
        return [line for line in lines if line.startswith("warning: ") and "caption" in line]

    count = write_mixed(here / "clips", copies=1)
    for file in (here / "clips").glob("*.txt"):
        file.unlink()
    [data] = [line for line in printed("init", "clips", "--trigger_word", "ZORK") if line.startswith("data: ")]
    assert re.search(rf"\b{count} .*caption", data)
    [warning] = warnings(printed("check", "run.toml"))
    assert f"{count} of {count} " in warning
    assert "ZORK" in warning
    lines = printed("train", "run.toml", "--dry_run")
    assert warnings(lines) == [warning]
    assert not [line for line in lines if line.startswith("chosen (") and "resolution_buckets" in line]  # in a note

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = printed("check", "run.toml")
    [start] = [number for number, line in enumerate(lines) if line.startswith("warning: ") and "caption" in line]
    assert max(map(len, lines[start:])) <= 60
    assert " ".join(lines[start:]).startswith(warning)

    next((here / "clips").glob("*.mp4")).with_suffix(".txt").write_text("a caption")
    [warning] = warnings(printed("check", "run.toml", "--id_token", ""))
    assert f" {count - 1} of {count} " in warning
    assert "ZORK" not in warning


def test_a_mixed_directory_becomes_a_file_that_is_checked_and_trained(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = write_mixed(here / "clips", copies=4)
    (here / "clips" / "cut.mp4").write_bytes(b"no video")
    (here / "clips" / "cut.txt").write_text("a cut clip")
    (here / "clips" / "photo-0.txt").unlink()
    assert main(["init", "clips", "--trigger_word", "ZORK"]) == exit_codes.DONE
    printed = capsys.readouterr().out
    assert "16 clips and 4 images" in printed
    assert "cut.mp4" in printed

    config, path = load_config("run.toml"), Path("run.toml")
    assert config.model.pretrained_model_name_or_path == DEMO  # there is no GPU
    assert (config.data.id_token, config.data.max_bad_samples, config.data.caption_missing) == ("ZORK", 1, "empty")
    assert (config.data.eval_num_items, config.run.output_dir) == (count // 10, Path("runs/zork"))
    like, elsewhere, scene = sampled(config)
    assert like.startswith(f"ZORK {CAPTION}")
    assert elsewhere == f"ZORK {scene}"

    checked = preflight(config)
    lora = checked.facts.lora
    assert lora is not None
    assert {name: config.get(name) for name in lora.options} == dict(lora.options)
    assert config.training.checkpointing_steps * 5 <= checked.config.training.train_steps
    explicit = load_config(uncommented(path), prior_preservation_weight=0.0)
    for name in checked.config.chosen:  # what the comments show is what a run chooses
        assert explicit.get(name) == checked.config.get(name), name
    assert explicit.is_given("rank")

    commands = [shlex.split(line)[1:] for line in printed.splitlines() if line.startswith("  finetrainers")]
    assert [words[0] for words in commands] == ["check", "train"]
    assert main(commands[0]) == exit_codes.DONE
    short = ["--train_steps", "2", "--rank", "2", "--lora_alpha", "2", "--validation_inference_steps", "2"]
    short += ["--validation_prompts", "ZORK", "--eval_num_timesteps", "1"]
    assert main([*commands[1], *short]) == exit_codes.DONE
    assert (here / "runs" / "zork" / "pytorch_lora_weights.safetensors").is_file()


def test_questions_are_asked_on_a_terminal_until_answers_are_valid(
    here: Path, terminal: Callable[[list[str]], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixed(here / "clips")
    (here / "runs" / "zork").mkdir(parents=True)
    answers = ["", "3 GB of memory", "cpu", "99", "1", "stile", "4", "ZORK", "nowhere", "", ""]
    prompts = terminal(answers)
    assert main(["init", "--output", "new/my.toml"]) == exit_codes.DONE
    assert len(prompts) == len(answers)
    config = load_config("new/my.toml")
    assert (config.run.output_dir, config.data.id_token) == (Path("runs/zork-2"), "ZORK")
    assert all(name in prompts[3] for name in [DEMO, *(name for f in families().values() for name in f.starters)])

    asked = terminal(["nowhere"])
    assert main(["init", "--output", "other.toml", "--kind", "general"]) == exit_codes.killed_by(2)
    assert "nowhere" in asked[1]
    assert not Path("other.toml").exists()
    asked = terminal(["", "cpu", "1", "none"])
    assert main(["init", "--output", "other.toml", "--kind", "style"]) == exit_codes.killed_by(2)
    assert "runs/" in asked[4]  # without a trigger word there are no other clips
    terminal([])
    assert main(["init", "--output", "other.toml", "--kind", "general", "--yes"]) == exit_codes.DONE
    assert load_config("other.toml").data.id_token is None
    assert "prior_preservation" not in Path("other.toml").read_text()
    capsys.readouterr()


@pytest.mark.parametrize("copies", [1, 3])
def test_other_clips_train_without_the_trigger_word(
    copies: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = write_mixed(here / "clips"), write_mixed(here / "stock" / "city", copies=copies)
    command = ["init", "clips", "--trigger_word", "ZORK", "--other_clips", "stock", "--output", "new/my.toml", "--yes"]
    assert main(command) == exit_codes.DONE
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data: ")]
    assert re.search(rf"\b4 clips, 1 image, {4 * copies} other ", line)
    config = load_config("new/my.toml")
    assert sampled(config)[0].startswith("ZORK ")
    assert "--other_clips" not in Path("new/my.toml").read_text()
    items = check(config)["items"]
    assert [item["caption"].count("ZORK") for item in items] == [1] * own + [0] * other
    datasets = read_datasets(config.data)
    assert [dataset.weight for dataset in datasets] == ([None, None] if copies == 1 else [1, 2])
    assert main(["train", "new/my.toml", "--dry_run"]) == exit_codes.DONE


def test_other_clips_that_cannot_be_told_apart_are_refused(here: Path) -> None:
    write_mixed(here / "clips" / "more", images_only=True)
    (here / "broken").mkdir()
    (here / "broken" / "cut.mp4").write_bytes(b"no video")
    command = ["init", "clips", "--yes", "--other_clips"]
    assert refused_command([*command, "clips/more"])[1] == [("--other_clips", "conflict")]
    assert refused_command([*command, "clips/.."])[1] == [("--other_clips", "conflict")]
    assert refused_command([*command, "broken", "--trigger_word", "none"])[1] == [("--other_clips", "conflict")]
    assert refused_command([*command, "nowhere"])[1] == [("--other_clips", "not_found")]
    assert refused_command([*command, "broken"]) == (exit_codes.UNUSABLE_DATA, [("data", "not_found")])
    assert not list(here.glob("*.toml"))
    Path("run-data.toml").touch()
    assert refused_command([*command, "broken"])[1] == [("--output", "occupied")]


def test_what_cannot_become_a_run_is_refused(here: Path) -> None:
    assert refused_command(["init", "--model", "Lightricks/LTX-Video"]) == (
        exit_codes.CONFIGURATION, [("DIR", "required"), ("--card", "required")],
    )  # fmt: skip
    write_mixed(here / "photos", images_only=True)
    (here / "empty").mkdir()
    (here / "run.toml").touch()
    (here / "full").mkdir()
    (here / "full" / "file").touch()
    flags = {"--model": "Lightrick/LTX-Video", "--card": "8 apples", "--kind": "stile", "--output_dir": "full"}
    code, problems = refused_command(["init", "nowhere", *(word for pair in flags.items() for word in pair)])
    assert code == exit_codes.CONFIGURATION
    assert problems == [
        ("--output", "occupied"), ("DIR", "not_found"), ("--card", "unknown"), ("--model", "unknown"),
        ("--kind", "unknown"), ("--output_dir", "occupied"),
    ]  # fmt: skip
    assert refused_command(["init", "photos", "--output", "x.toml", "--card", "this"])[1] == [("--card", "unavailable")]
    (here / "broken").mkdir()
    (here / "broken" / "cut.mp4").write_bytes(b"no video")
    refusal = refused_command(["init", "empty", "--output", "x.toml"])  # before torch is imported
    assert refusal == (exit_codes.CONFIGURATION, [("DIR", "not_found")])
    refusal = refused_command(["init", "broken", "--output", "x.toml"])
    assert refusal == (exit_codes.UNUSABLE_DATA, [("data", "not_found")])
    assert refused_command(["init", "photos", "--kind", "motion", "--output", "x.toml"])[1] == [("--kind", "conflict")]
    assert not Path("x.toml").exists()


def test_the_nearest_model_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["init", "--model", "Lightrick/LTX-Video"])
    assert "Lightricks/LTX-Video" in capsys.readouterr().err


def test_parts_of_names_are_answered_with_models(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, name in (("wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"), ("hunyuan_video", "tencent/HunyuanVideo")):
        assert refused_command(["init", "--model", text, "--yes"])[1][0] == ("--model", "unknown")
        assert name.lower() in capsys.readouterr().err.lower()


def test_the_only_clip_of_a_size_is_trained_on(here: Path) -> None:
    """Of the two clips that would be held out, the second is the only upright one."""

    def digest(name: str) -> str:
        return hashlib.sha256(f"{name}.mp4\0{name}".encode()).hexdigest()

    wide = [f"wide{index}" for index in range(20)]
    first, second = sorted(map(digest, wide))[:2]
    tall = next(name for name in (f"tall{index}" for index in count()) if first < digest(name) < second)
    for name in (*wide, tall):
        write_mp4(
            here / "clips" / f"{name}.mp4", np.zeros((9, *((64, 96) if name != tall else (96, 64)), 3), "u1"), fps=8
        )
        (here / "clips" / f"{name}.txt").write_text(name)
    assert main(["init", "clips", "--trigger_word", "none", "--card", "cpu", "--yes"]) == exit_codes.DONE
    assert load_config("run.toml").data.eval_num_items == 1
    assert "first_frame_conditioning_p" in Path("run.toml").read_text()


#: Further versions, whose samples begin, and of one end, with an image.
FROM_IMAGES = (("wan", "flf2v"), ("wan", "i2v"), ("hunyuan_video_15", "i2v"), ("kandinsky5", "i2v"))


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version"), [*((family, None) for family in FAMILIES), *FROM_IMAGES])
def test_every_family_gets_a_file_that_passes_its_dry_run(
    family: str, version: str | None, here: Path, tiny_repo: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixed(here / "clips")
    repo = tiny_repo(family, **({} if version is None else {"version": version}))
    assert main(["init", "clips", "--model", str(repo), "--kind", "character"]) == exit_codes.DONE
    assert main(["train", "run.toml", "--dry_run"]) == exit_codes.DONE
    capsys.readouterr()


def test_a_checkpoint_that_animates_images_leaves_images_out(here: Path, tiny_repo: Callable[..., Path]) -> None:
    """The file allows as many, and samples start from a clip."""
    write_mixed(here / "clips", copies=2)
    model = str(tiny_repo("wan", "i2v"))
    assert main(["init", "clips", "--model", model, "--kind", "motion", "--card", "cpu"]) == exit_codes.DONE
    config = load_config("run.toml")
    assert config.data.max_bad_samples == 2
    assert all(prompt.video and not prompt.image for prompt in parse_validation_prompts(config.validation))
    assert {bucket[0] > 1 for bucket in preflight(config).plan.buckets} == {True}


def test_the_file_fits_the_card(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mixed(here / "clips")
    assert main(["init", "clips", "--model", DEMO, "--card", SMALL]) == exit_codes.DONE
    assert main(["estimate", "run.toml", "--gpu", SMALL]) == exit_codes.DONE
    assert "it fits" in capsys.readouterr().out


#: Clips of these tests are tiny, so text encoders need most.
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("card", "added", "model"),
    [
        ("8GB", ["quantize_text_encoders"], "Lightricks/LTX-Video"),
        ("24GB", [], "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    ],
)
def test_a_published_model_is_planned_without_its_configs(
    card: str, added: list[str], model: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixed(here / "clips")
    assert main(["init", "clips", "--card", card, "--host", "32GB", "--yes"]) == exit_codes.DONE
    printed, config = capsys.readouterr().out, load_config("run.toml")
    assert config.model.pretrained_model_name_or_path == model
    options = {name for switch in MEMORY_OPTIONS for name in switch.options} - {"precompute_conditions"}
    assert [name for name in options if config.is_given(name)] == added
    assert "GPU and" in printed
    assert "host memory" in Path("run.toml").read_text()
    assert main(["estimate", "run.toml", "--gpu", card, "--host", "32GB"]) == exit_codes.DONE
    assert "it fits" in capsys.readouterr().out


@pytest.mark.rotating
def test_a_model_that_does_not_fit_is_refused_with_one_that_does(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixed(here / "clips")
    large = ["init", "clips", "--model", "hunyuanvideo-community/HunyuanVideo", "--card"]
    assert main([*large, "24GB", "--host", "16GB"]) == exit_codes.CONFIGURATION
    assert "--model Wan-AI/Wan2.2-TI2V-5B-Diffusers, which fits" in capsys.readouterr().err
    assert refused_command([*large, "cpu", "--host", "16GB"])[1] == [("--card", "too_large")]
    assert not Path("run.toml").exists()
    assert main(["init", "clips", "--card", "2GB"]) == exit_codes.DONE  # no published model fits
    assert load_config("run.toml").model.pretrained_model_name_or_path == DEMO
    capsys.readouterr()


def test_prompts_show_what_was_learned_and_what_was_not() -> None:
    items = [
        {"kind": "image", "caption": "x"},
        {"kind": "video", "caption": "a:::b"},
        {"kind": "video", "caption": "y"},
    ]
    assert choose_prompts(items, "W", "boat", in_captions=False) == ["W y", "W boat", "boat"]
    assert choose_prompts(items, "", "boat", in_captions=False) == ["y", "x", "boat"]
    named: list[dict[str, Any]] = [*items, {"kind": "video", "caption": "a w"}]
    assert choose_prompts(named, "W", "boat", in_captions=True) == ["a w", "W boat", "boat"]
    assert choose_prompts([], "W", "boat", in_captions=False) == ["W boat", "boat"]
