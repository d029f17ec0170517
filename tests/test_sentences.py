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
PLAN: list[Row] = []


#: The only process of a run.
PROCESS: Any = SimpleNamespace(is_main=True, broadcast_object=lambda value: value)


def train_with(callbacks: Any) -> Any:
    """Train with callbacks, which are checked first."""
    from finetrainers.runs.training import train

    return train(load(), callbacks=callbacks)


def watch_with(**hooks: Any) -> Any:
    """Return a class of callbacks with these methods."""
    from finetrainers import Callback

    return type("Watch", (Callback,), hooks)


def resume(directory: Path, checkpoint: str, *, cut: str = "", missing: str = "") -> Any:
    """Find a checkpoint in a run with steps 2 and 4, each with a file that is empty or missing."""
    from finetrainers.rundir.find import find_checkpoint
    from finetrainers.rundir.publish import publish, reserve

    for step in (2, 4):
        final = directory / "checkpoints" / f"step-{step}"
        temporary = reserve(final, needed=0)
        for name in ("state.json", "optimizer.pt"):
            (temporary / name).write_text("{}")
        publish(temporary, final, facts={"step": step})
        if cut:
            (final / cut).write_text("")
        if missing:
            (final / missing).unlink()
    return find_checkpoint(checkpoint, directory)


def read_other_format(directory: Path) -> Any:
    """Read a checkpoint of a later version."""
    from finetrainers.rundir.find import read_state

    (directory / "state.json").write_text('{"format": 99}')
    return read_state(directory)


def use_twice(directory: Path) -> None:
    """Start a second run in a directory; the file that names the first one is gone."""
    from finetrainers.rundir.lock import HOLDER, exclusive

    with exclusive(directory, PROCESS):
        (directory / HOLDER).write_text("")
        with exclusive(directory, PROCESS):
            pass


def save_on_full_disk(directory: Path) -> Any:
    """Reserve 12 GiB for a checkpoint where 1 GiB is free."""
    from finetrainers.rundir.publish import reserve

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**30))
        return reserve(directory / "step-3", needed=12 * 2**30)


def take_nan_step(policy: str, *, limit: int) -> Any:
    """Judge a step whose loss is NaN."""
    from finetrainers.training.guards.nonfinite import NonFiniteGuard

    run_dir: Any = SimpleNamespace(event=lambda *values, **fields: None)
    guard = NonFiniteGuard(policy=policy, limit=limit, loss_scaling=False, run_dir=run_dir)
    return guard.choose_action(3, {"loss": float("nan"), "grad_norm": 1.0})


def roll_back_at_once(directory: Path) -> None:
    """Roll back a run that has no checkpoint."""
    from finetrainers.training.rollback import roll_back

    guards = SimpleNamespace(memory=SimpleNamespace(fitting_samples={}))
    run_dir = SimpleNamespace(root=directory)
    state: Any = SimpleNamespace(step=3, data_ahead=0, guards=guards, parallel=PROCESS, run_dir=run_dir)
    roll_back(state)


def run_out_of_memory() -> None:
    """Run out of memory on a GPU."""
    import torch

    from finetrainers.training.guards.memory import advise_on_oom

    with advise_on_oom("training"):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")


def describe_hacking(judge: str, checkpoint: str | None) -> str:
    """Return the description of reward hacking that this metric shows."""
    from finetrainers.training.guards.hacking import RewardHacking, hacking_text

    hacking = RewardHacking(judge, best_step=24, before=0.625, now=0.25, trained_before=0.5, trained_now=0.9)
    return hacking_text(hacking, checkpoint)


def suggest(phase: str, **options: Any) -> str:
    """Return the option to change after a phase ran out of memory."""
    from finetrainers.training.memory_failure import suggest_change

    return suggest_change(load(**options), phase)


def load_other_averages(directory: Path) -> None:
    """Load the moving average of another network."""
    import torch
    from safetensors.torch import save_file

    from finetrainers.training.trained_weights import load_ema_weights

    save_file({"bias": torch.zeros(2), "other": torch.zeros(2)}, directory / "ema.safetensors")
    load_ema_weights(directory / "ema.safetensors", torch.nn.Linear(2, 2))


