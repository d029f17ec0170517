"""Numbers of clips that a process samples, and of those that it samples as one. Imports no torch."""

from __future__ import annotations

import math

from finetrainers.config.grpo import prompts_per_process
from finetrainers.config.methods import trait
from finetrainers.config.root import TrainConfig
from finetrainers.utils.launch import launched_processes


def sampled_clips(config: TrainConfig) -> int:
    """Return the number of clips that a process samples in a rollout."""
    processes = config.parallel.data_size(launched_processes())
    return math.ceil(config.grpo.prompts_per_step * config.grpo.num_generations / processes)


def shares_starts(config: TrainConfig) -> bool:
    """Return whether the clips of a prompt are sampled as one until they differ: they begin with the same noise."""
    section = config.grpo
    return (
        bool(trait(config.training.method, "trains_steps")) and section.init_same_noise and section.num_generations > 1
    )


def shared_rows(config: TrainConfig, data_size: int) -> int:
    """Return the clips of a call of the network that samples shared starts: as few equal calls as possible."""
    prompts = prompts_per_process(config.grpo, data_size)
    return -(-prompts // -(-prompts // config.dataloader.batch_size))
