"""Selective rollouts (GRESO, arXiv:2506.02177): prompts that teach nothing are skipped before a clip of them is sampled.

A prompt whose clips all score alike has advantages of 0. Such prompts mostly stay such: all of their clips are already good,
or none is. With z the number of times in a row that a prompt taught nothing, it is sampled with the probability P^z when
its turn comes, so that it is looked at again, the more rarely the longer this goes on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from finetrainers.utils.seeding import derive_seed

from .prompts import PromptOrder


class SelectiveRollouts:
    """Which prompts a rollout has, by what the earlier rollouts scored.

    It walks through the order of prompts, and skips. A function of (seed, position in the walk, scores of all ranks), so the
    same on every rank and at any world size. Where one walk through all prompts gives too few, the first of those skipped
    fill up, the ones that taught nothing fewest times before the others.
    """

    def __init__(self, order: PromptOrder, *, probability: float, begun: list[Any]) -> None:
        """Args:
        order: the walk without skipping.
        probability: P, below 1.
        begun: names the walk: prompts, seed and first rollout. The history of another walk does not count.
        """
        self.order = order
        self.probability = probability
        self.begun = begun
        self.position: int | None = None  # where the next rollout starts; None: where it would without skipping
        self.streaks = torch.zeros(order.num_prompts, dtype=torch.int32)  # z of every prompt
        self._found: tuple[int, list[int], int] | None = None  # of the last rollout asked for

    def prompts_of(self, rollout: int) -> list[int]:
        """Indices of the prompts of the coming rollout; the place in the list is the slot."""
        return self._walk(rollout)[0]

    def observe(self, rollout: int, teaches: Sequence[bool | None]) -> int:
        """Take note of whether a rollout's prompts taught something, and walk on.

        Args:
            rollout: its number.
            teaches: of every slot; None if nothing is known, since no clip has a score.

        Returns:
            How many prompts were skipped for it.
        """
        chosen, after = self._walk(rollout)
        skipped = after - self._start(rollout) - len(chosen)
        for prompt, taught in zip(chosen, teaches, strict=True):
            if taught is not None:
                self.streaks[prompt] = 0 if taught else self.streaks[prompt] + 1
        self.position, self._found = after, None
        return max(skipped, 0)

    def _start(self, rollout: int) -> int:
        return rollout * self.order.prompts_per_step if self.position is None else self.position

    def _walk(self, rollout: int) -> tuple[list[int], int]:
        """The prompts of a rollout, and the position after them."""
        if self._found is not None and self._found[0] == rollout:
            return self._found[1:]
        position, wanted = self._start(rollout), self.order.prompts_per_step
        last = position + max(self.order.num_prompts, wanted)
        chosen: list[int] = []
        skipped: list[int] = []
        while len(chosen) < wanted and position < last:
            prompt = self.order.at(position)
            (chosen if self._is_due(prompt, position) else skipped).append(prompt)
            position += 1
        chosen += self._best_of(skipped, chosen)[: wanted - len(chosen)]
        self._found = (rollout, chosen, position)
        return chosen, position

    def _best_of(self, skipped: Sequence[int], chosen: Sequence[int]) -> list[int]:
        """Skipped prompts, the best ones first: those that the rollout does not have yet, with the shortest streaks."""
        times = Counter(chosen)
        ranked: list[tuple[int, int, int, int]] = []
        for prompt in skipped:  # at the border of two epochs, one may have come twice
            ranked.append((times[prompt], int(self.streaks[prompt]), len(ranked), prompt))
            times[prompt] += 1
        return [prompt for *_, prompt in sorted(ranked)]

    def _is_due(self, prompt: int, position: int) -> bool:
        seed = derive_seed(self.order.seed, "selective rollouts", position)
        return random.Random(seed).random() < self.probability ** int(self.streaks[prompt])

    def state_dict(self) -> dict[str, Any]:
        """What an exact resume takes."""
        return {"begun": self.begun, "position": self.position, "streaks": self.streaks.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, unless it is of other prompts, or of a run that skipped none."""
        self._found = None
        if state.get("begun") == self.begun:
            self.position = state["position"]
            self.streaks = state["streaks"].clone()
