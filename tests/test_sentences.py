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


def plan_clips(*names: str, **options: Any) -> Any:
    """Plan the samples of models with these options of the command."""
    from finetrainers.config.given import RawOptions
    from finetrainers.config.sample import SampleSection
    from finetrainers.sampling.plan import plan_samples

    return plan_samples(names, SampleSection.model_validate(options), RawOptions())


def find_weights(given: str | Path) -> Any:
    """Find the weights to export at a path."""
    from finetrainers.results.export_formats import find_source

    return find_source(str(given), options={})


def export_problems(folder: Path, weights_format: str) -> str:
    """Return the problem with an export of the result of full finetuning."""
    from finetrainers.results.export_formats import result_source, source_problems

    (folder / "diffusers").mkdir()
    source = result_source(load(training_type="full-finetune"), folder)
    return "\n".join(map(str, source_problems(source, [weights_format], folder, overwrite=False)))


def watch_run(run: Path) -> Any:
    """Plan a watch of a run."""
    from finetrainers.config.given import RawOptions
    from finetrainers.config.watch import WatchSection
    from finetrainers.sampling.watch.plan import plan_watch

    return plan_watch(run, WatchSection(), RawOptions())


def watch_on_device(device: str) -> None:
    """Choose the device of a watch."""
    from finetrainers.sampling.watch.plan import use_device

    use_device(device)


def plot_curves(run: Path, records: str | None = None) -> Any:
    """Plot the curves of a run with these records."""
    from finetrainers.draw.curves import plot_run

    if records is not None:
        (run / "metrics.jsonl").write_text(records)
    return plot_run(run)


def plan_for_gpu(text: str) -> Any:
    """Read the GPU to plan for."""
    from finetrainers.utils.gpus import read_gpu

    return read_gpu(text)


def launch_with(**environment: str) -> str:
    """Return the problems with the environment variables of a launcher."""
    from finetrainers.utils.launch import launch_problems

    return "\n".join(f"{name} {message}" for name, message, _ in launch_problems(environment))


def read_launcher_file(folder: Path, content: str) -> Any:
    """Read a configuration file of `accelerate launch`."""
    from finetrainers.utils.launch import launcher_environment

    (folder / "launch.yaml").write_text(content)
    return launcher_environment(folder / "launch.yaml")


def inject_fault(text: str) -> Any:
    """Read the faults to inject."""
    from finetrainers.utils.faults import parse_faults

    return parse_faults(text)


def read_tensors(folder: Path, content: bytes) -> Any:
    """Read the header of a safetensors file."""
    from finetrainers.utils.headers import read_header

    (folder / "lora.safetensors").write_bytes(content)
    return read_header(folder / "lora.safetensors")


def describe_failure(error: Exception) -> str | None:
    """Return what a command prints for an error."""
    from finetrainers.utils.failures import user_message

    return user_message(error)


def require_library(requirement: str) -> str | None:
    """Return the problem with the version of an installed library."""
    from finetrainers.utils.versions import version_problem

    return version_problem([requirement])


