"""The sentences of messages, all in this table: tests elsewhere compare kind and place (tests/refusals.py), so that a
wording changes in the code and here.

A row is a function that raises an error or returns a message, and the message. It may take a new directory, which the
message names `DIR`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Row = tuple[Callable[..., Any], str]


def load(**options: Any) -> Any:
    """Load a configuration of the required options and these."""
    from finetrainers.config.load import load_config

    required = {"model_name": "ltx_video", "pretrained_model_name_or_path": "model", "data_root": "data"}
    return load_config(**{"output_dir": "run", **required, **options})


def load_text(folder: Path, text: str) -> Any:
    """Load a configuration from a file with this text."""
    from finetrainers.config.load import load_config

    (folder / "run.toml").write_text(text, encoding="utf-8")
    return load_config(folder / "run.toml", pretrained_model_name_or_path="model", data_root="data")


def check_rules(**options: Any) -> str:
    """Return the first error or warning of the rules between options."""
    from finetrainers.config.checks.options import check_config
    from finetrainers.config.facts import Facts
    from finetrainers.config.geometry import Geometry

    facts = Facts(Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25), first_frame="tokens", heads=32)
    findings = check_config(load(**options), facts=facts, prompts=[], world_size=1)
    return str([*findings.errors, *findings.warnings][0])


def parse(*flags: str) -> Any:
    """Parse the flags of a training command."""
    from finetrainers.config.flags import parse_flags

    return parse_flags(["--pretrained_model_name_or_path", "model", *flags])


def stages(folder: Path, text: str) -> str:
    """Return the first problem of a file of stages with this text."""
    from finetrainers.config.given import RawOptions
    from finetrainers.config.stages import read_stages

    (folder / "stages.toml").write_text(text, encoding="utf-8")
    return str(read_stages(folder / "stages.toml", RawOptions())[0].problems[0])


ONE = "1 problem with this configuration:\n  - "
CONFIG: list[Row] = [
    (lambda: load(rnk=8), f"{ONE}rnk: unknown option 'rnk'; did you mean 'rank'?"),
    (
        lambda: load(lr="1e-4x", rank=0, data_root="a\0b", training_type="full"),
        "4 problems with this configuration:\n"
        "  - data_root: holds a NUL character: 'a\\x00b'\n"
        "  - training_type: unknown value 'full'; did you mean 'full-finetune'? Valid: lora, full-finetune\n"
        "  - rank: must be at least 1, got 0\n"
        "  - lr: not a number, got '1e-4x'",
    ),
    (lambda: parse("--batch_siz", "3"), f"{ONE}--batch_siz: unknown flag; did you mean --batch_size?"),
    (
        lambda: load(lr=1e-4, learning_rate=1e-5),
        f"{ONE}learning_rate: learning_rate and lr (lr) set the same; give one of them",
    ),
    (
        lambda: load(width=512),
        f"{ONE}width: unknown option 'width'; sizes are --video_resolution_buckets FRAMESxHEIGHTxWIDTH, for example "
        "49x512x768, and may be several",
    ),
    (
        lambda: load(video_resolution_buckets=["49x512"]),
        f"{ONE}video_resolution_buckets: '49x512' is not FRAMESxHEIGHTxWIDTH, for example 49x512x768 (images: "
        "1x512x768)",
    ),
    (
        lambda: load(frame_conditioning="frist=0.1"),
        f"{ONE}frame_conditioning: 'frist' is no kind of given frames; did you mean 'first'?; kinds: first, last, "
        "first+last, prefix, suffix, prefix+suffix, frame, span, interpolate, random",
    ),
    (
        lambda: load(attn_backend="sage"),
        f"{ONE}attn_backend: sage has no backward pass, so nothing below it would learn; use flash or _flash_3_hub",
    ),
    (
        lambda folder: load_text(folder, "[training]\nrnk = 8\n\n[data]\nlr = 1e-4\n[optimiser]\nx = 1\n"),
        "3 problems with this configuration:\n"
        "  - DIR/run.toml:2: unknown option 'rnk'; did you mean 'rank'?\n"
        "  - DIR/run.toml:5: 'lr' belongs in [optimizer], not in [data]\n"
        "  - DIR/run.toml:6: unknown table [optimiser]; did you mean 'optimizer'?",
    ),
    (
        lambda folder: load_text(folder, "rank = \n"),
        f"{ONE}DIR/run.toml: not valid TOML: Invalid value (at line 1, column 8)",
    ),
    (
        lambda folder: load_text(folder, "rank: 64\n"),
        f"{ONE}DIR/run.toml: is YAML, and config files are TOML: `rank = 64`, no colon; see "
        "docs/reference/configuration.md",
    ),
    (lambda folder: parse("--config", f"{folder}/run.toml"), f"{ONE}--config: no such file: DIR/run.toml"),
    (
        lambda: check_rules(data_root=None),
        "--data_root: no data: give --data_root (a folder), --dataset_file, --hf_dataset or --dataset",
    ),
    (
        lambda: check_rules(video_resolution_buckets=["48x512x768"]),
        "--video_resolution_buckets: 48x512x768: 48 frames is not 8*k+1; use 41 or 49",
    ),
    (
        lambda: check_rules(video_resolution_buckets=["768x512x49"]),
        "--video_resolution_buckets: 768x512x49: the order is FRAMESxHEIGHTxWIDTH; did you mean 49x512x768?",
    ),
    (
        lambda: check_rules(lora_autocast=False, mixed_precision="bf16"),
        "--lora_autocast: --mixed_precision bf16 is the dtype of autocast; drop it or --no-lora_autocast",
    ),
    (
        lambda: check_rules(sp_size=5),
        "--sp_size: 32 attention heads do not divide by 5 processes; use one of 2, 4, 8, 16, 32, or --sp_mode ring",
    ),
    (
        lambda: check_rules(
            data_root=None,
            method="grpo",
            prompts="p.txt",
            reward=["a"],
            rollout_size="17x64x64",
            train_steps=100,
            window_size=9,
        ),
        "--window_size: a window of 9 does not fit: of 10 --sampling_steps, --window_range 0 0.5 holds 5 steps (0 to "
        "4), and the last step is never trained; use at most 5, or a wider range",
    ),
    (
        lambda: check_rules(draft_k=2, refl_kind="draft-lv"),
        "--method: sft has no use for --refl_kind, --draft_k; add --method refl or remove them",
    ),
    (
        lambda: check_rules(lr_num_cycles=2),
        "--lr_num_cycles has no effect without --lr_scheduler cosine_with_restarts",
    ),
    (
        lambda folder: stages(folder, '[[stage]]\nname = "low"\ninit = { stage = "lo" }\n'),
        "DIR/stages.toml:3: init: no earlier stage 'lo'; it is the first stage",
    ),
]
DATA: list[Row] = []
REWARDS_AND_METHODS: list[Row] = []
MODELS: list[Row] = []
PLAN: list[Row] = []
TRAINING: list[Row] = []
RESULTS: list[Row] = []
COMMANDS: list[Row] = []

ALL = [*CONFIG, *DATA, *REWARDS_AND_METHODS, *MODELS, *PLAN, *TRAINING, *RESULTS, *COMMANDS]


@pytest.mark.parametrize("row", ALL, ids=range(len(ALL)))
def test_sentence(row: Row, tmp_path: Path) -> None:
    call, sentence = row
    try:
        message = call(tmp_path) if inspect.signature(call).parameters else call()
    except Exception as error:
        message = str(error)
    assert message.replace(str(tmp_path), "DIR") == sentence
