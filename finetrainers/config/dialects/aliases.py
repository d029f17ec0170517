"""Aliases of DanceGRPO's options, so that its commands run here: our option for each, or why there is none.

They count for `--method grpo` only. Names that both programs have are ours, with our meaning, but for two:
`gradient_accumulation_steps` counts clips there, or prompts if it exceeds the clips, and here has no other meaning with
this method; and `checkpointing_steps` counts rollouts if the length of the run does (`max_train_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from finetrainers.utils.failures import Kind
from finetrainers.utils.launch import is_enabled, launched_processes, launched_to_split_weights
from finetrainers.utils.text import nearest, plural

from ..base import Section
from ..errors import value_kind, value_message
from ..given import RawOptions
from ..methods import trait
from ..names import invert_groups
from ..presets import preset_options
from ..root import fields
from .dancegrpo_command import TELLING

Count = Annotated[int, Field(ge=1)]

#: Names that mean the same as one of ours.
RENAMED = {
    "learning_rate": "lr",
    "data_json_path": "prompts",
    "dit_model_name_or_path": "transformer_id",
    "vae_model_path": "vae_id",
    "tracker_project_name": "tracker_name",
    "checkpoints_total_limit": "checkpointing_limit",
    "fps": "reward_fps",
    "use_same_noise": "init_same_noise",
    "adv_clip_max": "advantage_clip",
    "cfg_infer": "rollout_cfg",
}
#: Names in its published commands that change nothing there (`model_type` chooses a loader), and our replacements.
WITHOUT_EFFECT = {
    "model_type": "--model_name (in DanceGRPO it chooses how weights are loaded)",
    "num_frames": "--t, or --rollout_size FxHxW",
    "group_frame": "every clip has the --rollout_size",
    "group_resolution": "every clip has the --rollout_size",
    "precondition_outputs": "it follows from the model",
    "ema_start_step": "--use_ema, --ema_update_after_step",
    "validation_prompt_dir": "--eval_prompts, --validation_prompts",
    "uncond_prompt_dir": "the empty prompt is encoded if it is needed",
    "validation_sampling_steps": "--validation_inference_steps",
    "log_validation": "--validation_prompts with --validation_steps",
    "num_train_epochs": "--max_train_steps, or --train_steps",
    "num_latent_t": "--t, or --rollout_size FxHxW",
    "loss_coef": "--lr",
    "ignore_last": "the last denoising step draws no noise, so it is never trained",
    "weight_path": "--reward NAME=1,path=DIRECTORY",
    **dict.fromkeys(
        ("weighting_scheme", "logit_mean", "logit_std", "mode_scale"), "--shift sets the noise levels of rollouts"
    ),
}
#: Names that are refused, and their replacements.
REFUSED = {
    "resume_from_lora_checkpoint": "DanceGRPO never reads it; --resume_from_checkpoint continues a run, LoRA or not",
    "reference_model_path": "no model generates first frames here; name an image with each prompt in the file of "
    "--prompts",
    "fsdp_sharding_strategy": "DanceGRPO writes it fsdp_sharding_startegy; use --fsdp full or --fsdp hybrid",
}
#: Directory in which DanceGRPO expects the reward model.
_VIDEOALIGN = Path("videoalign_ckpt")
#: Our options for its sharding strategies.
_SHARDING: dict[str, dict[str, Any]] = {
    "full": {"fsdp": "full"},
    "hybrid_full": {"fsdp": "hybrid"},
    "hybrid_zero2": {"fsdp": "hybrid", "fsdp_reshard_after_forward": False},
    "none": {},
}


class _ExternalOptions(Section):
    """Options that become ours by a sum or a choice, with their defaults.

    Options that set none of ours (`_TARGETS`) are refused unless they have the only value that is supported here.
    """

    h: Any = None
    w: Any = None
    t: Any = None
    train_batch_size: Count | None = None
    bestofn: Count | None = None
    max_train_steps: Count | None = None
    use_videoalign: bool = False
    vq_coef: float = 1.0
    mq_coef: float = 0.0
    sampler_seed: Any = None
    use_hpsv2: bool = False
    use_pickscore: bool = False
    use_lora: bool = False
    fsdp_sharding_startegy: Literal["full", "hybrid_full", "hybrid_zero2", "none"] | None = None
    use_cpu_offload: bool = False
    master_weight_type: Literal["fp32", "bf16"] | None = None
    use_group: bool = True
    cfg: float = 0.0
    train_sp_batch_size: Count = 1


#: Our option that each of these sets.
_TARGETS = invert_groups({
    "rollout_size": "h w t",
    "prompts_per_step": "train_batch_size",
    "best_of_n": "bestofn",
    "train_steps": "max_train_steps",
    "reward": "use_videoalign vq_coef mq_coef use_hpsv2 use_pickscore",
    "seed": "sampler_seed",
    "training_type": "use_lora",
    "fsdp": "fsdp_sharding_startegy",
    "fsdp_cpu_offload": "use_cpu_offload",
    "master_weights": "master_weight_type",
})  # fmt: skip
#: All names of DanceGRPO's that are not ours, with our option that each sets, if it sets one.
FOREIGN: dict[str, str | None] = {
    **dict.fromkeys((*_ExternalOptions.model_fields, *WITHOUT_EFFECT, *REFUSED)),
    **RENAMED,
    **_TARGETS,
}


def translate(options: RawOptions) -> None:
    """Replace DanceGRPO's names by ours; with methods other than those of reward finetuning they are unknown."""
    if trait(options.values.get("method"), "compares"):
        _translate_all(options, [name for name in TELLING if name in options.values])
        return
    for name in [name for name in options.values if name in FOREIGN]:
        target = FOREIGN[name]
        hint = f"; it is DanceGRPO's name of {target!r}, for --method grpo" if target else nearest(name, fields())
        _refuse(options, name, f"unknown option {name!r}{hint}", "unknown")


