"""Open-Sora's three ways of loading a checkpoint, as flags and in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetrainers.config.errors import ConfigError
from finetrainers.config.flags import parse_flags
from finetrainers.config.load import dump_toml, load_config

FLAGS = ["--model_name", "m", "--pretrained_model_name_or_path", "repo", "--data_root", "clips"]


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
    ("given", "said"),
    [
        (
            ["--start-from-scratch"],
            "--start_from_scratch: resets the position in the data of a run that --load resumes; give --load",
        ),
        (
            ["--load", "a", "--resume_from_checkpoint", "b"],
            "load and resume_from_checkpoint (--resume_from_checkpoint) set",
        ),
        (
            ["--load", "a", "--start-from-scratch", "--reset", "rng"],
            "start_from_scratch and reset (--reset) set the same",
        ),
        (["--load", "a", "--start-from-scratch", "perhaps"], "wanted true or false, got 'perhaps'"),
        (["--reset", "dat", "--load", "a"], "did you mean 'data'?"),
        (["--load", "a", "b"], "resume_from_checkpoint: not text, got ['a', 'b']"),
        (["--ckpt_path", "--rank", "0"], "--ckpt_path: init_from: not text, got True"),
    ],
)
def test_what_does_not_go_together_is_said(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_flags([*FLAGS, *given])
    assert said in str(refusal.value)
