"""Storage plan without replay: the fewest gradients or graphs of a rollout's clips that suffice. Imports no torch.

A clip's gradient G_i, of the sum of its transitions' log-densities, is known when the clip has been sampled. Its
advantage A_i is known once all clips of its prompt are scored. The goal is sum_i A_i G_i.

    sums      A_i = a + sum_k b_k r_ik, with a and b_k known later: sum_i G_i and sum_i r_ik G_i suffice, whatever the
              number of clips. This holds for every normalization of scores as long as no advantage is clipped.
    extremes  best-of-n: the n/2 best and the n/2 worst clips so far. A clip that has fallen out of them never returns.
    clips     every clip, where an advantage may be clipped or is not known to follow a single score.

With `retain`, the graphs of a clip's transitions are stored instead of its gradient, and backward passes run only for
trained clips. `extremes` and `clips` also apply to graphs; `sums` does not, because graphs cannot be summed up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from finetrainers.config.grpo import step_range, trained_steps
from finetrainers.config.methods import trait
from finetrainers.config.root import TrainConfig
from finetrainers.methods.spec import MethodMemory
from finetrainers.parallel.sharding import with_launcher
from finetrainers.utils.launch import launched_processes

Stored = Literal["sums", "extremes", "clips"]


@dataclass(frozen=True)
class GradientPlan:
    """Storage of the gradients of a prompt's clips.

    Attributes:
        stored: see the module.
        max_stored: largest number of gradients, or of clips with graphs, stored for one prompt.
        early: whether they become one gradient once all clips of the prompt are scored, whatever other prompts do.
        size: clips of a prompt.
        retains: whether graphs are stored, and not gradients.
    """

    stored: Stored
    max_stored: int
    early: bool
    size: int
    retains: bool = False

    def max_stored_for(self, clips: int) -> int:
        """Return the largest number of gradients stored for `clips` clips of one prompt on a process."""
        return min(clips, self.max_stored)

    def peak(self, share: int, data_size: int) -> int:
        """Return the largest number of gradients that a process stores, where it stores no graphs.

        Args:
            share: clips that each process samples.
            data_size: number of processes with different clips.
        """
        return max(self._process_peak(range(rank * share, (rank + 1) * share)) for rank in range(data_size))

    def _process_peak(self, clips: range) -> int:
        peak = stored = 0
        summed = False
        for group in split_by_prompt(clips, self.size):
            stored += self.max_stored_for(len(group))
            peak = max(peak, stored)
            if self.early and len(group) == self.size:
                stored -= self.max_stored_for(len(group)) - (not summed)
                summed = True
        return peak

    def clips_with_graphs(self, share: int, data_size: int, *, batch: int) -> tuple[int, int]:
        """Return how many clips of a process wait with their graphs: at most, and at most in a backward pass.

        Args:
            share: clips that each process samples.
            data_size: number of processes with different clips.
            batch: clips that are sampled before they are scored.
        """
        counts = [self._count_graphs(range(rank * share, (rank + 1) * share), batch) for rank in range(data_size)]
        return max(sampled for sampled, _ in counts), max(backward for _, backward in counts)

    def _count_graphs(self, clips: range, batch: int) -> tuple[int, int]:
        sampled = waiting = backward = 0
        by_group: dict[int, int] = {}
        complete = {group.start // self.size for group in split_by_prompt(clips, self.size) if len(group) == self.size}
        for clip in clips:
            if (clip - clips.start) % batch == 0:
                sampled = max(sampled, waiting + min(batch, clips.stop - clip))
            slot = clip // self.size
            before = by_group.get(slot, 0)
            by_group[slot] = min(before + 1, self.max_stored)
            waiting += by_group[slot] - before
            if self.early and slot in complete and (clip + 1) % self.size == 0:
                backward = max(backward, waiting)
                waiting -= by_group.pop(slot)
        return sampled, max(backward, waiting)


def split_by_prompt(clips: range, size: int) -> Iterator[range]:
    """Yield the clips of each prompt among consecutive clips of a rollout; a prompt has `size` clips."""
    for slot in range(clips.start // size, -(-clips.stop // size)):
        yield range(max(clips.start, slot * size), min(clips.stop, (slot + 1) * size))


def computes_grads_in_rollout(config: TrainConfig) -> bool:
    """Return whether the rollout takes the gradient, so that transitions are not replayed."""
    trains_steps = trait(config.training.method, "trains_steps")
    return bool(trains_steps) and config.grpo.rollout_gradients in ("reweight", "retain")


def plan_gradients(config: TrainConfig) -> GradientPlan:
    """Return the plan that needs the least memory for the configured advantages."""
    section = config.grpo
    size, retains = section.num_generations, section.rollout_gradients == "retain"
    scores = sum(entry.weight != 0 for entry in section.reward)
    if section.reward_combination == "weighted":
        scores = 1
    # The largest distance from the mean, in standard deviations, that one of `size` numbers can have.
    farthest = (size - 1) / math.sqrt(size) if section.advantage_correction else math.sqrt(size - 1)
    within_group = section.advantage != "global_std" and section.reward_combination != "gdpo"
    never_clipped = section.advantage == "group_std" and within_group and farthest <= section.advantage_clip
    # Processes that share clips score them each, and a reward need not give equal scores twice.
    scored_once = config.parallel.sp_size == 1
    stored: Stored = "clips"
    max_stored = size
    if never_clipped and scored_once:
        if section.best_of_n is None and not retains:
            stored, max_stored = "sums", 1 + scores
        elif section.best_of_n is not None and scores == 1:
            stored, max_stored = "extremes", section.best_of_n
    # Where processes gather weights for each other, they go backward equally often, which they agree on at the end.
    early = within_group and scored_once and not (retains and with_launcher(config.parallel).fsdp is not None)
    return GradientPlan(stored, max_stored, early=early, size=size, retains=retains)


def passes(config: TrainConfig) -> tuple[float, float]:
    """Return the average forward passes of a clip, of sampling and replay, and its transitions that go backward."""
    section = config.grpo
    trained = trained_steps(section) * (section.best_of_n or section.num_generations) / section.num_generations
    backward = trained_steps(section) if section.rollout_gradients == "reweight" else trained
    replayed = 0.0 if computes_grads_in_rollout(config) else trained
    return section.sampling_steps + replayed, backward


def waiting_memory(config: TrainConfig) -> MethodMemory:
    """Return the memory without replay, clips passing one by one.

    It holds gradients or graphs that wait for advantages, and those of the batch that is sampled.
    """
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
    batch_gradients = batch if trained_steps(section) > 1 else batch - 1  # without the gradient that is computed
    on_host = waiting if section.offload_trajectory else 0
    return MethodMemory(
        0.0, 0.0, batch_size=branches, gradients=waiting - on_host + batch_gradients, gradients_on_host=on_host
    )


def steps_with_graphs(config: TrainConfig) -> int:
    """Return the number of a clip's steps that leave graphs: the trained ones.

    Where processes wait for each other, steps at which any process trains a clip count as well.
    """
    section, trained = config.grpo, trained_steps(config.grpo)
    differ = section.window_per_prompt or section.timestep_fraction < 1
    if differ and with_launcher(config.parallel).fsdp is not None:
        return min(len(step_range(section)), trained * section.prompts_per_step)
    return trained


def sampled_clips(config: TrainConfig) -> int:
    """Return the number of clips that a process samples in a rollout."""
    processes = config.parallel.data_size(launched_processes())
    return math.ceil(config.grpo.prompts_per_step * config.grpo.num_generations / processes)
