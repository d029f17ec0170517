"""Messages name flags in commands and keywords in Python; both are judged as their reader types them."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

import pytest

from finetrainers import ConfigError, check, load_config
from finetrainers.cli.main import main
from finetrainers.config.errors import Problem
from finetrainers.config.keywords import keyword_place, keywords
from finetrainers.config.root import fields
from finetrainers.config.sample import SampleSection
from finetrainers.plan.start_report import print_line
from finetrainers.utils import spelling
from finetrainers.utils.exit_codes import CONFIGURATION
from finetrainers.utils.failures import ExpectedError, InputError, MissingFileError

#: A message, and the same in Python.
MESSAGES = [
    ("use --rank 8 and --lr 1e-4, or remove --seed", "use rank=8 and lr=1e-4, or remove seed="),
    ("lower --lr: --lr is high (--lr)", "lower lr=: lr= is high (lr=)"),
    ("set --method grpo, or --fsdp full.", 'set method="grpo", or fsdp="full".'),
    ("remove --use_dora or --no-lora_autocast", "remove use_dora=True or lora_autocast=False"),
    ("`--use_dora` and --gradient_checkpointing block", "`use_dora=True` and gradient_checkpointing=True block"),
    ("continue with --resume_from_checkpoint latest", 'continue with resume_from_checkpoint="latest"'),
    ("--resume_from_checkpoint continues a run", "resume_from_checkpoint= continues a run"),
    ("--reset optimizer rng, and --reset data", 'reset=["optimizer", "rng"], and reset=["data"]'),
    ("--reset step counts from 0", 'reset=["step"] counts from 0'),
    ("set --dataset FILE.toml or --data_root 'my clips'", 'set dataset="FILE.toml" or data_root="my clips"'),
    ("--video_resolution_buckets 49x512x768; --memory_budget 16GB",
     'video_resolution_buckets=["49x512x768"]; memory_budget="16GB"'),
    ("--rollout_size FRAMESxHEIGHTxWIDTH, --reward a,path=...",
     'rollout_size="FRAMESxHEIGHTxWIDTH", reward=["a,path=..."]'),
    ("requires --dpo.beta 500, or --dpo.beta", 'requires dpo={"beta": 500}, or dpo={"beta": ...}'),
    # Of functions for results.
    ("requires --format diffusers or merged; --overwrite replaces it",
     'requires formats=["diffusers"] or merged; overwrite=True replaces it'),
    ("set --prompts FILE, --gpu 24GB and --lora_scale 0.5 1",
     'set prompts="FILE", gpu="24GB" and lora_scale=[0.5, 1]'),
    # Flags that are not options of a function, commands, and parts of names stay.
    ("torchrun --max-restarts 2 --seed 1; --list_models", "torchrun --max-restarts 2 --seed 1; --list_models"),
    ("`finetrainers train --rank 8` or `--rank 8`", "`finetrainers train --rank 8` or `rank=8`"),
    ("next:\n  finetrainers sample run --seed 1\n(--seed)", "next:\n  finetrainers sample run --seed 1\n(seed=)"),
    ("/data/--rank/x and --ranks", "/data/--rank/x and --ranks"),
]  # fmt: skip


def test_flags_of_a_run_become_keywords() -> None:
    for message, expected in MESSAGES:
        assert keywords(message) == expected
        assert keywords(expected) == expected
    places = {
        "--lr": "lr",
        "--dpo.beta": "dpo.beta",
        "--reward clip": "reward clip",
        "--config": "source",
        "--format": "formats",
        "TARGET": "target",
    }
    places |= {"run.toml:3": "run.toml:3", "--launcher": "--launcher", "callbacks[0]": "callbacks[0]"}
    assert {place: keyword_place(place) for place in places} == places
    for name in [*fields(), *SampleSection.model_fields]:  # every option can be named
        assert "--" not in keywords(f"set --{name}, or remove --{name}")


def test_errors_are_spelled_where_they_are_read(tmp_path: Path, monkeypatch, capsys) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(data_root=tmp_path, lr=-1, rank=0)
    error = caught.value
    assert "--pretrained_model_name_or_path" in str(error)  # the suite reads messages as commands print them
    errors = [ExpectedError("lower --lr"), InputError("lower --lr"), MissingFileError("lower --lr")]
    assert {str(other) for other in errors} == {"lower --lr"}
    monkeypatch.setattr(spelling, "_commands", 0)
    lines = str(error).splitlines()
    assert len(lines) == 1 + len(error.problems)
    assert "--" not in str(error)
    assert [line.split(":")[0] for line in lines[1:]] == ["  - pretrained_model_name_or_path", "  - rank", "  - lr"]
    assert {str(other) for other in errors} == {"lower lr="}
    assert str(error) in "".join(traceback.format_exception(error))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.problems[0].where == "--pretrained_model_name_or_path"  # for programs

    # What `train` prints, and the notes of `load_config`.
    print_line("warning: --lr 1e-4 is high")
    assert "warning: lr=1e-4 is high" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no data: set data_root="):
        check(load_config(model_name="ltx_video", pretrained_model_name_or_path="x", output_dir=tmp_path / "run"))

    # A command in the same process has flags again, and leaves no trace.
    assert main(["train", "--lr", "-1", "--output_dir", str(tmp_path / "run")]) == CONFIGURATION
    assert "--pretrained_model_name_or_path" in capsys.readouterr().err
    assert str(Problem("--lr", "use --rank 8")) == "lr: use rank=8"
