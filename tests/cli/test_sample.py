"""`finetrainers sample` refuses what cannot be sampled before it loads anything, and says everything at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from refusals import refused_command
from safetensors.torch import save_file

from finetrainers.cli.main import main
from finetrainers.cli.sample import own_options
from finetrainers.config.sample import SampleSection, options_of_runs
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.sampling import run
from finetrainers.utils.failures import Kind
from finetrainers.utils.versions import __version__


@pytest.fixture
def refused(
    tiny_repo: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Return the command's output; it draws nothing. MODEL, I2V, HUNYUAN: tiny repositories; LORA: a LoRA of none."""
    monkeypatch.setattr(run, "join", lambda config: pytest.fail("it loads"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mystyle").mkdir(parents=True)
    save_file({"transformer.blocks.7.to_q.lora_A.weight": torch.zeros(4, 8)}, tmp_path / "lora.safetensors")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    Image.effect_noise((64, 32), 50).save(tmp_path / "whole.png")
    (tmp_path / "short.png").write_bytes((tmp_path / "whole.png").read_bytes()[:-500])
    (tmp_path / "empty.mp4").touch()
    places = {"MODEL": ("ltx_video", None), "I2V": ("cogvideox", "i2v"), "HUNYUAN": ("hunyuan_video", None)}

    def say(arguments: Sequence[str]) -> str:
        given = [str(tiny_repo(*places[one])) if one in places else one for one in arguments]
        assert main(["sample", *given]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert list(tmp_path.glob("samples*")) == []
        return printed.err

    return say


PROMPT = ("--prompts", "a ball", "--size", "9x32x32")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ["TARGET"]),
        (("runs/mystle", *PROMPT), ["TARGET 'mystle' 'runs/mystyle' LoRA"]),
        (("runs/mystyle", *PROMPT), ["TARGET runs/mystyle transformer"]),
        (("demo://ltxx", *PROMPT), ["TARGET 'demo://ltxx' 'demo://ltx'"]),
        (
            ("lora.safetensors", *PROMPT),
            ["--pretrained_model_name_or_path lora.safetensors"],
        ),
        (("MODEL",), ["--prompts"]),
        (("MODEL", "--prompts", "a ball"), ["--size"]),
        (("MODEL", "--prompts", "empty.txt"), ["empty.txt prompts"]),
        (("MODEL", "--prompts", "absent.jsonl"), ["--prompts absent.jsonl"]),
        (
            (
                "MODEL",
                "--prompts",
                "a ball@@@9x33x32:::b",
                "--image",
                "absent.png",
                "--num",
                "0",
                "--lora_scale",
                "0.5",
                "x",
            ),
            ["--num '0'", "--lora_scale 'x'"],
        ),
        (
            (
                "MODEL",
                "--prompts",
                "a ball@@@9x33x32",
                "--image",
                "absent.png",
                "--lora_scale",
                "0.5",
                "--compare",
                "base",
            ),
            ["--image absent.png", "--prompts 9x33x32", "--lora_scale", "--compare"],
        ),
        (
            ("MODEL", *PROMPT, "--num_inference_steps", "1"),
            ["--num_inference_steps scheduler 2 1"],
        ),
        (("MODEL", *PROMPT, "--negative_prompt", "x", "--guidance_scale", "1"), ["--negative_prompt guidance 1"]),
        (("HUNYUAN", *PROMPT, "--negative_prompt", "blurry"), ["--negative_prompt guidance"]),
        (("HUNYUAN", *PROMPT, "--image", __file__), ["--image frame"]),
        (("MODEL", *PROMPT, "--image", "short.png"), ["--image short.png truncated"]),
        (("MODEL", *PROMPT, "--image", "empty.txt"), ["--image empty.txt PIL"]),
        (("MODEL", *PROMPT, "--video", "empty.mp4"), ["--video empty.mp4"]),
        (("I2V", *PROMPT), ["--image checkpoint"]),
        (("MODEL", *PROMPT, "--lr", "1"), ["--lr training"]),
        (("MODEL", *PROMPT, "--validation_prompts", "x"), ["--validation_prompts --prompts"]),
        (("MODEL", *PROMPT, "--lora_scales", "1"), ["--lora_scales --lora_scale?"]),
        (("MODEL", *PROMPT, "--vae_dtype", "fp31"), ["--vae_dtype"]),
        (("MODEL", *PROMPT, "--output_dir", __file__), ["--output_dir test_sample.py"]),
        (("MODEL", "HUNYUAN", *PROMPT), ["TARGET --pretrained_model_name_or_path"]),
    ],
)
def test_refusals(arguments: tuple[str, ...], said: list[str], refused: Callable[..., str]) -> None:
    """Each of `said` is a place, then values and names that its message must contain."""
    text = refused(arguments)
    for place, *values in map(str.split, said):
        problems = [line for line in text.splitlines() if line.startswith(f"  - {place}")]
        assert any(all(value in line for value in values) for line in problems), (place, values, text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ("TARGET", "required")),
        (("MODEL", *PROMPT, "--lr", "1"), ("--lr", "unknown")),
        (("MODEL", *PROMPT, "--validation_prompts", "x"), ("--validation_prompts", "unknown")),
        (("MODEL", *PROMPT, "--lora_scales", "1"), ("--lora_scales", "unknown")),
    ],
)
def test_kinds_of_wrong_arguments(
    arguments: tuple[str, ...], expected: tuple[str, Kind], tiny_repo: Callable[..., Path]
) -> None:
    given = [tiny_repo("ltx_video") if word == "MODEL" else word for word in arguments]
    assert refused_command(["sample", *given]) == (2, [expected])