def _refuse(options: RawOptions, name: str, message: str, kind: Kind) -> None:
    options.refuse(name, message, *filter(None, [FOREIGN.get(name)]), kind=kind)


def _translate_all(options: RawOptions, dance_names: Sequence[str]) -> None:
    """Translate all options.

    Args:
        options: the options; DanceGRPO's are replaced.
        dance_names: names of DanceGRPO's algorithm among them.
    """
    _choose_preset(options, dance_names)
    _note_without_effect(options, dance_names)
    for name in [name for name in REFUSED if name in options.values]:
        _refuse(options, name, REFUSED[name], "unsupported")
    base = Path(str(options.values.get("pretrained_model_name_or_path")))
    for name in [name for name in RENAMED if name in options.values]:
        value, option = options.values.pop(name), fields()[RENAMED[name]]
        if option.place != "model" or Path(str(value)) != base:  # a part in the folder of the model needs no option
            options.put(option.name, value, name)
    external = _read_external(options)
    _translate_size(options, external)
    _translate_rewards(options, external)
    _translate_machine(options, external)
    if (seed := external.sampler_seed) is not None:  # of the prompts; there is one seed here
        if options.values.get("seed") is None:
            options.put("seed", seed, "sampler_seed")
        else:
            options.notes.append(f"sampler_seed {seed}: --seed is set, and also determines the order of prompts")
    if not external.use_group:
        _refuse(
            options,
            "use_group",
            "clips are always compared within the group of their prompt; remove it",
            "unsupported",
        )
    if external.cfg:
        _refuse(
            options,
            "cfg",
            f"{external.cfg:g} is DanceGRPO's rate of dropped prompts, and prompts are not dropped here; remove it. "
            "Classifier-free guidance is --rollout_cfg",
            "unsupported",
        )
    _translate_clips(options, external)
    _translate_accumulation(options, is_dance=bool(dance_names))
    _translate_length(options, external.max_train_steps, is_dance=bool(dance_names))


def _read_external(options: RawOptions) -> _ExternalOptions:
    """Take the external options with valid values; refuse the others."""
    external = {name: options.values.pop(name) for name in _ExternalOptions.model_fields if name in options.values}
    try:
        return _ExternalOptions.model_validate(external)
    except ValidationError as error:
        wrong = {str(entry["loc"][0]): entry for entry in error.errors()}
    for name, entry in wrong.items():
        _refuse(options, name, value_message(entry), value_kind(entry))
        del external[name]
    return _ExternalOptions.model_validate(external)


def _count(values: Mapping[str, Any], name: str) -> int | None:
    """Return the number that our option will have, given, by the preset or by default, or None if it has none."""
    candidates = (values.get(name), preset_options(values).get(name), fields()[name].field.default)
    return _integer(next((value for value in candidates if value is not None), None))


def _choose_preset(options: RawOptions, dance_names: Sequence[str]) -> None:
    """Choose DanceGRPO's algorithm if its own names are used and no other algorithm is named."""
    if not dance_names:
        return
    places = ", ".join(options.where[name] for name in dance_names)
    for other, expected in (("grpo_preset", "dancegrpo"), ("method", "grpo")):
        value = options.values.get(other)
        if value not in (None, expected):
            options.notes.append(
                f"{places}: these are DanceGRPO's names, but the algorithm is that of --{other} {value}"
            )
            return
    if options.values.get("grpo_preset") is None:
        options.values["grpo_preset"], options.where["grpo_preset"] = "dancegrpo", places
        options.notes.append(
            f"{places}: these are DanceGRPO's names, so --grpo_preset dancegrpo sets what you omit (sampler, trained "
            "steps, clip range, optimizer); set another preset for another algorithm"
        )


