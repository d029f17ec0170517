"""Selective rollouts (GRESO, arXiv:2506.02177): prompts that teach nothing are skipped before they are sampled.

A prompt whose clips all score alike has advantages of 0. Most such prompts stay so: all of their clips are already
good, or none is. With z the number of times in a row that a prompt taught nothing, it is sampled with the probability
P^z when its turn comes, so that it is tried again, the more rarely the longer this goes on.
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
    """The prompts of each rollout, chosen by the scores of earlier rollouts.

    They follow the order of prompts, with some skipped, as a function of (seed, position in the walk, scores of all
    ranks), so the choice is equal on every rank and at any world size. Where one walk through all prompts gives too
    few, the first of those skipped fill up, the ones that taught nothing fewest times before the others.
    """

    def __init__(self, order: PromptOrder, *, probability: float, walk: list[Any]) -> None:
        """Args:
        order: the walk without skipping.
        probability: P, below 1.
        walk: identity of the walk: prompts, seed and first rollout. The history of another walk does not count.
        """
        self.order = order
        self.probability = probability
        self.walk = walk
        self.position: int | None = None  # start of the next rollout; None if nothing was skipped yet
        self.streaks = torch.zeros(order.num_prompts, dtype=torch.int32)  # z of every prompt
        self._last_walk: tuple[int, list[int], int] | None = None  # of the rollout that was requested last
        # The rollout that was observed last, with position and streaks before it: an interrupted one is sampled again.
        self._observed: Mapping[str, Any] = {}

    def prompt_indices(self, rollout: int) -> list[int]:
        """Return the indices of the prompts of the coming rollout; the position in the list is the slot."""
        return self._walk(rollout)[0]

    def observe(self, rollout: int, teaches: Sequence[bool | None]) -> int:
        """Record whether a rollout's prompts taught something, and return the number of prompts skipped for it.

        Args:
            rollout: number of the rollout.
            teaches: one value for every slot, or None if nothing is known, since no clip has a score.
        """
        chosen, after = self._walk(rollout)
        self._observed = {"rollout": rollout, "position": self.position, "streaks": self.streaks.clone()}
        skipped = after - self._start(rollout) - len(chosen)
        for prompt, taught in zip(chosen, teaches, strict=True):
            if taught is not None:
                self.streaks[prompt] = 0 if taught else self.streaks[prompt] + 1
        self.position, self._last_walk = after, None
        return max(skipped, 0)

    def _start(self, rollout: int) -> int:
        return rollout * self.order.prompts_per_step if self.position is None else self.position

    def _walk(self, rollout: int) -> tuple[list[int], int]:
        """Return the prompts of a rollout, and the position after them."""
        if self._last_walk is not None and self._last_walk[0] == rollout:
            return self._last_walk[1:]
        if self._observed.get("rollout") == rollout:
            self.position, self.streaks = self._observed["position"], self._observed["streaks"]
            self._observed = {}
        position, count = self._start(rollout), self.order.prompts_per_step
        last = position + max(self.order.num_prompts, count)
        chosen: list[int] = []
        skipped: list[int] = []
        while len(chosen) < count and position < last:
            prompt = self.order.prompt_at(position)
            (chosen if self._is_due(prompt, position) else skipped).append(prompt)
            position += 1
        chosen += self._rank_skipped(skipped, chosen)[: count - len(chosen)]
        self._last_walk = (rollout, chosen, position)
        return chosen, position

    def _rank_skipped(self, skipped: Sequence[int], chosen: Sequence[int]) -> list[int]:
        """Return skipped prompts, best first: those that the rollout does not have yet, with the shortest streaks."""
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
        """Return the state for an exact resume."""
        streaks = self.streaks.clone()
        return {"begun": self.walk, "position": self.position, "streaks": streaks, "observed": self._observed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`, unless it is of other prompts, or of a run that skipped none."""
        self._last_walk = None
        if state.get("begun") == self.walk:
            self.position = state["position"]
            self.streaks = state["streaks"].clone()
            self._observed = state.get("observed", {})