def test_what_a_family_has_no_hook_for_is_refused(
    tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hook in ("attention_processor", "image_pipeline_class"):
        monkeypatch.setattr(LTXVideoSpec, hook, None)
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    arguments = [tiny_repo("ltx_video"), *PROMPT, "--image", tmp_path / "a.png", "--attn_backend", "native"]
    expected = [("--attn_backend", "unsupported"), ("--image", "unsupported")]
    assert refused_command(["sample", *arguments]) == (2, expected)


def test_a_launcher_that_splits_the_network_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert "accelerate_configs/ddp.yaml" in refused(("MODEL", *PROMPT))


def test_a_lora_of_another_model_is_refused(
    tiny_repo: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, shape, said in (("blocks.7.to_q", 8, "blocks.7.to_q"), ("proj_in", 5, " 5 inputs")):
        weights = {f"transformer.{name}.lora_A.weight": torch.zeros(4, shape)}
        save_file({**weights, f"transformer.{name}.lora_B.weight": torch.zeros(8, 4)}, tmp_path / "lora.safetensors")
        code = main([
            "sample", str(tmp_path / "lora.safetensors"), "--pretrained_model_name_or_path",
            str(tiny_repo("ltx_video")), *PROMPT,
            "--output_dir", str(tmp_path / "out"),
        ])  # fmt: skip
        assert code == 2
        assert said in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_drawn(
    tiny_repo: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("# mine\na ball@@@1x64x32\n\na star\n")
    flags = ("--prompts", str(tmp_path / "prompts.txt"), "--size", "9x32x32", "--num", "3", "--dry_run")
    assert main(["sample", str(tiny_repo("ltx_video")), *flags]) == 0
    out = capsys.readouterr().out
    assert "6 clips of" in out
    assert "2 prompts x 1 column x 3 seeds, 1x64x32, 9x32x32, 50 denoising steps" in out
    assert "memory, estimated: " in out
    assert out.splitlines()[-1].split()[-1].startswith("samples")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sample", "--help"])
    text = capsys.readouterr().out
    assert [name for name in SampleSection.model_fields if f"--{name}" not in text] == []
    assert max(map(len, text.splitlines())) <= 81
    flags = {action.dest for action in own_options()._actions}
    assert set(options_of_runs()) <= flags


def test_a_run_of_another_version_is_named_where_its_options_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(
        '[future]\nthing = 3\n[model]\npretrained_model_name_or_path = "demo://ltx"\n'
    )
    save_file({"transformer.proj_in.lora_A.weight": torch.zeros(4, 8)}, tmp_path / "pytorch_lora_weights.safetensors")
    said = f"{tmp_path}: the run was made by finetrainers 9.9, "
    for version, is_said in (("9.9", True), (__version__, False)):
        (tmp_path / "env.json").write_text(json.dumps({"packages": {"finetrainers": version}}))
        for command in (["sample", *PROMPT], ["watch", "--once"], ["export", "--format", "peft"]):
            assert main([command[0], str(tmp_path), *command[1:]]) == 2
            err = capsys.readouterr().err
            assert re.search(r"config\.toml:1: .*\[future\]", err)
            assert (said in err) == is_said