def load_other_lora(directory: Path, **shapes: tuple[int, int]) -> None:
    """Load a LoRA of a layer with these shapes into an adapter of rank 4 and width 8."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors.torch import save_file

    from finetrainers.plan.initial_weights import LORA_FILE
    from finetrainers.training.trained_weights import load_lora_weights

    layers = torch.nn.Sequential(torch.nn.Linear(8, 8))
    network = inject_adapter_in_model(LoraConfig(r=4, target_modules=["0"]), layers)
    weights = {f"transformer.0.lora_{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(weights, directory / LORA_FILE)
    load_lora_weights(directory, network)


TRAINING: list[Row] = [
    (
        lambda: train_with(3),
        "1 problem with this configuration:\n  - callbacks: expected a list of callbacks, got an int",
    ),
    (
        lambda: train_with([watch_with(on_stepp=lambda self, state: None)(), watch_with(), 3]),
        "3 problems with this configuration:\n"
        "  - callbacks[0]: a Watch has no hook on_stepp; did you mean 'on_step'?; rename methods that are not hooks\n"
        "  - callbacks[1]: expected an instance, got the class Watch; write Watch(...)\n"
        "  - callbacks[2]: expected an instance of finetrainers.Callback, got an int; derive its class from Callback",
    ),
    (
        lambda: train_with([watch_with(on_log=lambda self, state: None)()]),
        "1 problem with this configuration:\n"
        "  - callbacks[0]: a Watch.on_log must take (state, record): too many positional arguments",
    ),
    (
        lambda directory: resume(directory, "3"),
        "no checkpoint of step 3 in DIR/checkpoints; there are: 2, 4",
    ),
    (
        lambda directory: resume(directory, "step-4"),
        "step-4 is not a checkpoint (no state.json); give `auto`, `latest`, a step (2, 4) or a directory",
    ),
    (
        lambda directory: resume(directory, "4", cut="state.json"),
        "DIR/checkpoints/step-4 is damaged: state.json has 0 bytes instead of 2; `latest` takes the newest whole one "
        "(whole by size: none)",
    ),
    (
        lambda directory: resume(directory, "4", missing="manifest.json"),
        "DIR/checkpoints/step-4 is damaged: manifest.json is missing: not written to the end, or by an earlier "
        "version; `latest` takes the newest whole one (whole by size: none)",
    ),
    (
        lambda directory: resume(directory, "latest", missing="state.json"),
        "every checkpoint in DIR/checkpoints is damaged (step-4: state.json is missing; step-2: state.json is missing)",
    ),
    (
        lambda directory: resume(directory, "4", missing="optimizer.pt"),
        "DIR/checkpoints/step-4 has no optimizer state: it is a copy to sample from. Resume where it was trained, or "
        "start a new run from its weights with --init_from",
    ),
    (
        read_other_format,
        "DIR has checkpoint format 99; this version reads 3 and 4",
    ),
    (
        use_twice,
        "1 problem with this configuration:\n"
        "  - --output_dir: DIR is in use by another run; wait for it, stop it, or give another one",
    ),
    (
        save_on_full_disk,
        "[Errno 28] a checkpoint needs about 12 GiB and DIR has 1 GiB free; nothing was written, earlier checkpoints "
        "are intact. Make room (--checkpointing_limit bounds how many are kept) and continue with "
        "--resume_from_checkpoint latest",
    ),
    (
        lambda: take_nan_step("raise", limit=9),
        "step 3: loss nan. No weight was changed. Continue from an earlier checkpoint with a lower --lr, longer "
        "--lr_warmup_steps or other data, or leave such steps out with --on_nonfinite skip",
    ),
    (
        lambda: take_nan_step("skip", limit=0),
        "step 3: loss nan; 1 steps were not finite, more than --max_nonfinite_steps 0. No weight was changed. Continue "
        "from an earlier checkpoint with a lower --lr, longer --lr_warmup_steps or other data",
    ),
    (
        roll_back_at_once,
        "step 4 was not finite, and there is nothing to roll back to: no checkpoint in DIR/checkpoints; leave the "
        "option out to start a new run. Lower --lr, or save more often with --checkpointing_steps",
    ),
    (
        run_out_of_memory,
        "out of memory while training (CUDA out of memory). What needs less: --gradient_checkpointing; smaller or "
        "shorter --video_resolution_buckets (reward finetuning: --rollout_size); --training_type lora; "
        "--quantize_frozen int8; an 8-bit or offloaded optimizer; --precompute_conditions; where clips are encoded or "
        "decoded, --enable_tiling and --enable_slicing. --dry_run prints an estimate of what takes how much",
    ),
    (
        lambda: describe_hacking("shape", "run/checkpoints/step-20"),
        "the held-out reward shape has fallen from 0.625 around step 24 to 0.25, while the trained reward has risen "
        "from 0.5 to 0.9; the nearest checkpoint before it is run/checkpoints/step-20. Resume there with a lower --lr "
        "or a larger KL penalty, or train on shape too (--reward)",
    ),
    (
        lambda: describe_hacking("kl", None),
        "the KL has grown from 0.625 at step 24 to 0.25, and the trained reward has hardly gained: 0.5, now 0.9; no "
        "checkpoint is from before. Resume there with a lower --lr or a larger KL penalty, or measure a reward that is "
        "not trained (--eval_reward)",
    ),
    (
        lambda: suggest("training_step", batch_size=4, gradient_checkpointing=True),
        "--batch_size 1 --gradient_accumulation_steps 4 (the same gradient in smaller micro-batches)",
    ),
    (
        lambda: suggest("reward", enable_tiling=True),
        "smaller clips to score: --rollout_size",
    ),
    (
        load_other_averages,
        "DIR/ema.safetensors holds averages of other weights: 1 names are not in the network, e.g. other",
    ),
    (
        lambda directory: load_other_lora(directory, A=(4, 8)),
        "DIR/pytorch_lora_weights.safetensors does not fit this adapter: 1 names differ, e.g. 0.lora_B.weight",
    ),
    (
        lambda directory: load_other_lora(directory, A=(2, 8), B=(8, 2)),
        "DIR/pytorch_lora_weights.safetensors does not fit this adapter: 0.lora_A.weight is [2, 8] in the file, [4, 8] "
        "here; is it a LoRA of this model?",
    ),
]
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
