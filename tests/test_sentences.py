"""The sentences of messages, all in this table: tests elsewhere compare kind and place (tests/refusals.py), so that a
wording changes in the code and here.

A row is a function that raises an error or returns a message, and the message. It may take a new directory, which the
message names `DIR`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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


def plan_demo_run(directory: Path, **options: Any) -> Any:
    """Check a run of the demo model on one image in `data`, beside it another folder."""
    from PIL import Image

    from finetrainers.plan.preflight import preflight

    for name in ("data", "pickled"):
        (directory / name).mkdir()
    Image.new("RGB", (64, 64)).save(directory / "data" / "a.png")
    (directory / "data" / "a.txt").write_text("a")
    for name in ("config.json", "w.bin"):
        (directory / "pickled" / name).touch()
    model = {"pretrained_model_name_or_path": "demo://ltx", "image_resolution_buckets": ["64x64"], "train_steps": 1}
    paths = {name: str(directory / options[name]) for name in ("init_from", "output_dir") if name in options}
    data = {"data_root": str(directory / "data"), "output_dir": str(directory / "run")}
    return preflight(load(**{**model, **data, **options, **paths}))


def find_lora_target(target: str) -> Any:
    """Look for a LoRA target in a network of one layer."""
    from torch import nn

    from finetrainers.plan.trainable import lora_targets

    return lora_targets(nn.ModuleDict({"to_q": nn.Linear(1, 1)}), [target])


def start_from_lora(**options: Any) -> Any:
    """Compare options with a LoRA file of rank 4."""
    from finetrainers.plan.initial_weights import check_lora

    shapes = {f"transformer.blocks.0.to_{name}.lora_A.weight": (4, 32) for name in "qk"}
    return check_lora(Path("a.safetensors"), shapes, {"lora_alpha": 8}, load(**options).training)


def resume_with_changes(*differences: tuple[str, str | None]) -> str:
    """Return the refusal to continue a run with these differences, each with the reset that allows it."""
    from finetrainers.plan.resume_plan import Change, _refusals

    changes = [Change(name, f"{name}: 1 then, 2 now", reset) for name, reset in differences]
    [error] = _refusals(Path("run/checkpoints/step-2"), changes, frozenset())
    return str(error)


def load_trained_pipeline(**options: Any) -> Any:
    """Load the pipeline of a run without weights."""
    from finetrainers.runs.training import TrainResult

    config = load(**options)
    return TrainResult(config, step=0, stopped_by=None if config.run.dry_run else "SIGINT").pipeline()


def swap_blocks_of_two(number: int) -> Any:
    """Swap blocks of a network that has two."""
    from finetrainers.plan.block_swap import check_number_of_blocks

    spec: Any = SimpleNamespace(block_modules=lambda _: [0, 0], transformer_on_meta=lambda: None)
    return check_number_of_blocks(load(blocks_to_swap=number), spec)


def check_offline_upload() -> Any:
    """Check the upload of a run, offline as in all tests."""
    from finetrainers.plan.check_upload import check_upload

    return check_upload(load(push_to_hub=True))


def train_second_stage() -> str:
    """Train from the second of two stages, which begins from the first, unfinished one."""
    from finetrainers.runs.stages import missing_before

    low: Any = SimpleNamespace(name="low", source=None, is_done=False)
    [problem] = missing_before([low, SimpleNamespace(name="mid", source=low, is_done=False)], "mid")
    return str(problem)


def plan_without_sizes() -> Any:
    """Plan the work of a run without data."""
    from finetrainers.plan.sizes_plan import plan_sizes

    geometry: Any = None
    return plan_sizes(load(), geometry, sizes_are_wrong=False)


def overwrite_page(directory: Path) -> Any:
    """Write an HTML page over another file."""
    from finetrainers.plan.ownership import page_problem

    (directory / "a.html").write_text("mine")
    return page_problem(directory / "a.html")


def overwrite_export(directory: Path) -> Any:
    """Export a run into a folder that holds another file."""
    from finetrainers.plan.ownership import export_problem

    (directory / "mine.txt").touch()
    return export_problem(directory, trained="transformer", identity=None)


PLAN: list[Row] = [
    (
        lambda d: plan_demo_run(d, model_name="ltx_vide"),
        "1 problem with this configuration:\n  - --model_name: unknown model family 'ltx_vide'; did you mean "
        "'ltx_video'?",
    ),
    (
        lambda d: plan_demo_run(d, model_name="auto", pretrained_model_name_or_path="a/b"),
        "1 problem with this configuration:\n  - --model_name: is not given, and no config of a/b on this disk "
        "tells it; supported: cogvideox, hunyuan_video, ltx_video",
    ),
    (
        lambda d: plan_demo_run(d, method="stf"),
        "1 problem with this configuration:\n  - --method: unknown method 'stf'; did you mean 'sft'?",
    ),
    (
        lambda d: plan_demo_run(d, vae_id="./nowhere"),
        "1 problem with this configuration:\n  - --vae_id: no such directory: ./nowhere",
    ),
    (
        lambda d: plan_demo_run(d, output_dir="data"),
        "1 problem with this configuration:\n  - --output_dir: DIR/data is not the directory of a run: it holds "
        "a.png and a.txt; give a new or empty directory",
    ),
    (
        lambda d: plan_demo_run(d, validation_prompts="a", validation_images="b.png", init_from="no"),
        "2 problems with this configuration:\n  - --init_from: no such file or directory: DIR/no; give a "
        "checkpoint, a run directory, a diffusers folder, or a LoRA in safetensors (a model of the hub must be "
        "downloaded, or is named by --transformer_id)\n  - --validation_images: no such file: b.png",
    ),
    (
        lambda d: plan_demo_run(d, validation_prompts="a@@@1x64x64", validation_last_images=str(d / "data" / "a.png")),
        "1 problem with this configuration:\n  - --validation_last_images: the last frame is all that a sample of "
        "1 frames has; sample more",
    ),
    (
        lambda d: plan_demo_run(d, init_from="data"),
        "1 problem with this configuration:\n  - --init_from: DIR/data holds neither a transformer (transformer/ "
        "or config.json) nor pytorch_lora_weights.safetensors nor checkpoints/; it holds a.png, a.txt",
    ),
    (
        lambda d: plan_demo_run(d, init_from="pickled"),
        "1 problem with this configuration:\n  - --init_from: DIR/pickled has no safetensors files; pickles (.bin, "
        ".pt) are not loaded, convert them first",
    ),
    (
        lambda d: plan_demo_run(d, init_from="pickled/w.bin"),
        "1 problem with this configuration:\n  - --init_from: DIR/pickled/w.bin is a pickle, which is never "
        "loaded; convert it to safetensors first",
    ),
    (
        lambda d: plan_demo_run(d, init_from="data/a.txt"),
        "1 problem with this configuration:\n  - --init_from: DIR/data/a.txt is not a safetensors file; give "
        "weights in safetensors, a run directory, a checkpoint or a diffusers folder",
    ),
    (
        lambda: start_from_lora(rank=8, lora_alpha=8, target_modules=["to_q", "to_v"]),
        "a.safetensors does not fit this run's adapter: rank: 4 in the file, 8 in this run; target_modules: the "
        "file adapts 1 module that to_q to_v does not name, e.g. blocks.0.to_k; target_modules: to_v in this run, "
        "which the file does not adapt. Set the options as in the file",
    ),
    (
        lambda: resume_with_changes(("seed", "rng")),
        "cannot continue from run/checkpoints/step-2: seed: 1 then, 2 now (--reset rng). Restore these settings, "
        "or: --reset rng allows them",
    ),
    (
        lambda: resume_with_changes(("rank", None), ("optimizer", "optimizer"), ("seed", "rng")),
        "cannot continue from run/checkpoints/step-2: rank: 1 then, 2 now; optimizer: 1 then, 2 now (--reset "
        "optimizer); seed: 1 then, 2 now (--reset rng). Restore these settings, or: --reset optimizer rng allows "
        "the others; nothing allows another rank; a new run can take the weights alone, where they fit, with "
        "--init_from",
    ),
    (
        lambda: find_lora_target("to_qq"),
        "1 problem with this configuration:\n  - --target_modules: 'to_qq' matches no layer; did you mean 'to_q'?",
    ),
    (
        lambda: find_lora_target("to_.*v"),
        "1 problem with this configuration:\n  - --target_modules: the expression 'to_.*v' matches no layer in "
        "full; names look like ['to_q']",
    ),
    (
        lambda: swap_blocks_of_two(3),
        "1 problem with this configuration:\n  - --blocks_to_swap: 3 of 2 blocks: the network has no more; lower it",
    ),
    (
        check_offline_upload,
        "1 problem with this configuration:\n  - --push_to_hub: HF_HUB_OFFLINE is set; unset it, or leave it out, "
        "and upload the results later with `hf upload`",
    ),
    (
        plan_without_sizes,
        "1 problem with this configuration:\n  - --video_resolution_buckets: memory depends on the size of clips; "
        "give them, such as 49x512x768, or the data",
    ),
    (
        train_second_stage,
        "--from: stage low, from which a later one begins, is not finished; give --from low",
    ),
    (
        overwrite_page,
        "DIR/a.html exists, and this command has not written it; give another file, or remove it",
    ),
    (
        overwrite_export,
        "DIR also holds mine.txt, which would be lost; move it away, or give another --output_dir",
    ),
    (
        lambda: load_trained_pipeline(dry_run=True),
        "there are no trained weights in run: a dry run trains nothing",
    ),
    (
        lambda: load_trained_pipeline(),
        "there are no trained weights in run: stopped by SIGINT; resume it",
    ),
]
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
