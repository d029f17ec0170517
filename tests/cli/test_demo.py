"""`finetrainers demo`: what it writes, and that odd input ends in a sentence and exit code 2, not in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import refused_command
from safetensors.numpy import save_file

from finetrainers.cli.main import main
from finetrainers.utils.failures import Kind


def test_data_is_written_and_the_same_for_the_same_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        options = ["--items", "3", "--look", "striped", "--motion", "zigzag", "--held_out", "--seed", seed]
        assert main(["demo", "data", str(tmp_path / name), *options]) == 0
    assert "wrote 3 clips" in capsys.readouterr().out
    a, b, c = ((tmp_path / name / "captions.jsonl").read_text() for name in "abc")
    assert a == b != c
    for line in a.splitlines():
        record = json.loads(line)
        assert "striped" in record["text"]
        assert "zigzag" in record["text"]
        assert (tmp_path / "a" / record["video"]).read_bytes() == (tmp_path / "b" / record["video"]).read_bytes()


@pytest.mark.parametrize(
    ("words", "expected", "value"),
    [
        ("data {file}", [("directory", "occupied")], "file"),
        ("data {full}", [("directory", "occupied")], "full"),
        ("data {new} --look stripped", [("--look", "unknown")], "'striped'"),
        ("data {new} --motion zig", [("--motion", "unknown")], "'zig'"),
        ("vae {full}", [("directory", "occupied")], "full"),
        ("scratch {full}", [("directory", "occupied")], "full"),
        ("scratch {file}", [("directory", "invalid")], "file"),
        ("reward {full}", [("directory", "occupied")], "full"),
        ("measure {new} --model nope/nope", [("--model", "not_found")], "model_index.json"),
        ("measure {new} --lora nowhere --look dotted", [("--look", "unknown"), ("--lora", "not_found")], "nowhere"),
    ],
)
def test_odd_input_is_refused(
    words: str, expected: list[tuple[str, Kind]], value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    places = {name: str(tmp_path / name) for name in ("file", "full", "new")}
    assert refused_command(["demo", *(word.format(**places) for word in words.split())]) == (2, expected)
    assert value in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "precious"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("items", ["0", "-3", "many", "1.5"])
def test_counts_are_whole_numbers(items: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused_command(["demo", "data", tmp_path / "new", f"--items={items}"]) == (2, [("--items", "invalid")])
    assert f" 1, got '{items}'" in capsys.readouterr().err


def test_a_misspelt_model_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, [(place, _)] = refused_command(["demo", "measure", tmp_path / "new", "--model", "demo://lxt"])
    assert (code, place) == (2, "--model")
    assert "'demo://ltx'" in capsys.readouterr().err


def test_a_lora_without_weights_for_the_model_is_not_measured(tmp_path: Path) -> None:
    lora = tmp_path / "lora.safetensors"
    save_file({f"x.lora_{side}.weight": np.zeros((2, 2), np.float32) for side in "AB"}, lora)
    measure = ["demo", "measure", tmp_path / "new", "--items", "1", "--lora", lora]
    assert refused_command(measure) == (2, [])
    assert not (tmp_path / "new").exists()


def test_the_quickstart_leaves_other_peoples_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "result.png").write_bytes(b"precious")
    assert refused_command(["quickstart", tmp_path]) == (2, [("directory", "occupied")])
    assert (tmp_path / "result.png").read_bytes() == b"precious"
    assert refused_command(["quickstart", tmp_path / "new", "--steps", "0"]) == (2, [("--steps", "invalid")])


@pytest.mark.parametrize("place", ["pretrained_model_name_or_path", "vae_id", "transformer_id", "text_encoder_id"])
def test_a_misspelt_packaged_model_is_one_error_of_all(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"pretrained_model_name_or_path": "demo://ltx", place: "demo://lxt", "data_root": str(tmp_path / "none")}
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert main(["train", "--model_name", "ltx_video", *flags, "--output_dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"--{place}: " in said
    assert "'demo://lxt'" in said
    assert "'demo://ltx'" in said
    assert str(tmp_path / "none") in said
    assert not (tmp_path / "run").exists()


def test_a_model_of_another_family_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pretrained_model_name_or_path", "demo://ltx", "--data_root", str(tmp_path)]
    assert main(["train", "--model_name", "cogvideox", *flags, "--output_dir", str(tmp_path / "run")]) == 2
    assert "LTXVideoTransformer3DModel" in (said := capsys.readouterr().err)
    assert "--model_name ltx_video" in said
