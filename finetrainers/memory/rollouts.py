"""What reward finetuning keeps on the GPU besides what every training does, by arithmetic. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from finetrainers.config.grpo import trained_steps
from finetrainers.config.root import TrainConfig
from finetrainers.utils.launch import launched_processes

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class RolloutMemory:
    """Of one process.

    Attributes:
        copies: bytes of further copies of the policy: the one that samples, and the one before training.
        trajectories: bytes of a rollout's latents.
        batch_size: clips that the network sees in one call.
        accumulates: whether an update has several micro-batches.
    """

    copies: float
    trajectories: float
    batch_size: int
    accumulates: bool


def rollout_memory(
    config: TrainConfig,
    latent: tuple[int, ...],
    *,
    num_parameters: int,
    num_trainable: int,
    trainable_bytes: float,
    copy_bytes: float | None = None,
) -> RolloutMemory:
    """What a rollout and its updates keep.

    A clip's latent is kept once, and on both sides of each trained step; `ratio_norm` keeps the step's mean, too. That all
    clips are kept is the most that there can be, and is so until the rewards have been compared.

    Args:
        config: the run.
        latent: shape of a clip's latent.
        num_parameters: of the network.
        num_trainable: of them trained.
        trainable_bytes: bytes of each trained weight.
        copy_bytes: bytes that one process keeps of a weight of the frozen copy; default: as many.
    """
    section, is_nft = config.grpo, config.grpo.rl_algorithm == "nft"
    full = config.training.training_type == "full-finetune"
    copies = num_trainable * trainable_bytes if is_nft else 0.0
    if full and (section.nft_kl if is_nft else section.kl_coef):
        copies += num_parameters * (trainable_bytes if copy_bytes is None else copy_bytes)
    clips = math.ceil(section.prompts_per_step * section.num_generations / launched_processes())
    elements = clips * math.prod(latent)
    trajectories = 4.0 * elements
    if not is_nft and not section.offload_trajectory:
        means = 4 if section.ratio_norm else 0
        trajectories += trained_steps(section) * elements * (2 * _BYTES[section.trajectory_dtype] + means)
    repeats = section.nft_timesteps if is_nft else trained_steps(section)
    batch = config.dataloader.batch_size
    return RolloutMemory(
        copies=copies,
        trajectories=trajectories,
        batch_size=batch * (2 if section.rollout_cfg != 1 else 1),
        accumulates=repeats > 1 or clips > batch * section.updates_per_rollout,
    )
