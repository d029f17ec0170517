"""Requirements of reward finetuning that are checked before it is loaded; see `MethodSpec`. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.checks.findings import Finding
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.grpo import prompts_per_process, trained_steps
from finetrainers.config.hacking import HackingRule, hacking_rule
from finetrainers.config.rewards import RewardEntry
from finetrainers.config.root import TrainConfig, fields
from finetrainers.methods.spec import MethodMemory, MethodSpec, TrainingSet
from finetrainers.utils.launch import launched_processes
from finetrainers.utils.text import plural

from .option_rules import CLIP_OPTIONS, check_noiseless, check_policy_gradients, check_rollouts
from .prompts.plan import PromptPlan, column_problems, image_problems, plan_prompts
from .prompts.prompts import empty_beside, overwritten_embeddings
from .rollout.clip_counts import sampled_clips, shared_rows, shares_starts

if TYPE_CHECKING:
    from finetrainers.models.spec import ModelSpec


#: A size that every family accepts.
_ANY_SIZE = (1, 256, 256)
#: In `prompt_embeddings_dir`, the cache that a preparation works in.
_SCRATCH = ".encoding"
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Latents in backward of the loss of a clip, counted with a KL penalty (12.2; without one 9.1).
_LATENTS_PER_CLIP = 12
#: Replacements for options of training on clips.
_INSTEAD = {
    "target_fps": "--reward_fps is the rate at which clips are scored",
    "precompute_conditions": "prompts are always encoded once and cached",
    "flow_shift": "--shift shifts the sampler's noise levels",
    "id_token": "write it into the prompts",
}
#: Options of those tables that are read: encoded prompts are also in `precompute_dir`.
_READ = ("precompute_dir", "batch_size")


class RewardFinetuning(MethodSpec):
    """Methods that sample clips for prompts and score them.

    Subclasses declare what they train. The defaults are those of a method that compares finished clips, sampled
    without noise in the steps, and goes through each once in an optimizer step.
    """

    size_options = ("rollout_size",)
    state_name = "sampling policy"
    samples = True
    compares = True
    kl_option: str | None = "kl_coef"
    unread: Mapping[str, str] = {
        name: _INSTEAD.get(name, "")
        for name, option in fields().items()
        if (option.section in ("data", "dataloader", "diffusion") or name == "eval_num_timesteps")
        and name not in (*_READ, *CLIP_OPTIONS)
    }
    source = "finetrainers.methods.grpo.prompts.source:PromptSource"

    def plan(self, config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> TrainingSet | None:
        return plan_prompts(config, geometry)

    def option_rules(self, config: TrainConfig, facts: Facts, *, world_size: int) -> Iterator[Finding]:
        yield from check_rollouts(config, facts, world_size=world_size, copies=self.weight_copies(config))
        if self.compares and not self.trains_steps:
            yield from check_noiseless(config)

    def repeats(self, config: TrainConfig) -> int:
        """Return how often each clip goes through the network with a gradient in an optimizer step."""
        return 1

    def weight_copies(self, config: TrainConfig) -> list[str]:
        """Return descriptions of the copies of the trained weights that are swapped in, besides the reference model."""
        return []

    def plan_problems(self, plan: Any, config: TrainConfig, facts: Facts) -> Iterator[Problem]:
        if not isinstance(plan, PromptPlan):  # sizes alone are planned
            return
        folder = config.grpo.prompt_embeddings_dir
        if folder is not None and (problem := overwritten_embeddings(folder, plan.prompts)) is not None:
            yield Problem("--prompt_embeddings_dir", problem, "occupied")
        yield from image_problems(plan, facts)
        yield from column_problems(plan, config)
        if config.grpo.reward_on_error == "raise":
            yield from _scoring_problems(plan, config)
        if not plan.images:
            yield from super().plan_problems(plan, config, facts)

    def weight_links(self, config: TrainConfig, step: int) -> list[str]:
        """Return the names of DanceGRPO's checkpoints, which count rollouts."""
        rollout, rest = divmod(step, config.grpo.updates_per_rollout)
        kind = "lora-" if config.training.training_type == "lora" else ""
        return [f"{kind}checkpoint-{rollout}-0"] if config.grpo.dancegrpo_files and not rest else []

    def check(self, plan: PromptPlan, config: TrainConfig, *, spec: ModelSpec) -> None:
        from .prompts.prompt_embeddings import check_embeddings
        from .rollout.tables import check_noise

        check_embeddings(plan, writes=config.grpo.prompt_embeddings_dir is not None, spec=spec)
        section, steps = config.grpo, config.training.train_steps
        rollouts = None if steps is None else steps // section.updates_per_rollout
        if section.selective_rollouts < 1 and rollouts and rollouts * section.prompts_per_step <= len(plan.prompts):
            message = (
                f"prompts are skipped from their second rollout on, and {plural(rollouts, 'rollout')} of "
                f"{plural(section.prompts_per_step, 'prompt')} use each of the {len(plan.prompts)} at most once; "
                "remove it, or use more --train_steps or fewer prompts"
            )
            raise ConfigError([Problem("--selective_rollouts", message, "conflict")])
        check_noise(plan, config, spec=spec)

    def strategy_problems(self, config: TrainConfig, parallel: Any) -> Iterator[Problem]:
        from finetrainers.rewards.registry import absent_gpu

        for device in dict.fromkeys(filter(None, map(absent_gpu, self.rewards(config)))):
            message = f"this machine has no {device}; remove it, or use an existing device"
            yield Problem("--reward_device", message, "unavailable")
        if (copies := self.weight_copies(config)) and not parallel.weights_are_whole:
            message = f"{copies[0]} is swapped in as unsharded weights, and this strategy shards them; use DDP"
            yield Problem(f"--method {config.training.method}", message, "unsupported")
        yield from _divided_groups(config, parallel)

    def text_writer(
        self, plan: PromptPlan, config: TrainConfig, *, spec: ModelSpec, parallel: Any
    ) -> Callable[[Any], None] | None:
        folder = config.grpo.prompt_embeddings_dir
        if folder is None:
            return None
        from .prompts.prompt_embeddings import embeddings_writer

        return embeddings_writer(folder, plan, spec=spec, parallel=parallel)

    def needs_text(self, config: TrainConfig) -> bool:
        prompts, held_out = config.grpo.prompts, config.validation.eval_prompts
        if prompts is None or any(path is not None and path.suffix.lower() != ".json" for path in (prompts, held_out)):
            return True
        return config.grpo.rollout_cfg != 1.0 and prompts.is_file() and empty_beside(prompts) is None

    def scratch_cache(self, config: TrainConfig) -> Path | None:
        folder = config.grpo.prompt_embeddings_dir
        return folder / _SCRATCH if folder and config.data.precompute_dir == folder / _SCRATCH else None

    def for_preparing(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration with placeholders for options that preparing does not use.

        Prompts are encoded whatever clips are sampled for them, how these are scored, and how often.
        """
        section, training = config.grpo, config.training
        grpo = {
            "reward": section.reward or [RewardEntry(name="brightness")],
            "rollout_size": section.rollout_size or _ANY_SIZE,
        }
        data, folder = config.data, section.prompt_embeddings_dir
        if folder is not None and data.precompute_dir is None and not config.changed("output_dir"):
            data = data.model_copy(update={"precompute_dir": folder / _SCRATCH})  # no cache directory was named
        return config.model_copy(
            update={
                "data": data,
                "grpo": section.model_copy(update=grpo),
                "training": training.model_copy(
                    update={"train_steps": training.train_steps or section.updates_per_rollout}
                ),
            }
        )

    def caches_texts(self, config: TrainConfig) -> bool:
        return True

    def accumulates(self, config: TrainConfig) -> bool:
        batches = config.dataloader.batch_size * config.grpo.updates_per_rollout
        return self.repeats(config) > 1 or sampled_clips(config) > batches

    def scores_while_sampling(self, config: TrainConfig) -> bool:
        return config.grpo.overlap_rewards

    def uses_reference(self, config: TrainConfig) -> bool:
        return self.kl_option is not None and config.get(self.kl_option) > 0

    def hacking_rule(self, config: TrainConfig) -> HackingRule | None:
        return hacking_rule(config)

    def sizes(self, config: TrainConfig) -> list[tuple[int, int, int]]:
        return [] if config.grpo.rollout_size is None else [config.grpo.rollout_size]

    def without_data(self, config: TrainConfig) -> TrainConfig | None:
        if config.grpo.prompts is not None and config.grpo.prompts.is_file():
            return None
        section = config.grpo.model_copy(update={"prompts": Path()})
        validation = config.validation.model_copy(update={"eval_prompts": None})
        return config.model_copy(update={"grpo": section, "validation": validation})

    def branches(self, config: TrainConfig) -> int:
        return 2 if config.grpo.rollout_cfg != 1 else 1

    def rewards(self, config: TrainConfig) -> list[RewardEntry]:
        from finetrainers.rewards.registry import on_device

        return on_device([*config.grpo.reward, *super().rewards(config)], config.grpo.reward_device)

    def problems(self, config: TrainConfig) -> list[Problem]:
        from finetrainers.rewards.registry import takes_device

        problems, device = [*super().problems(config), *_group_problems(config)], config.grpo.reward_device
        if device is None:
            return problems
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
            message = f"must be auto, cpu, cuda, cuda:0, cuda:1, ..., got {device}"
            problems.append(Problem("--reward_device", message, "unknown"))
        entries = [*config.grpo.reward, *config.validation.eval_reward]
        if not problems and not any(map(takes_device, entries)):
            message = f"{device}: this run loads no reward network; remove it"
            problems.append(Problem("--reward_device", message, "conflict"))
        return problems

    def memory(
        self, config: TrainConfig, latent: Sequence[int], *, batch_size: int, trained: float, reference: float
    ) -> MethodMemory:
        """Return the memory of the latents of sampled clips and of copies of the weights."""
        copies = trained * len(self.weight_copies(config))
        if config.training.training_type == "full-finetune" and self.uses_reference(config):
            copies += reference
        trajectories = 4.0 * sampled_clips(config) * math.prod(latent)
        return MethodMemory(copies=copies, trajectories=trajectories, batch_size=batch_size * self.branches(config))


class PolicyGradients(RewardFinetuning):
    """Policy gradients, which train stochastic denoising steps of the rollout."""

    trains_steps = True
    clips_ratio = True

    def option_rules(self, config: TrainConfig, facts: Facts, *, world_size: int) -> Iterator[Finding]:
        yield from super().option_rules(config, facts, world_size=world_size)
        yield from check_policy_gradients(config, is_flow=facts.is_flow)

    def repeats(self, config: TrainConfig) -> int:
        return trained_steps(config.grpo)

    def accumulates(self, config: TrainConfig) -> bool:
        if super().accumulates(config):
            return True
        # Clips that would fill one micro-batch take two if some share no inputs, or if their inputs are more.
        prompts = prompts_per_process(config.grpo, config.parallel.data_size(launched_processes()))
        is_cut = _shared_rows(config) < min(prompts, config.dataloader.batch_size)
        return shares_starts(config) and (is_cut or config.grpo.timestep_fraction < 1)

    def resume_warnings(self, config: TrainConfig, saved: Mapping[str, Any]) -> Iterator[str]:
        if shares_starts(config) and not saved.get("shares_starts"):
            yield (
                "the run was begun by an earlier version or without replay, and continues without sharing the equal "
                "start of a prompt's clips, so that its numbers stay the same; a new run (--init_from) takes less time"
            )

    def memory(
        self, config: TrainConfig, latent: Sequence[int], *, batch_size: int, trained: float, reference: float
    ) -> MethodMemory:
        """Return the memory of sampled clips and of copies of the weights.

        A clip's latent is stored once, and on both sides of each trained step; `ratio_norm` also stores the step's
        mean. The figure is for training on all clips, which is the
        maximum, and the case until the rewards have been compared. Clips that share an input of the network are
        compared with its prediction together.
        """
        memory = super().memory(config, latent, batch_size=batch_size, trained=trained, reference=reference)
        section = config.grpo
        each = 2 * _BYTES[section.trajectory_dtype] + (4 if section.ratio_norm else 0)
        stored = 0 if section.offload_trajectory else trained_steps(section) * sampled_clips(config) * each
        shared = 4.0 * self._shared_latents(config) if shares_starts(config) else 0.0
        return replace(memory, trajectories=memory.trajectories + (stored + shared) * math.prod(latent))

    def _shared_latents(self, config: TrainConfig) -> int:
        """Return the number of latents that sharing takes: of the starts, and of the clips that share inputs."""
        section, rows = config.grpo, _shared_rows(config)
        trained = section.best_of_n or section.num_generations
        clips = min(trained, (trained - 2) // section.updates_per_rollout + 2)  # of a prompt, at most, in an update
        prompts = prompts_per_process(section, config.parallel.data_size(launched_processes()))
        return 2 * prompts + _LATENTS_PER_CLIP * (min(rows * clips, sampled_clips(config)) - rows)


def _scoring_problems(plan: PromptPlan, config: TrainConfig) -> Iterator[Problem]:
    """Yield why rewards cannot score clips of this size, or the first prompt that they cannot score."""
    from finetrainers.rewards.registry import prompt_problem, reward_problems, size_problem

    every = (*plan.prompts, *plan.eval_prompts)
    for option, entries, prompts in (
        ("reward", config.grpo.reward, every), ("eval_reward", config.validation.eval_reward, plan.eval_prompts),
    ):  # fmt: skip
        for entry in [entry for entry in entries if not reward_problems(entry)]:
            if (problem := size_problem(entry, plan.size)) is not None:
                yield Problem(f"--{option}", f"{entry.name}: {problem}", "conflict")
            for prompt in prompts:
                if (problem := prompt_problem(entry, prompt.text)) is not None:
                    yield Problem(f"--{option}", f"{entry.name}: {prompt.where}: {problem}", "unsupported")
                    break


def _group_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield where a reward that compares the clips of a prompt cannot get all of them."""
    from finetrainers.rewards.registry import compares_clips

    section = config.grpo
    names = [entry.name for entry in section.reward if compares_clips(entry)]
    if not names:
        return
    compares = f"{names[0]} compares the clips of a prompt"
    if section.num_generations == 1:
        yield Problem("--reward", f"{compares}, and --num_generations 1 samples one; use 2 or more", "conflict")
    if config.validation.eval_prompts is not None and not config.validation.eval_reward:
        message = f"{compares}, and evaluations sample one clip of each; set --eval_reward to another reward"
        yield Problem("--eval_prompts", message, "conflict")


def _divided_groups(config: TrainConfig, parallel: Any) -> Iterator[Problem]:
    """Yield where processes divide the clips of a prompt, which a reward compares."""
    from finetrainers.rewards.registry import compares_clips

    section, batch = config.grpo, config.dataloader.batch_size
    name = next((entry.name for entry in section.reward if compares_clips(entry)), None)
    if name is not None and section.prompts_per_step % parallel.data_size:
        message = (
            f"{section.prompts_per_step}: {name} compares the clips of a prompt, which one process must have; use a "
            f"multiple of {parallel.data_size} processes"
        )
        yield Problem("--prompts_per_step", message, "conflict")
    elif name is not None and parallel.sharing > 1 and batch % section.num_generations:
        message = (
            f"{batch}: {name} compares the clips of a prompt; with --sp_size, a batch must have all of them: use a "
            f"multiple of --num_generations {section.num_generations}"
        )
        yield Problem("--batch_size", message, "conflict")


def _shared_rows(config: TrainConfig) -> int:
    return shared_rows(config, config.parallel.data_size(launched_processes()))
