"""DanceGRPO's launch commands as they stand: what its trainer is, and what it does without being asked.

A command names neither the method nor what is trained, since there is a trainer for each. `aliases` translates the flags.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from finetrainers.utils.launch import launched_processes, launched_to_split_weights, says_yes

from ..given import Given

#: Names that its launch scripts have and no other program has.
TELLING = ("bestofn", "use_group", "use_same_noise", "use_videoalign", "vq_coef", "mq_coef")
#: What its trainer does for a flag that is left out, by flag. Its presets of published values are those of a script.
_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lr_warmup_steps": 10,
    "max_grad_norm": 2.0,
    "weight_decay": 0.01,
    "num_generations": 16,
    "bestofn": 8,
    "timestep_fraction": 1.0,
    "gradient_accumulation_steps": 1,
    "checkpointing_steps": 500,
    "train_batch_size": 16,
    "shift": 1.0,
    "use_same_noise": False,
}
#: Schedules that decay over 1,000,000 optimizer steps there (`num_training_steps`), so that no run sees it.
_DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial")
#: What its trainer does whatever the flags say, by our option.
_FIXED: dict[str, Any] = {
    "method": "grpo",
    "training_type": "full-finetune",
    "lr_scheduler": "constant_with_warmup",
    "rollout_guidance": 6.018,
    "enable_tiling": True,
    "dancegrpo_files": True,
    "train_log": True,
}
_SPLIT = ("fsdp", "fsdp_sharding_startegy", "deepspeed")  # what says how weights are split


def read_command(sources: Sequence[Given], ours: dict[str, str | None]) -> Given | None:
    """What DanceGRPO's trainer does that its command does not say; None if the options are no such command.

    A command is known by `model_type` next to names that are DanceGRPO's alone. A method or a preset that is named
    makes it a command of ours.

    Args:
        sources: the options of all places.
        ours: our option that each of its names sets.
    """
    given = {name: value for source in sources for name, value in source.values.items()}
    named = [name for name in ("method", "grpo_preset") if given.get(name) is not None]
    if "model_type" not in given or named or not any(name in given for name in TELLING):
        return None
    place = next(source.where["model_type"] for source in sources if "model_type" in source.values)
    taken = {*given, *(ours.get(name) for name in given)} - {None}
    fixed = {name: value for name, value in _FIXED.items() if name not in taken}
    if _splits(given):
        fixed["fsdp"] = "full"
    if _shards(given) and "sync_each_batch" not in taken:
        fixed["sync_each_batch"] = True  # its trainer never defers the reduction of gradients (`no_sync`)
    left_out = {name: value for name, value in _DEFAULTS.items() if not {name, ours.get(name)} & taken}
    read = Given({**fixed, **left_out}, dict.fromkeys(fixed, place) | {name: f"--{name}" for name in left_out})
    told = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in fixed.items())
    note = f"{place} {given['model_type']}: a command of DanceGRPO's video trainer, which is {told}"
    if left_out:
        said = ", ".join(f"{name} {value}" for name, value in left_out.items())
        note += f"; its own defaults count for what the command leaves out: {said}"
    read.notes.append(note)
    if "cfg" not in given:
        read.notes.append(
            f"{place} without --cfg drops a tenth of the prompts there, whose embeddings are zeros then; none is dropped here"
        )
    for source in sources:
        if (schedule := source.values.get("lr_scheduler")) in _DECAYING:
            source.values["lr_scheduler"] = "constant_with_warmup"
            read.notes.append(
                f"{source.where['lr_scheduler']} {schedule} is over 1,000,000 steps there, so it hardly decays: "
                "--lr_scheduler constant_with_warmup"
            )
    read.is_translated = True
    return read


def _shards(given: dict[str, Any]) -> bool:
    """Return whether FSDP2 shards the weights."""
    asked = given.get("fsdp") or given.get("fsdp_sharding_startegy", "none") != "none"
    return launched_processes() > 1 and (_splits(given) or bool(asked) or launched_to_split_weights() == "FSDP2")


def _splits(given: dict[str, Any]) -> bool:
    """Whether to shard all weights, as its trainer does, since neither the options nor the launcher say how."""
    said = any(given.get(name) for name in _SPLIT) or says_yes("ACCELERATE_USE_DEEPSPEED", os.environ)
    return launched_processes() > 1 and not said and launched_to_split_weights() is None