def _note_without_effect(options: RawOptions, dance_names: Sequence[str]) -> None:
    """Note names that have no effect, there or here, and their replacements."""
    values, where = options.values, options.where
    hints = {name: text for name, text in WITHOUT_EFFECT.items() if name in values}
    if dance_names and "validation_steps" in values and not values.get("validation_prompts"):
        hints["validation_steps"] = "--validation_prompts with --validation_steps"
    for name in hints:
        del values[name]
    if hints:
        width = max(len(where[name]) for name in hints)
        lines = [f"  {where[name]:<{width}}  {text}" for name, text in hints.items()]
        head = "DanceGRPO's trainer never reads these flags of its scripts, so they have no effect; use instead"
        options.notes.append("\n".join([head, *lines]))


def _translate_size(options: RawOptions, external: _ExternalOptions) -> None:
    names = [name for name in ("t", "h", "w") if name in external.model_fields_set]
    missing = [name for name in ("t", "h", "w") if name not in names]
    if names and missing:
        _refuse(options, names[0], f"a clip's size requires h, w and t; {' and '.join(missing)} is not set", "required")
    elif names:
        options.put("rollout_size", f"{external.t}x{external.h}x{external.w}", *names)


def _translate_rewards(options: RawOptions, external: _ExternalOptions) -> None:
    scorers = ("use_videoalign", "use_hpsv2", "use_pickscore")
    names = [name for name in (*scorers, "vq_coef", "mq_coef") if name in external.model_fields_set]
    if not names or "reward" in options.lost:
        return
    rewards = [f"{name.removeprefix('use_')}=1.0" for name in scorers[1:] if getattr(external, name)]
    if external.use_videoalign:
        path = f",path={_VIDEOALIGN}" if _VIDEOALIGN.is_dir() else ""
        rewards += [f"videoalign.vq={external.vq_coef!r}{path}", f"videoalign.mq={external.mq_coef!r}{path}"]
    elif names[-1] not in scorers:
        _refuse(options, names[-1], "requires use_videoalign; or use --reward videoalign.vq=WEIGHT", "required")
        return
    options.put("reward", rewards, *names)


def _translate_machine(options: RawOptions, external: _ExternalOptions) -> None:
    """Translate options of memory and parallelism."""
    if external.train_sp_batch_size > 1:
        _refuse(
            options,
            "train_sp_batch_size",
            "processes that share clips (--sp_size) train the same number at once as others; remove it, and use "
            "--batch_size",
            "unsupported",
        )
    if external.master_weight_type is not None:
        master_weights = {"fp32": "fp32", "bf16": "stochastic_rounding"}[external.master_weight_type]
        options.put("master_weights", master_weights, "master_weight_type")
    if external.use_lora:
        options.put("training_type", "lora", "use_lora")
    if external.fsdp_sharding_startegy is not None:
        _shard(options, external.fsdp_sharding_startegy)
    if external.use_cpu_offload:
        _offload(options, splits=external.fsdp_sharding_startegy != "none")


def _shard(options: RawOptions, strategy: str) -> None:
    """Translate how weights are split; a single process has nothing to split."""
    name = "fsdp_sharding_startegy"
    place, processes = options.where[name], launched_processes()
    sharding = _SHARDING[strategy] if processes > 1 else {}
    if all(options.put(option, value, name) for option, value in sharding.items()):
        flags = " ".join(f"--{option} {value}" for option, value in sharding.items() if isinstance(value, str))
        reshard = " --no-fsdp_reshard_after_forward" if len(sharding) > 1 else ""
        fallback = "every process has all weights" if processes > 1 else "nothing is sharded"
        options.notes.append(
            f"{place} {strategy} with {plural(processes, 'process', 'processes')}: {flags + reshard or fallback}"
        )


def _offload(options: RawOptions, *, splits: bool) -> None:
    """Choose the offload of the engine that splits the run: DeepSpeed's, or that of FSDP2, as in DanceGRPO."""
    processes = launched_processes()
    is_deepspeed = options.values.get("deepspeed") or is_enabled("ACCELERATE_USE_DEEPSPEED")
    option = "zero_offload" if is_deepspeed else "fsdp_cpu_offload"
    place = options.where["use_cpu_offload"]
    if not options.put(option, True, "use_cpu_offload"):
        return
    flags = f"--{option}"
    if not is_deepspeed and options.values.get("fsdp") is None and launched_to_split_weights() is None:
        is_replicated = processes > 1 and not splits
        engine: dict[str, Any] = {"fsdp": "hybrid", "fsdp_group_size": 1} if is_replicated else {"fsdp": "full"}
        options.values |= engine
        options.where |= dict.fromkeys(engine, place)
        flags = " ".join([*(f"--{name} {value}" for name, value in engine.items()), flags])
    options.notes.append(f"{place} with {plural(processes, 'process', 'processes')}: {flags}")


