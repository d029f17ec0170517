"""Without replay: which gradients, or graphs, of a rollout's clips a process stores, as few as the advantages allow. Imports no torch.

A clip's gradient G_i, of the sum of its transitions' log-densities, is there when the clip has been sampled. Its advantage
A_i is known once all clips of its prompt are scored. What is wanted is sum_i A_i G_i.

    sums      A_i = a + sum_k b_k r_ik, with a and b_k known later: sum_i G_i and sum_i r_ik G_i suffice, whatever the
              number of clips. This holds for every normalization of scores as long as no advantage is clipped.
    extremes  best-of-n: the n/2 best and the n/2 worst clips so far. A clip that has fallen out of them never returns.
    clips     every clip, where an advantage may be clipped or is not known to follow a single score.

With `retain` the graphs of a clip's transitions wait instead of its gradient, and only those of clips that are trained go
backward. Graphs cannot be summed up; otherwise the same holds for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from finetrainers.config.grpo import step_range, trained_steps
from finetrainers.config.root import TrainConfig
from finetrainers.methods.spec import MethodMemory
from finetrainers.parallel.sharding import with_launcher
from finetrainers.utils.launch import launched_processes

Stored = Literal["sums", "extremes", "clips"]


@dataclass(frozen=True)
class GradientPlan:
    """What is stored of the gradients of a prompt's clips.

    Attributes:
        stored: see the module.
        most: gradients, or clips with graphs, at most, of one prompt.
        early: whether they become one gradient once all clips of the prompt are scored: other prompts do not matter.
        size: clips of a prompt.
        retains: whether graphs are stored, and not gradients.
    """

    stored: Stored
    most: int
    early: bool
    size: int
    retains: bool = False

    def of_group(self, clips: int) -> int:
        """Gradients stored at most for so many clips of one prompt on a process."""
        return min(clips, self.most)

    def peak(self, share: int, data_size: int) -> int:
        """Gradients that a process stores at most, where it stores no graphs.

        Args:
            share: clips that each process samples.
            data_size: how many processes have clips of their own.
        """
        return max(self._peak_of(range(rank * share, (rank + 1) * share)) for rank in range(data_size))

    def _peak_of(self, clips: range) -> int:
        most = stored = 0
        summed = False
        for group in groups_of(clips, self.size):
            stored += self.of_group(len(group))
            most = max(most, stored)
            if self.early and len(group) == self.size:
                stored -= self.of_group(len(group)) - (not summed)
                summed = True
        return most

    def clips_with_graphs(self, share: int, data_size: int, *, batch: int) -> tuple[int, int]:
        """Clips of a process that wait with their graphs: at most, and at most when some go backward.

        Args:
            share: clips that each process samples.
            data_size: how many processes have clips of their own.
            batch: clips that are sampled before they are scored.
        """
        found = [self._with_graphs(range(rank * share, (rank + 1) * share), batch) for rank in range(data_size)]
        return max(most for most, _ in found), max(backward for _, backward in found)

    def _with_graphs(self, clips: range, batch: int) -> tuple[int, int]:
        sampled = waiting = backward = 0
        by_group: dict[int, int] = {}
        whole = {group.start // self.size for group in groups_of(clips, self.size) if len(group) == self.size}
        for clip in clips:
            if (clip - clips.start) % batch == 0:
                sampled = max(sampled, waiting + min(batch, clips.stop - clip))
            slot = clip // self.size
            before = by_group.get(slot, 0)
            by_group[slot] = min(before + 1, self.most)
            waiting += by_group[slot] - before
            if self.early and slot in whole and (clip + 1) % self.size == 0:
                backward = max(backward, waiting)
                waiting -= by_group.pop(slot)
        return sampled, max(backward, waiting)


def groups_of(clips: range, size: int) -> Iterator[range]:
    """Of consecutive clips of a rollout those of each prompt, a prompt having `size`."""
    for slot in range(clips.start // size, -(-clips.stop // size)):
        yield range(max(clips.start, slot * size), min(clips.stop, (slot + 1) * size))


def learns_in_rollout(config: TrainConfig) -> bool:
    """Whether transitions are not replayed: the rollout has the gradient."""
    return config.training.method == "grpo" and config.grpo.rollout_gradients in ("reweight", "retain")


def plan_gradients(config: TrainConfig) -> GradientPlan:
    """What needs the least memory for the configured advantages."""
    section = config.grpo
    size, retains = section.num_generations, section.rollout_gradients == "retain"
    scores = sum(entry.weight != 0 for entry in section.reward)
    if section.reward_combination == "weighted":
        scores = 1
    # The largest distance from the mean, in standard deviations, that one of `size` numbers can have.
    farthest = (size - 1) / math.sqrt(size) if section.advantage_correction else math.sqrt(size - 1)
    of_group = section.advantage != "global_std" and section.reward_combination != "gdpo"
    never_clipped = section.advantage == "group_std" and of_group and farthest <= section.advantage_clip
    # Processes that share clips score them each, and a reward need not say the same twice.
    alone = config.parallel.sp_size == 1
    stored: Stored = "clips"
    most = size
    if never_clipped and alone:
        if section.best_of_n is None and not retains:
            stored, most = "sums", 1 + scores
        elif section.best_of_n is not None and scores == 1:
            stored, most = "extremes", section.best_of_n
    # Where processes gather weights for each other, they go backward equally often, which they agree on at the end.
    early = of_group and alone and not (retains and with_launcher(config.parallel).fsdp is not None)
    return GradientPlan(stored, most, early=early, size=size, retains=retains)


def passes(config: TrainConfig) -> tuple[float, float]:
    """Of a clip, on average: forward passes of sampling and of replay, and transitions that go backward."""
    section = config.grpo
    trained = trained_steps(section) * (section.best_of_n or section.num_generations) / section.num_generations
    backward = trained_steps(section) if section.rollout_gradients == "reweight" else trained
    replayed = 0.0 if learns_in_rollout(config) else trained
    return section.sampling_steps + replayed, backward


def waiting_memory(config: TrainConfig) -> MethodMemory:
    """Without replay: gradients or graphs that wait for advantages, and those of the batch that is sampled; clip by clip."""
    section, batch = config.grpo, config.dataloader.batch_size
    data_size = config.parallel.data_size(launched_processes())
    share, plan = sampled_clips(config), plan_gradients(config)
    branches = 2 if section.rollout_cfg != 1 else 1
    if plan.retains:
        steps = steps_with_graphs(config)
        sampled, backward = plan.clips_with_graphs(share, data_size, batch=batch)
        calls = sampled * steps - 1, backward * steps - 1
        before = int(plan.early and share > plan.size)  # of earlier prompts
        return MethodMemory(
            0.0, 0.0, batch_size=branches, gradients=before, gradients_in_backward=1 - before, waiting_calls=calls
        )
    waiting = min(plan.peak(share, data_size), share - batch)
    of_batch = batch if trained_steps(section) > 1 else batch - 1  # without the one that is computed
    on_host = waiting if section.offload_trajectory else 0
    return MethodMemory(
        0.0, 0.0, batch_size=branches, gradients=waiting - on_host + of_batch, gradients_on_host=on_host
    )


def steps_with_graphs(config: TrainConfig) -> int:
    """Steps of a clip that leave graphs: those that are trained, and where processes wait for each other those of any clip."""
    section, trained = config.grpo, trained_steps(config.grpo)
    differ = section.window_per_prompt or section.timestep_fraction < 1
    if differ and with_launcher(config.parallel).fsdp is not None:
        return min(len(step_range(section)), trained * section.prompts_per_step)
    return trained


def sampled_clips(config: TrainConfig) -> int:
    """Clips that a process samples in a rollout."""
    processes = config.parallel.data_size(launched_processes())
    return math.ceil(config.grpo.prompts_per_step * config.grpo.num_generations / processes)
