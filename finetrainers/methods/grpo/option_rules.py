"""Rules between the options of reward finetuning, with the arithmetic in messages. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from finetrainers.config.checks.findings import Finding
from finetrainers.config.checks.options import check_rewards
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.grpo import (
    GRPOSection,
    kernel,
    step_range,
    trained_steps,
)
from finetrainers.config.hacking import hacking_rule, held_out_rewards
from finetrainers.config.methods import trait
from finetrainers.config.root import TrainConfig
from finetrainers.config.values import range_between
from finetrainers.utils.launch import local_world_size
from finetrainers.utils.text import plural

#: Fewer clips per optimizer step learn little or nothing (reports of users of DanceGRPO: 8 failed, 16 to 32 worked).
FEW_CLIPS = 16
#: Published amounts of noise for `flow` and `dance` are between 0.25 and this, but for one.
_MUCH_NOISE = 1.5
#: Least noise level of a rollout's first step: some schedules begin at 999 of 1000.
_FIRST_SIGMA = 0.98

#: Options of training on clips that are an error here, and their replacements.
CLIP_OPTIONS = {
    **dict.fromkeys(("data_root", "dataset_file", "dataset", "hf_dataset"), "clips are sampled; use --prompts FILE"),
    "eval_dataset_file": "clips are sampled; use --eval_prompts FILE",
    "video_resolution_buckets": "clips are sampled at one size; use --rollout_size FxHxW",
    "image_resolution_buckets": "clips are sampled at one size; use --rollout_size 1xHxW",
    "validation_epochs": "reward finetuning has no epochs; use --validation_steps",
}


def check_rollouts(config: TrainConfig, facts: Facts, *, world_size: int, copies: Sequence[str]) -> Iterator[Finding]:
    """Check the rules of all methods of reward finetuning.

    Args:
        config: the whole run.
        facts: of the checkpoint.
        world_size: how many processes train together.
        copies: descriptions of copies of the trained weights.
    """
    section = config.grpo
    yield from _check_inputs(section, facts.geometry)
    yield from _check_sigmas(section, is_flow=facts.is_flow)
    yield from check_rewards("reward", section.reward)
    yield from check_rewards("eval_reward", config.validation.eval_reward)
    compares = trait(config.training.method, "compares")
    if compares:
        yield from _check_groups(section)
    if section.num_generations > 1 or not compares:  # 1 is an error already
        yield from _check_division(config, world_size)
    yield from _check_reward_device(config, local_processes=local_world_size())
    if config.optimizer.scale_lr:
        yield (
            "scale_lr",
            "multiplies --lr by batch size x processes, which do not change the clips of an optimizer step here: "
            "they are --prompts_per_step x --num_generations / --updates_per_rollout; set --lr itself",
            "unsupported",
        )
    if section.shift is not None and not facts.is_flow:
        yield "shift", "this model is not a flow-matching model, so it has no shift; remove it", "unsupported"
    if section.rollout_guidance is not None and facts.guidance is None:
        yield (
            "rollout_guidance",
            "this network does not take guidance as an input; remove it. Classifier-free guidance is --rollout_cfg",
            "unsupported",
        )
    if trait(config.training.method, "clips_ratio"):
        yield from _check_policy(config)
    yield from _check_length(config)
    yield from _check_evaluation(config)
    yield from _check_hacking(config)
    yield from _check_memory(config, copies)
    for name, hint in CLIP_OPTIONS.items():
        if config.changed(name):
            yield name, f"is not supported with --method {config.training.method}: {hint}", "unsupported"


def check_policy_gradients(config: TrainConfig, *, is_flow: bool) -> Iterator[Finding]:
    """Check the rules of methods that train the rollout's steps."""
    yield from _check_noise(config.grpo, is_flow=is_flow)
    yield from _check_window(config)


def _check_inputs(section: GRPOSection, geometry: Geometry) -> Iterator[Finding]:
    if section.prompts is None:
        yield "prompts", "required: reward finetuning samples clips for prompts; set --prompts FILE", "required"
    if not section.reward:
        yield "reward", "required: no reward scores the clips; set at least one, --reward NAME[=WEIGHT]", "required"
    if section.rollout_size is None:
        yield "rollout_size", "required: set the size of sampled clips, FRAMESxHEIGHTxWIDTH", "required"
        return
    for problem in geometry.problems(*section.rollout_size):
        yield "rollout_size", f"{'x'.join(map(str, section.rollout_size))}: {problem}"