RESULTS: list[Row] = [
    (
        lambda: plan_clips("demo://ltx"),
        "1 problem with this configuration:\n  - --prompts: no prompts are given, and there is no run "
        "with validation prompts; give --prompts FILE or TEXT",
    ),
    (
        lambda: plan_clips("demo://ltx", prompts="a cat"),
        "1 problem with this configuration:\n  - --size: is not known; give it as FRAMESxHEIGHTxWIDTH, "
        "for example 49x512x768",
    ),
    (
        lambda: plan_clips(
            "demo://ltx",
            prompts="a cat@@@9x64x64",
            lora_scale=[0.5],
            compare="base",
            negative_prompt="a dog",
            guidance_scale=1.0,
        ),
        "3 problems with this configuration:\n  - --negative_prompt: has no effect: the guidance scale "
        "is 1, so that nothing is sampled for a second prompt; remove it\n  - --lora_scale: has no "
        "effect: there is no LoRA; remove it\n  - --compare: is what is sampled already; remove it",
    ),
    (
        lambda: plan_clips("demo://ltxx"),
        "1 problem with this configuration:\n  - TARGET: no packaged model 'demo://ltxx'; did you mean 'demo://ltx'?",
    ),
    (
        lambda folder: find_weights(folder / "runs"),
        "1 problem with this configuration:\n  - SOURCE: does not exist: there is no 'runs' in 'DIR'; "
        "give a run directory, a checkpoint, a LoRA in safetensors, or a model (a folder, a hub id or "
        "demo://NAME)",
    ),
    (
        lambda: find_weights("demo://ltx"),
        "1 problem with this configuration:\n  - SOURCE: demo://ltx is a model without training; give a "
        "run, a checkpoint or a LoRA in safetensors",
    ),
    (
        lambda folder: export_problems(folder, "peft"),
        "--format: peft: it holds a LoRA, and these are all weights; use diffusers or comfyui",
    ),
    (lambda folder: export_problems(folder, "diffusers"), "--format: DIR/diffusers exists; --overwrite replaces it"),
    (watch_run, "1 problem with this configuration:\n  - RUN: DIR has no config.toml; give a run's --output_dir"),
    (
        lambda: watch_on_device("gpu"),
        "1 problem with this configuration:\n  - --device: 'gpu' is neither cpu nor cuda:N",
    ),
    (plot_curves, "DIR is no run directory: it holds no metrics.jsonl"),
    (lambda folder: plot_curves(folder, ""), "DIR/metrics.jsonl has no records to draw yet"),
    (
        lambda: plan_for_gpu("h1000"),
        "expected a memory size such as 24GB or a card such as h100, got 'h1000'; did you mean 'h100'?",
    ),
    (lambda: plan_for_gpu("a100"), "'a100' is sold in several sizes; use a100-40gb or a100-80gb"),
    (
        lambda: launch_with(WORLD_SIZE="0"),
        "WORLD_SIZE must be a whole number of at least 1, got '0'; unset it, or launch again",
    ),
    (lambda: launch_with(RANK="1"), "RANK 1 is none of 1 processes (WORLD_SIZE)"),
    (
        lambda: launch_with(LOCAL_RANK="0", ACCELERATE_MIXED_PRECISION="fp8"),
        "LOCAL_RANK says that a launcher started this process, and WORLD_SIZE, RANK, MASTER_ADDR, "
        "MASTER_PORT is not set; start it by `accelerate launch` or `torchrun`, or unset LOCAL_RANK\n"
        "ACCELERATE_MIXED_PRECISION must be one of no, fp16, bf16, got 'fp8'; it comes from the "
        "launcher's file",
    ),
    (
        lambda folder: read_launcher_file(folder, "- a list"),
        "DIR/launch.yaml is not a config file of `accelerate launch`",
    ),
    (
        lambda folder: read_launcher_file(folder, "num_processes: no"),
        "num_processes must be a whole number from 1 on, got False",
    ),
    (
        lambda: inject_fault("nan@save"),
        "'nan@save': there is nothing to poison at save; nan goes with loss, backward, reward",
    ),
    (
        lambda folder: read_tensors(folder, b"version https://git-lfs"),
        "DIR/lora.safetensors is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`",
    ),
    (
        lambda folder: read_tensors(folder, (100).to_bytes(8, "little") + b"{"),
        "DIR/lora.safetensors is cut short: at least 99 B are missing; copy or download it again",
    ),
    (
        lambda: describe_failure(OSError(28, "No space left on device", "clip.mp4")),
        "No space left on device: clip.mp4. Earlier checkpoints are intact: make room, and continue "
        "with --resume_from_checkpoint latest",
    ),
    (
        lambda: describe_failure(
            RuntimeError("[/a/gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.77.0.2]:24")
        ),
        "another process of the run has ended: its own output says why (Connection closed by peer "
        "[10.77.0.2]:24). Checkpoints are intact: start the command on all machines again, and with "
        "--resume_from_checkpoint auto it continues from the newest one",
    ),
    (
        lambda: require_library("no-such-library>=2"),
        "no no-such-library installed, which cannot work; run: pip install 'no-such-library>=2'",
    ),
]


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
