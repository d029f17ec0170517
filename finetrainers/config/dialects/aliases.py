"""Aliases of DanceGRPO's options, so that its commands run here: our option for each, or why there is none.

They count for `--method grpo` only. Names that both programs have are ours, with our meaning, but for two:
`gradient_accumulation_steps` counts clips there, or prompts if it exceeds the clips, and here has no other meaning with
this method; and `checkpointing_steps` counts rollouts if the length of the run does (`max_train_steps`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from finetrainers.utils.launch import launched_processes, launched_to_split_weights, says_yes
from finetrainers.utils.text import nearest, plural

from ..base import Section
from ..errors import value_message
from ..given import Given
from ..grpo import COMPARING_METHODS
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
    "fps": "reward_fps",
    "use_same_noise": "init_same_noise",
    "adv_clip_max": "advantage_clip",
    "cfg_infer": "rollout_cfg",
}
#: Names that its published commands have and that change nothing there (`model_type` chooses a loader): what does it here.
WITHOUT_EFFECT = {
    "model_type": "--model_name (there it chooses how weights are loaded)",
    "num_frames": "--t, or --rollout_size FxHxW",
    "group_frame": "every clip has the --rollout_size",
    "group_resolution": "every clip has the --rollout_size",
    "precondition_outputs": "it follows from the model",
    "ema_start_step": "--use_ema, --ema_update_after_step",
    "validation_prompt_dir": "--eval_prompts, --validation_prompts",
    "uncond_prompt_dir": "the empty prompt is encoded where it is needed",
    "validation_sampling_steps": "--validation_inference_steps",
    "log_validation": "--validation_prompts with --validation_steps",
    "checkpoints_total_limit": "--checkpointing_limit",
    "num_train_epochs": "--max_train_steps, or --train_steps",
    "num_latent_t": "--t, or --rollout_size FxHxW",
    "loss_coef": "--lr",
    "ignore_last": "the last denoising step draws no noise, so it is never trained",
    "weight_path": "--reward NAME=1,path=FOLDER",
    **dict.fromkeys(
        ("weighting_scheme", "logit_mean", "logit_std", "mode_scale"), "--shift sets the noise levels of rollouts"
    ),
}
#: Names whose work is another's here: what to use instead.
REFUSED = {
    "resume_from_lora_checkpoint": "read by nobody in DanceGRPO; --resume_from_checkpoint continues a run, LoRA or not",
    "reference_model_path": "no model draws first frames here; name an image with each prompt in the file of --prompts",
    "fsdp_sharding_strategy": "DanceGRPO writes it fsdp_sharding_startegy; use --fsdp full or --fsdp hybrid",
}
#: Where DanceGRPO looks for the reward model.
_VIDEOALIGN = Path("videoalign_ckpt")
#: Our options for the ways in which it shards the network.
_SHARDING: dict[str, dict[str, Any]] = {
    "full": {"fsdp": "full"},
    "hybrid_full": {"fsdp": "hybrid"},
    "hybrid_zero2": {"fsdp": "hybrid", "fsdp_reshard_after_forward": False},
    "none": {},
}


class _Theirs(Section):
    """Options that become ours by a sum or a choice, with their defaults; the description is the one that each sets.

    Those without a description are refused unless they ask for what always holds here.
    """

    h: Any = Field(None, description="rollout_size")
    w: Any = Field(None, description="rollout_size")
    t: Any = Field(None, description="rollout_size")
    train_batch_size: Count | None = Field(None, description="prompts_per_step")
    bestofn: Count | None = Field(None, description="best_of_n")
    max_train_steps: Count | None = Field(None, description="train_steps")
    use_videoalign: bool = Field(False, description="reward")
    vq_coef: float = Field(1.0, description="reward")
    mq_coef: float = Field(0.0, description="reward")
    sampler_seed: Any = Field(None, description="seed")
    use_hpsv2: bool = Field(False, description="reward")
    use_pickscore: bool = Field(False, description="reward")
    use_lora: bool = Field(False, description="training_type")
    fsdp_sharding_startegy: Literal["full", "hybrid_full", "hybrid_zero2", "none"] | None = Field(
        None, description="fsdp"
    )
    use_cpu_offload: bool = Field(False, description="fsdp_cpu_offload")
    master_weight_type: Literal["fp32", "bf16"] | None = Field(None, description="master_weights")
    use_group: bool = True
    cfg: float = 0.0
    train_sp_batch_size: Count = 1


#: All names of DanceGRPO's that are not ours, with our option that each sets, if it sets one.
FOREIGN: dict[str, str | None] = {
    **RENAMED,
    **{name: field.description for name, field in _Theirs.model_fields.items()},
    **dict.fromkeys((*WITHOUT_EFFECT, *REFUSED)),
}


def translate(given: Given) -> None:
    """Replace DanceGRPO's names by ours; with other methods than those of reward finetuning they are unknown."""
    if given.values.get("method") in COMPARING_METHODS:
        _Translation(given, [name for name in TELLING if name in given.values]).run()
        return
    for name in [name for name in given.values if name in FOREIGN]:
        target = FOREIGN[name]
        hint = f"; it is DanceGRPO's name of {target!r}, for --method grpo" if target else nearest(name, fields())
        _refuse(given, name, f"unknown option {name!r}{hint}")