def _check_sigmas(section: GRPOSection, *, is_flow: bool) -> Iterator[Finding]:
    """Check the noise levels of a rollout that are given."""
    sigmas, steps = section.sampling_sigmas, section.sampling_steps
    if not sigmas:
        return
    if not is_flow:
        yield "sampling_sigmas", "is supported for flow matching only; use --sampling_steps", "unsupported"
    if sigmas[0] < _FIRST_SIGMA:
        yield "sampling_sigmas", f"must begin with pure noise, at 1, got {sigmas[0]:g}"
    if any(after >= before for before, after in pairwise(sigmas)):
        yield "sampling_sigmas", f"must descend, got {' '.join(f'{sigma:g}' for sigma in sigmas)}"
    if len(sigmas) != steps:
        yield "sampling_sigmas", f"holds {len(sigmas)}, and --sampling_steps is {steps}; use equal numbers", "conflict"
    if section.shift is not None:
        yield "sampling_sigmas", "are not shifted; remove --shift", "conflict"


def _check_groups(section: GRPOSection) -> Iterator[Finding]:
    """Check the group size: the clips of one prompt."""
    size, best_of_n = section.num_generations, section.best_of_n
    if size == 1:
        yield "num_generations", "a single clip per prompt cannot be compared with others; use 2 or more, such as 8"
    if best_of_n is not None and best_of_n > size:
        yield "best_of_n", f"{best_of_n} of {plural(size, 'clip')}; use at most --num_generations {size}", "conflict"


def _check_division(config: TrainConfig, world_size: int) -> Iterator[Finding]:
    """Check that clips divide by processes, batch size and updates."""
    section, batch = config.grpo, config.dataloader.batch_size
    prompts, size, updates = section.prompts_per_step, section.num_generations, section.updates_per_rollout
    global_batch = world_size * batch
    over = f"{plural(world_size, 'process', 'processes')} x batches of {batch}"
    clips = f"{plural(prompts, 'prompt')} x {plural(size, 'clip')}"
    if prompts * size % global_batch:
        step = global_batch // math.gcd(global_batch, size)  # numbers of prompts whose clips divide
        yield (
            "prompts_per_step",
            f"{clips} = {prompts * size} clips must be a multiple of {over} = {global_batch}; use "
            f"{-(-prompts // step) * step}, or another --num_generations or --batch_size",
            "conflict",
        )
    clips_per_prompt = min(section.best_of_n or size, size)
    total = prompts * clips_per_prompt
    clips = f"{plural(prompts, 'prompt')} x {plural(clips_per_prompt, 'clip')}"
    if total < global_batch * updates:
        fewer = f"at most {total // global_batch}, or " if total >= global_batch else ""
        yield (
            "updates_per_rollout",
            f"{plural(updates, 'update')} of {over} need{('s' if updates == 1 else '')} at least "
            f"{global_batch * updates} clips, and a rollout keeps {clips} = {total}; use {fewer}--prompts_per_step "
            f"{-(-global_batch * updates // clips_per_prompt)} or more",
            "conflict",
        )
        return
    if total % (global_batch * updates):
        yield (
            f"a rollout keeps {clips} = {total}, not a multiple of {over} x {updates} --updates_per_rollout = "
            f"{global_batch * updates}: some batches are padded with clips that do not count"
        )
    if total / updates < FEW_CLIPS and trait(config.training.method, "compares"):
        yield (
            f"{clips} / {plural(updates, 'update')} = {total / updates:g} clips per optimizer step; with fewer than "
            f"{FEW_CLIPS} rewards hardly rise: raise --prompts_per_step or --num_generations"
        )


def check_noiseless(config: TrainConfig) -> Iterator[Finding]:
    """Check the rules of methods that compare clips without noise in the steps of the sampler."""
    section, method = config.grpo, config.training.method
    if section.init_same_noise:
        yield (
            "init_same_noise",
            f"{method} samples without noise in its steps, so the clips of a prompt would be equal; use "
            "--no-init_same_noise",
            "unsupported",
        )
    if section.sampler not in (None, "ode"):
        yield (
            "sampler",
            f"{section.sampler} adds noise, and {method} samples without; use ode, or remove it",
            "unsupported",
        )
    if section.reward_combination == "separate" and not trait(method, "clips_ratio"):
        yield f"--reward_combination separate is `sum` with --method {method}, whose loss is not clipped"