def _translate_clips(options: RawOptions, external: _ExternalOptions) -> None:
    """Translate counts that are per process there."""
    batch, best_of_n = external.train_batch_size, external.bestofn
    if batch is not None:
        options.put("prompts_per_step", batch * _data_size(options.values), "train_batch_size")
    if best_of_n is not None and best_of_n % (batch or 1):
        _refuse(
            options,
            "bestofn",
            f"{best_of_n} kept clips of a process do not divide by its train_batch_size of {batch}",
            "conflict",
        )
    elif best_of_n is not None:
        options.put("best_of_n", best_of_n // (batch or 1), "bestofn")


def _data_size(values: Mapping[str, Any]) -> int:
    """Return how many processes train on separate clips."""
    return max(1, launched_processes() // (_count(values, "sp_size") or 1))


def _translate_accumulation(options: RawOptions, *, is_dance: bool) -> None:
    """Translate clips per optimizer step. 1, our default, counts only next to names that only DanceGRPO has."""
    name, values, processes = "gradient_accumulation_steps", options.values, _data_size(options.values)
    clips, prompts = _integer(values.get(name)), _count(values, "prompts_per_step")
    clips_per_prompt = _count(values, "best_of_n") or _count(values, "num_generations")
    if clips is None or prompts is None or clips_per_prompt is None:
        return
    if clips == 1 and (not is_dance or "updates_per_rollout" in values):
        return
    share = prompts * clips_per_prompt // processes
    if clips > share and "train_batch_size" in options.where:
        _accumulate_prompts(options, name, clips, prompts=prompts, clips_per_prompt=clips_per_prompt, share=share)
        return
    if clips > share:
        total = f"{plural(prompts, 'prompt')} x {plural(clips_per_prompt, 'clip')}"
        total += f" / {processes} processes" if processes > 1 else ""
        options.refuse(
            name,
            f"a step every {clips} clips never comes: of a rollout, a process keeps {total} = {share}; use at most "
            f"{share}, or --updates_per_rollout",
            "updates_per_rollout",
            kind="conflict",
        )
        return
    if rest := share % clips:
        options.notes.append(
            f"{options.where[name]} {clips} does not divide the {share} clips that a process keeps of a rollout: "
            f"DanceGRPO would drop {plural(rest, 'clip')}, and here the clips are spread over one step more"
        )
    options.put("updates_per_rollout", math.ceil(share / clips), name)


def _accumulate_prompts(
    options: RawOptions, name: str, batches: int, *, prompts: int, clips_per_prompt: int, share: int
) -> None:
    """Put as many batches of prompts into a rollout as a step counts, if a step has more clips than a process."""
    place = options.where[name]
    if not options.put("updates_per_rollout", 1, name):
        return
    total = options.values["prompts_per_step"] = prompts * batches
    batch = plural(prompts // _data_size(options.values), "prompt")
    options.notes.append(
        f"{place} {batches} exceeds the {plural(share, 'clip')} that a process keeps of a rollout, so DanceGRPO "
        f"would never take a step. It counts batches of {batch} here: --prompts_per_step {total}, so "
        f"{total * clips_per_prompt} clips a step. A rollout samples {batches} times as many clips; {place} "
        f"{share} takes a step for each batch"
    )


def _translate_length(options: RawOptions, rollouts: int | None, *, is_dance: bool) -> None:
    """Translate the number of rollouts into optimizer steps: here a rollout has one or more."""
    if rollouts is None:
        return
    updates = _count(options.values, "updates_per_rollout") or 1
    options.put("train_steps", rollouts * updates, "max_train_steps")
    sources = [f"{options.where['max_train_steps']} {rollouts}"]
    becomes = [f"--train_steps {rollouts * updates}"]
    every = _integer(options.values.get("checkpointing_steps"))
    if every is not None:
        options.values["checkpointing_steps"] = every * updates
        sources.append(f"{options.where['checkpointing_steps']} {every}")
        becomes.append(f"--checkpointing_steps {every * updates}")
    if updates > 1 or is_dance:
        counts = "counts" if len(sources) == 1 else "count"
        options.notes.append(
            f"{' and '.join(sources)} {counts} rollouts, of {plural(updates, 'optimizer step')} each: "
            f"{', '.join(becomes)}"
        )


def _integer(value: Any) -> int | None:
    """Return a positive whole number, text included, or None for anything else."""
    try:
        return TypeAdapter(Count).validate_python(value)
    except ValidationError:
        return None