def _refuse(given: Given, name: str, message: str) -> None:
    given.refuse(name, message, *filter(None, [FOREIGN.get(name)]))


@dataclass
class _Translation:
    """The translation of one set of options.

    Attributes:
        given: the options, of which theirs are replaced.
        told: names of DanceGRPO's algorithm among them.
    """

    given: Given
    told: list[str]

    def run(self) -> None:
        """Translate all options."""
        given = self.given
        given.is_translated |= bool(self.told)
        self._preset()
        self._without_effect()
        for name in [name for name in REFUSED if name in given.values]:
            _refuse(given, name, REFUSED[name])
        base = Path(str(given.values.get("pretrained_model_name_or_path")))
        for name in [name for name in RENAMED if name in given.values]:
            value, option = given.values.pop(name), fields()[RENAMED[name]]
            if option.place != "model" or Path(str(value)) != base:  # a part in the folder of the model needs no option
                given.put(option.name, value, name)
        theirs = self._read()
        self._size(theirs)
        self._rewards(theirs)
        self._machine(theirs)
        self._seed(theirs)
        if not theirs.use_group:
            _refuse(given, "use_group", "clips are always compared within the group of their prompt; leave it out")
        if theirs.cfg:
            message = (
                f"{theirs.cfg:g} is DanceGRPO's rate of dropped prompts; none is dropped here, leave it out. "
                "Classifier-free guidance is --rollout_cfg"
            )
            _refuse(given, "cfg", message)
        self._clips(theirs)
        self._accumulation()
        self._length(theirs)

    def _read(self) -> _Theirs:
        """Take their options with valid values; the others are refused."""
        values = self.given.values
        found = {name: values.pop(name) for name in _Theirs.model_fields if name in values}
        try:
            return _Theirs.model_validate(found)
        except ValidationError as error:
            wrong = {str(entry["loc"][0]): value_message(entry) for entry in error.errors()}
        for name, message in wrong.items():
            _refuse(self.given, name, message)
        return _Theirs.model_validate({name: value for name, value in found.items() if name not in wrong})

    def _count(self, name: str) -> int | None:
        """The number that our option will have, given, by the preset or by default; None if it is none."""
        values = self.given.values
        said = (values.get(name), preset_options(values).get(name), fields()[name].field.default)
        return _integer(next((value for value in said if value is not None), None))

    def _preset(self) -> None:
        """Choose DanceGRPO's algorithm if its own names are used and no other algorithm is named."""
        if not self.told:
            return
        given = self.given
        places = ", ".join(given.where[name] for name in self.told)
        for other, own in (("grpo_preset", "dancegrpo"), ("method", "grpo")):
            named = given.values.get(other)
            if named not in (None, own):
                note = f"{places}: these are DanceGRPO's names, but the algorithm is that of --{other} {named}"
                given.notes.append(note)
                return
        if given.values.get("grpo_preset") is None:
            given.values["grpo_preset"], given.where["grpo_preset"] = "dancegrpo", places
            given.notes.append(
                f"{places}: these are DanceGRPO's names, so --grpo_preset dancegrpo sets what is not given (sampler, "
                "trained steps, clip range, optimizer); name another preset for another algorithm"
            )

    def _without_effect(self) -> None:
        """Note which names have no effect, there or here, and what to use instead."""
        values, where = self.given.values, self.given.where
        found = {name: text for name, text in WITHOUT_EFFECT.items() if name in values}
        if self.told and "validation_steps" in values and not values.get("validation_prompts"):
            found["validation_steps"] = "--validation_prompts with --validation_steps"
        for name in found:
            del values[name]
        if found:
            width = max(len(where[name]) for name in found)
            lines = [f"  {where[name]:<{width}}  {text}" for name, text in found.items()]
            head = "flags of DanceGRPO's scripts that its trainer never reads have no effect here either; instead use"
            self.given.notes.append("\n".join([head, *lines]))

    def _size(self, theirs: _Theirs) -> None:
        names = [name for name in ("t", "h", "w") if name in theirs.model_fields_set]
        missing = [name for name in ("t", "h", "w") if name not in names]
        if names and missing:
            _refuse(self.given, names[0], f"a clip's size needs h, w and t; {' and '.join(missing)} is not given")
        elif names:
            self.given.put("rollout_size", f"{theirs.t}x{theirs.h}x{theirs.w}", *names)

    def _rewards(self, theirs: _Theirs) -> None:
        scorers = ("use_videoalign", "use_hpsv2", "use_pickscore")
        names = [name for name in (*scorers, "vq_coef", "mq_coef") if name in theirs.model_fields_set]
        if not names or "reward" in self.given.lost:
            return
        rewards = [f"{name.removeprefix('use_')}=1.0" for name in scorers[1:] if getattr(theirs, name)]
        if theirs.use_videoalign:
            path = f",path={_VIDEOALIGN}" if _VIDEOALIGN.is_dir() else ""
            weights = {"vq": theirs.vq_coef, "mq": theirs.mq_coef}
            rewards += [f"videoalign.{head}={weight!r}{path}" for head, weight in weights.items()]
        elif names[-1] not in scorers:
            _refuse(self.given, names[-1], "needs use_videoalign; or use --reward videoalign.vq=WEIGHT")
            return
        self.given.put("reward", rewards, *names)

    def _machine(self, theirs: _Theirs) -> None:
        """Translate options of memory and parallelism."""
        given = self.given
        if theirs.train_sp_batch_size > 1:
            message = (
                "processes that share clips (--sp_size) train as many at once as others do; leave it out, and use "
                "--batch_size"
            )
            _refuse(given, "train_sp_batch_size", message)
        if theirs.master_weight_type is not None:
            ours = {"fp32": "fp32", "bf16": "stochastic_rounding"}[theirs.master_weight_type]
            given.put("master_weights", ours, "master_weight_type")
        if theirs.use_lora:
            given.put("training_type", "lora", "use_lora")
        if theirs.fsdp_sharding_startegy is not None:
            self._shard(theirs.fsdp_sharding_startegy)
        if theirs.use_cpu_offload:
            self._offload(splits=theirs.fsdp_sharding_startegy != "none")

    def _shard(self, strategy: str) -> None:
        """Translate how weights are split; a single process has nothing to split."""
        given, name = self.given, "fsdp_sharding_startegy"
        place, processes = given.where[name], launched_processes()
        ours = _SHARDING[strategy] if processes > 1 else {}
        if all(given.put(option, value, name) for option, value in ours.items()):
            said = " ".join(f"--{option} {value}" for option, value in ours.items() if isinstance(value, str))
            kept = " --no-fsdp_reshard_after_forward" if len(ours) > 1 else ""
            whole = "every process has all weights" if processes > 1 else "nothing is split"
            given.notes.append(
                f"{place} {strategy} with {plural(processes, 'process', 'processes')}: {said + kept or whole}"
            )

    def _offload(self, *, splits: bool) -> None:
        """Choose the offload of the engine that splits the run: DeepSpeed's, or that of FSDP2, as in DanceGRPO."""
        given, processes = self.given, launched_processes()
        is_deepspeed = given.values.get("deepspeed") or says_yes("ACCELERATE_USE_DEEPSPEED")
        option = "zero_offload" if is_deepspeed else "fsdp_cpu_offload"
        place = given.where["use_cpu_offload"]
        if not given.put(option, True, "use_cpu_offload"):
            return
        said = f"--{option}"
        if not is_deepspeed and given.values.get("fsdp") is None and launched_to_split_weights() is None:
            whole = processes > 1 and not splits
            engine: dict[str, Any] = {"fsdp": "hybrid", "fsdp_group_size": 1} if whole else {"fsdp": "full"}
            given.values |= engine
            given.where |= dict.fromkeys(engine, place)
            said = " ".join([*(f"--{name} {value}" for name, value in engine.items()), said])
        given.notes.append(f"{place} with {plural(processes, 'process', 'processes')}: {said}")

    def _seed(self, theirs: _Theirs) -> None:
        """There is one seed here: theirs for the prompts is used if no other is given."""
        seed = theirs.sampler_seed
        if seed is not None and self.given.values.get("seed") is None:
            self.given.put("seed", seed, "sampler_seed")
        elif seed is not None:
            note = f"sampler_seed {seed}: the order of prompts follows from --seed too, which is given"
            self.given.notes.append(note)

    def _clips(self, theirs: _Theirs) -> None:
        """Translate counts that are those of a process there."""
        batch, kept = theirs.train_batch_size, theirs.bestofn
        if batch is not None:
            self.given.put("prompts_per_step", batch * self._data_size(), "train_batch_size")
        if kept is not None and kept % (batch or 1):
            message = f"{kept} kept clips of a process do not divide by its train_batch_size of {batch}"
            _refuse(self.given, "bestofn", message)
        elif kept is not None:
            self.given.put("best_of_n", kept // (batch or 1), "bestofn")

    def _data_size(self) -> int:
        """Processes with clips of their own."""
        return max(1, launched_processes() // (self._count("sp_size") or 1))

    def _accumulation(self) -> None:
        """Translate clips per optimizer step. 1, our default, counts only next to names that are theirs alone."""
        name, given, processes = "gradient_accumulation_steps", self.given, self._data_size()
        values = given.values
        clips = _integer(values.get(name))
        prompts, kept = self._count("prompts_per_step"), self._count("best_of_n") or self._count("num_generations")
        if clips is None or prompts is None or kept is None:
            return
        if clips == 1 and (not self.told or "updates_per_rollout" in values):
            return
        share = prompts * kept // processes
        if clips > share and "train_batch_size" in given.where:
            self._accumulate_prompts(name, clips, prompts=prompts, kept=kept, share=share)
            return
        if clips > share:
            total = f"{plural(prompts, 'prompt')} x {plural(kept, 'clip')}"
            total += f" / {processes} processes" if processes > 1 else ""
            message = (
                f"a step every {clips} clips never comes: of a rollout, a process keeps {total} = {share}; use at most "
                f"{share}, or --updates_per_rollout"
            )
            given.refuse(name, message, "updates_per_rollout")
            return
        if rest := share % clips:
            given.notes.append(
                f"{given.where[name]} {clips} does not divide the {share} clips that a process keeps of a rollout: "
                f"DanceGRPO would drop {plural(rest, 'clip')}, and here the clips are spread over one step more"
            )
        given.put("updates_per_rollout", math.ceil(share / clips), name)

    def _accumulate_prompts(self, name: str, batches: int, *, prompts: int, kept: int, share: int) -> None:
        """A step of more clips than a process keeps takes as many of its batches of prompts, all in one rollout."""
        given, place = self.given, self.given.where[name]
        if not given.put("updates_per_rollout", 1, name):
            return
        total = given.values["prompts_per_step"] = prompts * batches
        batch = plural(prompts // self._data_size(), "prompt")
        given.notes.append(
            f"{place} {batches} exceeds the {plural(share, 'clip')} that a process keeps of a rollout, so DanceGRPO would "
            f"never take a step. It counts batches of {batch} here: --prompts_per_step {total}, so {total * kept} clips "
            f"a step. A rollout samples {batches} times as many clips; {place} {share} takes a step for each batch"
        )

    def _length(self, theirs: _Theirs) -> None:
        """Translate the number of rollouts into optimizer steps: here a rollout has one or more."""
        given, rollouts, updates = self.given, theirs.max_train_steps, self._count("updates_per_rollout") or 1
        if rollouts is None:
            return
        given.put("train_steps", rollouts * updates, "max_train_steps")
        said = [f"{given.where['max_train_steps']} {rollouts}"]
        becomes = [f"--train_steps {rollouts * updates}"]
        every = _integer(given.values.get("checkpointing_steps"))
        if every is not None:
            given.values["checkpointing_steps"] = every * updates
            said.append(f"{given.where['checkpointing_steps']} {every}")
            becomes.append(f"--checkpointing_steps {every * updates}")
        if updates > 1 or self.told:
            counts = "counts" if len(said) == 1 else "count"
            each = plural(updates, "optimizer step")
            note = f"{' and '.join(said)} {counts} rollouts, of {each} each: {', '.join(becomes)}"
            given.notes.append(note)


def _integer(value: Any) -> int | None:
    """A positive whole number, also as text; None for anything else."""
    try:
        return TypeAdapter(Count).validate_python(value)
    except ValidationError:
        return None