def check_noised_clips(section: GRPOSection) -> Iterator[Finding]:
    """Check the noise levels, and that the policy that follows the trained one moves."""
    if (uphold := section.old_policy_decay[2]) >= 1:
        yield "old_policy_decay", f"uphold {uphold:g}: the older policy would never change; use less than 1"
    first, last = section.noise_level_range
    if not range_between(section.noise_level_range, section.sampling_steps, section.sampling_steps):
        message = f"{first:g} {last:g} holds none of {section.sampling_steps} --sampling_steps; use a wider range"
        yield "noise_level_range", message, "conflict"


def check_reward_gradients(config: TrainConfig) -> Iterator[Finding]:
    """Check the steps that a reward is backpropagated through."""
    section, steps = config.refl, config.grpo.sampling_steps
    if config.grpo.updates_per_rollout > 1:
        yield (
            "updates_per_rollout",
            "a reward's gradient applies to the weights that sampled; use 1 with --method refl",
            "unsupported",
        )
    if config.grpo.best_of_n is not None:
        yield "best_of_n", "--method refl trains on all clips without comparing them; remove it", "unsupported"
    if section.refl_kind == "draft" and section.draft_k > steps:
        yield "draft_k", f"there are only {steps} --sampling_steps; use at most {steps}", "conflict"
    elif section.refl_kind == "refl" and not section.gradient_steps(steps):
        first, last = section.refl_range
        yield "refl_range", f"{first:g} {last:g} holds none of {steps} --sampling_steps; use a wider range", "conflict"
    if section.refl_kind == "draft" and section.draft_k > 1 and config.parallel.sp_size > 1:
        yield (
            "draft_k",
            f"{section.draft_k}: processes that share a clip have only parts of its latents' gradient; use --draft_k "
            "1, --refl_kind draft-lv or refl, or --sp_size 1",
            "conflict",
        )


def _check_policy(config: TrainConfig) -> Iterator[Finding]:
    section = config.grpo
    if section.clip_range is not None and section.updates_per_rollout == 1:
        yield (
            f"--clip_range {section.clip_range:g} has no effect with --updates_per_rollout 1: no ratio leaves 1 before "
            "the first update"
        )
    if section.rollout_cfg > 1 and section.updates_per_rollout > 1:
        yield (
            f"--rollout_cfg {section.rollout_cfg:g} with --updates_per_rollout {section.updates_per_rollout}: "
            "guidance amplifies the effect of an update on a step; one update per rollout is safer"
        )


def _check_noise(section: GRPOSection, *, is_flow: bool) -> Iterator[Finding]:
    name = kernel(section, is_flow=is_flow)
    if name == "ode":
        yield (
            "sampler",
            "ode adds no noise, so the probability of a step cannot change; use flow, dance, cps or ddim, or "
            "--method nft",
            "unsupported",
        )
        return
    if name in ("flow", "dance") and not is_flow:
        yield f"--sampler {name} is published for flow-matching models; ddim is usual for others"
    eta = section.eta
    if eta is None:
        return
    if eta == 0:
        yield "eta", "without noise, the probability of a step cannot change; use more than 0, or --method nft"
    elif name in ("cps", "ddim") and eta > 1:
        yield "eta", f"{name} supports noise up to 1, got {eta:g}"
    elif eta > _MUCH_NOISE:
        yield f"--eta {eta:g} is high for --sampler {name}: published values are between 0.25 and 1.5"


