"""Scoring of a rollout's batches, on request in a thread, while the next batch is sampled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from finetrainers.rewards.reward_set import RewardSet, Scores


class Scoring:
    """The scores of a rollout's batches, in their order.

    With `overlap`, one batch is in flight, and the next one waits for it, so that the clips of at most two are in
    memory. Scores do not change, since a clip's score depends on that clip alone. The last batch of a rollout is waited
    for: its scores decide the update, and the next rollout is sampled by the updated policy.

    For a reward that compares the clips of a prompt, batches wait until they have all clips of their prompts.
    """

    def __init__(
        self,
        panel: RewardSet,
        spent: MutableMapping[str, float],
        *,
        overlap: bool,
        stream: torch.cuda.Stream | None = None,
        group: int = 1,
    ) -> None:
        """Args:
        panel: the rewards.
        spent: gets the seconds of the thread, as `reward_overlapped`.
        overlap: whether to score in a thread.
        stream: stream of the thread, on the device of the process. Always the same one, since memory that a stream has
            used stays reserved for it.
        group: clips of a prompt.
        """
        self.group = group
        self._waiting: list[tuple[Tensor, Sequence[str], dict[str, Any]]] = []  # batches without all clips of a prompt
        self.panel = panel
        self.spent = spent
        self.stream = stream
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rewards") if overlap else None
        self._flying: Future[tuple[int, Scores]] | None = None
        self._done: list[tuple[int, Scores]] = []

    def add(self, videos: Tensor, prompts: Sequence[str], *, first_clip: int = 0, **about: Any) -> Scores | None:
        """Score a batch and return the scores, or start scoring it in the thread, or let it wait, and return None.

        An error in the thread is raised by the next call.

        Args:
            videos, prompts, first_clip, about: arguments of `RewardSet.score`.
        """
        about = {**about, "first_clip": first_clip, "group": self.group}
        if self.panel.compares_clips:
            self._waiting.append((videos, prompts, about))
            if sum(len(clips) for clips, _, _ in self._waiting) % self.group:
                return None
            videos, prompts, about = _joined(self._waiting)
            first_clip, self._waiting = about["first_clip"], []
        if self._pool is None:
            scores = self.panel.score(videos, prompts, **about)
            self._done.append((first_clip, scores))
            return scores
        self._land()
        self._flying = self._pool.submit(self._score, videos, prompts, about)
        return None

    def finish(self, error: Exception | None) -> tuple[list[tuple[int, Scores]], Exception | None]:
        """Return the scores of all batches, each with the number of its first clip, and the first error or None.

        That is `error`, or an error of the last batch, which is waited for.
        """
        try:
            self._land()
        except Exception as caught:
            error = error or caught
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        return self._done, error

    def _land(self) -> None:
        flying, self._flying = self._flying, None
        if flying is not None:
            self._done.append(flying.result())

    def _score(self, videos: Tensor, prompts: Sequence[str], about: dict[str, Any]) -> tuple[int, Scores]:
        """Score a batch, already on the host, in the thread, which has a separate current device and stream."""
        started = time.perf_counter()
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            scores = self.panel.compute(videos, prompts, **about)
        self.spent["reward_overlapped"] = self.spent.get("reward_overlapped", 0.0) + time.perf_counter() - started
        return about["first_clip"], scores


def _joined(
    batches: Sequence[tuple[Tensor, Sequence[str], dict[str, Any]]],
) -> tuple[Tensor, list[str], dict[str, Any]]:
    """Return several batches as one."""
    about = dict(batches[0][2])
    images = [batch["images"] for _, _, batch in batches if batch.get("images") is not None]
    about["images"] = torch.cat(images) if images else None
    about["columns"] = [row for _, _, batch in batches for row in batch.get("columns", ())]
    prompts = [prompt for _, texts, _ in batches for prompt in texts]
    return torch.cat([clips for clips, _, _ in batches]), prompts, about
