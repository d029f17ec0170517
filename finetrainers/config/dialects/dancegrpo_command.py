"""DanceGRPO's launch commands, unchanged: its trainer's fixed settings and defaults.

A command names neither the method nor the training type, since there is a trainer for each. `aliases` translates the
flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetrainers.utils.launch import is_enabled, launched_processes, launched_to_split_weights

from ..given import RawOptions

#: Names that its launch scripts have and no other program has.
TELLING = ("bestofn", "use_group", "use_same_noise", "use_videoalign", "vq_coef", "mq_coef")
#: Its trainer's default for each flag. Our presets of published values are those of a script.
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
#: Its trainer's settings that no flag changes, by our option.
_FIXED: dict[str, Any] = {
    "method": "grpo",
    "training_type": "full-finetune",
    "lr_scheduler": "constant_with_warmup",
    "rollout_guidance": 6.018,
    "enable_tiling": True,
    "dancegrpo_files": True,
    "train_log": True,
}
_SPLIT = ("fsdp", "fsdp_sharding_startegy", "deepspeed")  # options that set how weights are split


def read_command(sources: Sequence[RawOptions], our_options: dict[str, str | None]) -> RawOptions | None:
    """Return the settings that DanceGRPO's trainer adds to its command, or None if the options are not its command.

    A command is recognized by `model_type` next to names that only DanceGRPO has. A method or a preset makes it a
    command of ours.

    Args:
        sources: the options of all places.
        our_options: our option that each of its names sets.
    """
    values = {name: value for source in sources for name, value in source.values.items()}
    algorithm_options = [name for name in ("method", "grpo_preset") if values.get(name) is not None]
    if "model_type" not in values or algorithm_options or not any(name in values for name in TELLING):
        return None
    place = next(source.where["model_type"] for source in sources if "model_type" in source.values)
    set_names = {*values, *(our_options.get(name) for name in values)} - {None}
    fixed = {name: value for name, value in _FIXED.items() if name not in set_names}
    has_fsdp = values.get("fsdp") or values.get("fsdp_sharding_startegy", "none") != "none"
    if _splits(values):
        fixed["fsdp"], has_fsdp = "full", True
    has_fsdp = has_fsdp or launched_to_split_weights() == "FSDP2"
    if launched_processes() > 1 and has_fsdp and "sync_each_batch" not in set_names:
        fixed["sync_each_batch"] = True  # its trainer never defers the reduction of gradients (`no_sync`)
    left_out = {name: value for name, value in _DEFAULTS.items() if not {name, our_options.get(name)} & set_names}
    settings = RawOptions({**fixed, **left_out}, dict.fromkeys(fixed, place) | {name: f"--{name}" for name in left_out})
    flags = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in fixed.items())
    note = f"{place} {values['model_type']}: a command of DanceGRPO's video trainer, which is {flags}"
    if left_out:
        defaults = ", ".join(f"{name} {value}" for name, value in left_out.items())
        note += f"; its own defaults count for what the command leaves out: {defaults}"
    settings.notes.append(note)
    if "cfg" not in values:
        settings.notes.append(
            f"{place} without --cfg drops a tenth of the prompts there, with zeros as embeddings; none is dropped here"
        )
    for source in sources:
        if (schedule := source.values.get("lr_scheduler")) in _DECAYING:
            source.values["lr_scheduler"] = "constant_with_warmup"
            settings.notes.append(
                f"{source.where['lr_scheduler']} {schedule} is over 1,000,000 steps there, so it hardly decays: "
                "--lr_scheduler constant_with_warmup"
            )
    return settings


def _splits(values: dict[str, Any]) -> bool:
    """Return whether to shard all weights, as its trainer does, since neither the options nor the launcher say how."""
    is_stated = any(values.get(name) for name in _SPLIT) or is_enabled("ACCELERATE_USE_DEEPSPEED")
    return launched_processes() > 1 and not is_stated and launched_to_split_weights() is None
