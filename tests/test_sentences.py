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


CONFIG: list[Row] = [
    (lambda: load(rnk=8), "1 problem with this configuration:\n  - rnk: unknown option 'rnk'; did you mean 'rank'?"),
]
DATA: list[Row] = []
REWARDS_AND_METHODS: list[Row] = []
MODELS: list[Row] = []
PLAN: list[Row] = []
TRAINING: list[Row] = []
RESULTS: list[Row] = []


def printed(*arguments: object) -> str:
    """Return what a refused command prints."""
    import contextlib
    import io

    from finetrainers.cli.main import main

    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert main([str(argument) for argument in arguments]) == 2
    return stream.getvalue()


def hosts(folder: Path, text: str) -> Any:
    """Read a hosts file with this text."""
    from finetrainers.tools.doctor.hosts import read_hosts

    (folder / "hosts").write_text(text, encoding="ascii")
    return read_hosts(folder / "hosts")


def sync(run: Path, target: str) -> str:
    """Return the first problem of copying a run to a target."""
    from finetrainers.tools.sync import Sync

    return str(next(Sync(run, target).problems()))


COMMANDS: list[Row] = [
    (lambda: printed("trian"), "error: there is no command 'trian'; did you mean 'train'?\n"),
    (
        lambda: printed("generate"),
        "error: there is no command 'generate'; `sample RUN --prompts PROMPTS` draws clips of a run, a checkpoint, a "
        "LoRA or a model\n",
    ),
    (
        lambda: printed("train"),
        "error: 1 problem with this configuration:\n  - --pretrained_model_name_or_path: is required: Base model in "
        "diffusers layout: a hub id, a local directory, or `demo://NAME` for a packaged one. It has the configs, the "
        "tokenizers and the scheduler of the run, also where single files replace its weights.\n"
        "finetrainers train --help lists the options. New here? finetrainers quickstart needs none.\n",
    ),
    (
        lambda folder: printed("check", "--config", folder / "run.toml", "--json", folder, "--jobs", "0"),
        "error: 3 problems with this configuration:\n  - --jobs: must be a whole number of at least 1, got '0'\n"
        "  - --json: DIR is a folder; give a file in it\n  - --config: no such file: DIR/run.toml\n",
    ),
    (
        lambda folder: printed(
            "estimate", folder / "x.toml", "--gpu", "h1000", "--num_processes", "3", "--num_machines", "2"
        ),
        "error: 3 problems with this configuration:\n  - --gpu: expected a memory size such as 24GB or a card such as "
        "h100, got 'h1000'; did you mean 'h100'?\n  - --num_processes: 3 processes do not divide among 2 machines; use "
        "a multiple\n  - --config: no such file: DIR/x.toml\n",
    ),
    (
        lambda folder: printed("search-batch", folder / "x.toml", "--gpu", "24XB", "--margin", "95", "--estimate_onyl"),
        "error: 4 problems with this configuration:\n  - --gpu: expected a memory size such as 24GB or a card such as "
        "h100, got '24XB'\n  - --margin: must be a number of percent from 0 to 89, got '95'\n  - --estimate_onyl: "
        "unknown flag; did you mean --estimate_only?\n  - --config: no such file: DIR/x.toml\n",
    ),
    (
        lambda: printed("export"),
        "error: 2 problems with this command:\n  - SOURCE: is required: a run's --output_dir, a checkpoint, or a LoRA "
        "in safetensors\n  - --format: is required: one or several of diffusers comfyui kohya peft merged\n"
        "finetrainers export --help lists the options\n",
    ),
    (
        lambda folder: printed("report", folder, "--output", folder / "page.pdf"),
        "error: 2 problems with this command:\n  - RUN: DIR is no run directory: it has none of metrics.jsonl, "
        "events.jsonl, config.toml\n  - --output: DIR/page.pdf would not be opened as what it is, an HTML page; give a "
        "name that ends in .html, or a folder that exists\n",
    ),
    (
        lambda folder: printed("ckpt", "ls", folder / "run"),
        "error: 1 problem with this command:\n  - RUN: DIR/run does not exist: there is no 'run' in 'DIR'\n",
    ),
    (
        lambda folder: printed("ckpt", "ls", folder),
        "error: 1 problem with this command:\n  - RUN: no checkpoint in DIR/checkpoints\n",
    ),
    (
        lambda folder: printed("cache", "prune", folder),
        "error: 2 problems with this command:\n  - prune: say what may go: --keep CONFIG ..., --older_than DAYS, or "
        "both\n  - DIR: DIR holds no cache; give what --precompute_dir was, or a run's --output_dir\n",
    ),
    (
        lambda: printed("doctor", "--python", "python3", "--every", "5", "--disk_mib", "1"),
        "error: 2 problems with this command:\n  - --python: is for --hosts, which is not given\n  - --disk_mib: is "
        "not read with --every, which measures no disk; remove it\n",
    ),
    (
        lambda folder: hosts(folder, "-oProxyCommand=x\na slots=x\nb\nb\n"),
        "3 problems with this configuration:\n  - DIR/hosts:1: '-oProxyCommand=x' is no name of a host\n"
        "  - DIR/hosts:2: not understood: 'a slots=x'; write `host` or `host slots=8`\n"
        "  - DIR/hosts:4: b is there twice",
    ),
    (
        lambda folder: hosts(folder, "# none"),
        "1 problem with this configuration:\n  - --hosts: DIR/hosts names no host; write one a line",
    ),
    (
        lambda folder: sync(folder, "host:x"),
        "RUN: DIR has neither config.toml nor checkpoints/; give a run's --output_dir",
    ),
    (
        lambda: printed("run"),
        "error: 1 problem with this command:\n  - FILE: is required: a TOML file of stages\n"
        "finetrainers run --help shows one\n",
    ),
    (
        lambda: printed("run", Path(__file__).parents[1] / "examples" / "stages.toml", "--from", "hihg"),
        "error: 1 problem with this command:\n  - --from: no stage 'hihg'; did you mean 'high'?\n"
        "finetrainers run --help lists the options\n",
    ),
    (
        lambda: printed("sample"),
        "error: 1 problem with these samples:\n  - TARGET: is required: a run directory, a checkpoint, a LoRA in "
        "safetensors or a model: finetrainers sample runs/mystyle\n",
    ),
    (
        lambda: printed("sample", "--validation_prompts", "x"),
        "error: 1 problem with these samples:\n  - --validation_prompts: unknown flag; here it is --prompts\n",
    ),
    (
        lambda: printed("demo", "measure", "new", "--model", "demo://lxt", "--look", "stripped"),
        "error: 2 problems with this command:\n  - --look: unknown value 'stripped'; did you mean 'striped'?\n"
        "  - --model: no packaged model 'demo://lxt'; did you mean 'demo://ltx'?\n",
    ),
    (
        lambda folder: printed("tiny", "ltx_vido", folder / "tiny"),
        "error: 1 problem with this command:\n  - family: unknown model family 'ltx_vido'; did you mean 'ltx_video'?\n",
    ),
    (
        lambda: printed("serve-reward", "brightness=0.5", "--port", "0"),
        "error: 1 problem with this command:\n  - reward: weight is said where the reward is used, not where it is "
        "served\n",
    ),
    (
        lambda: printed("serve-reward", "brightness,device=cpu", "--device", "cuda:7"),
        "error: 1 problem with this command:\n  - --device: cuda:7, but the reward says device=cpu\n",
    ),
]

ALL = [*CONFIG, *DATA, *REWARDS_AND_METHODS, *MODELS, *PLAN, *TRAINING, *RESULTS, *COMMANDS]


@pytest.mark.parametrize("row", ALL, ids=range(len(ALL)))
def test_sentence(row: Row, tmp_path: Path) -> None:
    call, sentence = row
    try:
        message = call(tmp_path) if inspect.signature(call).parameters else call()
    except Exception as error:
        message = str(error)
    assert message.replace(str(tmp_path), "DIR") == sentence