def _check_window(config: TrainConfig) -> Iterator[Finding]:
    section = config.grpo
    steps, size, fraction = section.sampling_steps, section.window_size, section.timestep_fraction
    first, last = section.window_range
    allowed = step_range(section)
    if first >= last:
        yield "window_range", f"{first:g} {last:g}: the second must be above the first"
    elif size > len(allowed):
        available = f"{plural(len(allowed), 'step')}{f' ({allowed[0]} to {allowed[-1]})' if allowed else ''}"
        yield (
            "window_size",
            f"a window of {size} does not fit: of {steps} --sampling_steps, --window_range {first:g} {last:g} holds "
            f"{available}, and the last step is never trained; use "
            f"{(f'at most {len(allowed)}, or ' if allowed else '')}a wider range",
            "conflict",
        )
    elif section.window_strategy == "progressive" and 0 < size < section.window_stride:
        message = f"a window of {size} that moves by {section.window_stride} leaves steps in between untrained"
        yield "window_stride", f"{message}; use at most {size}", "conflict"
    stochastic = size or steps - 1
    if trained_steps(section) < 1:
        yield (
            "timestep_fraction",
            f"{fraction:g} of {plural(stochastic, 'stochastic step')} is {fraction * stochastic:g}, rounded down 0: "
            f"nothing to train; use at least {1 / stochastic:.3g}",
        )


def _check_length(config: TrainConfig) -> Iterator[Finding]:
    training, updates = config.training, config.grpo.updates_per_rollout
    if training.train_steps is None:
        yield (
            "train_steps",
            "required: prompts repeat indefinitely; set the number of optimizer steps",
            "required",
        )
    for name, steps in (("train_steps", training.train_steps), ("checkpointing_steps", training.checkpointing_steps)):
        if steps and steps % updates:
            lower, upper = steps // updates * updates, -(-steps // updates) * updates
            yield (
                name,
                f"{steps} must be a multiple of --updates_per_rollout {updates}, since only complete rollouts can be "
                f"resumed; use {(f'{lower} or ' if lower else '')}{upper}",
                "conflict",
            )


def _check_evaluation(config: TrainConfig) -> Iterator[Finding]:
    section, validation = config.grpo, config.validation
    if validation.eval_prompts is None:
        for name in ("eval_reward", "eval_steps"):
            if config.get(name):
                yield name, "there are no held-out prompts to evaluate on; set --eval_prompts FILE", "required"
        return
    if section.prompts is not None and validation.eval_prompts == section.prompts:
        yield "--eval_prompts equal those of --prompts, so nothing is held out"
    if validation.eval_steps is None:
        yield "--eval_prompts are evaluated only before and after training; set --eval_steps"


def _check_hacking(config: TrainConfig) -> Iterator[Finding]:
    """Check that there is something to judge reward hacking by."""
    guard = config.grpo.hacking_guard
    if hacking_rule(config) is not None or guard == "off":
        return
    if config.changed("hacking_patience"):
        yield "--hacking_patience has no effect: there is no held-out reward or KL to detect reward hacking"
    if guard is None:
        return
    missing = []
    if config.validation.eval_prompts is None:
        missing.append("held-out prompts (--eval_prompts FILE)")
    if config.validation.eval_steps is None:
        missing.append("evaluations during training (--eval_steps N)")
    if not held_out_rewards(config):
        missing.append("a reward that is not trained (--eval_reward NAME)")
    kl_option = trait(config.training.method, "kl_option")
    other = f", or measure the KL with --{kl_option}" if kl_option else ""
    yield (
        "hacking_guard",
        f"{guard} requires a held-out reward; add {', '.join(missing)}{other}",
        "required",
    )


def _check_memory(config: TrainConfig, copies: Sequence[str]) -> Iterator[Finding]:
    """Warn of copies of the network that full finetuning needs, and LoRA does not."""
    method = config.training.method
    kl_option = trait(method, "kl_option")
    weight = config.get(kl_option) if kl_option else 0
    if config.training.training_type != "full-finetune":
        return
    if copies:
        names = " and ".join([*copies, *(["the model before training"] if weight else [])])
        yield f"--method {method} with full-finetune keeps copies of the whole network in memory: {names}"
    elif weight:
        yield f"--{kl_option} {weight:g} with full-finetune keeps a frozen copy of the whole network in memory"


def _check_reward_device(config: TrainConfig, *, local_processes: int) -> Iterator[Finding]:
    """Warn if all processes score on the GPU of one of them."""
    number = re.fullmatch(r"cuda:(\d+)", config.grpo.reward_device or "")
    if number is not None and local_processes > 1 and int(number[1]) < local_processes:
        yield (
            f"--reward_device {number[0]}: the rewards of all {local_processes} processes share the GPU of one of "
            f"them; cuda:{local_processes} is the first free one. The default is each process's own"
        )
