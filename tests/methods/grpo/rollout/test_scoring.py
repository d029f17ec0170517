"""Batches are scored in a thread while others are sampled: equal scores in equal order, and no error is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from finetrainers.config.rewards import RewardEntry, parse_reward
from finetrainers.methods.grpo.rollout.scoring import Scoring
from finetrainers.rewards import registry
from finetrainers.rewards.reward_set import RewardError, RewardSet, Scores


def panel(*names: str) -> RewardSet:
    return RewardSet([RewardEntry(**parse_reward(name)) for name in names])


def test_scores_are_the_same_in_a_thread() -> None:
    rewards = panel("brightness=2", "contrast=0.5")
    clips = torch.rand(6, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found: list[list[tuple[int, Scores]]] = []
    for overlap in (False, True):
        spent: dict[str, float] = {}
        scoring = Scoring(rewards, spent, overlap=overlap)
        for first in (0, 2, 4):
            scoring.add(clips[first : first + 2], ["a", "b"], fps=8.0, rollout=0, first_clip=first)
        done, error = scoring.finish(None)
        assert error is None
        assert ("reward_overlapped" in spent) == overlap
        found.append(done)
    for (_, one), (_, other) in zip(*found, strict=True):
        assert all(torch.equal(one.heads[name].raw, other.heads[name].raw) for name in one.heads)
    assert [[number for number, _ in one] for one in found] == [[0, 2, 4]] * 2


def test_sampling_goes_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch is in flight; the second waits for the first."""
    rewards, release = panel("brightness"), threading.Event()
    threads: list[str] = []
    compute = RewardSet.compute

    def slow(self: RewardSet, *args: Any, **about: Any) -> Scores:
        threads.append(threading.current_thread().name)
        assert release.wait(20)
        return compute(self, *args, **about)

    monkeypatch.setattr(RewardSet, "compute", slow)
    scoring = Scoring(rewards, {}, overlap=True)
    scoring.add(torch.rand(1, 2, 3, 8, 8), ["a"], fps=8.0)  # returns, although nothing can have been scored
    release.set()
    scoring.add(torch.rand(1, 2, 3, 8, 8), ["a"], fps=8.0)
    done, error = scoring.finish(None)
    assert (len(done), error) == (2, None)
    assert all(name.startswith("rewards") for name in threads)


@pytest.mark.parametrize("overlap", [False, True])
def test_batches_wait_for_all_clips_of_a_prompt(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reward compares them; others are scored at once."""

    def compare(videos: torch.Tensor, prompts: list[str], *, number: list[int]) -> list[float]:
        assert len(set(prompts)) == 1
        return [float(n) + 10 * len(prompts) for n in number]

    compare.scope = "group"  # type: ignore[attr-defined]
    monkeypatch.setattr(registry.REWARDS, "registered", {**registry.REWARDS.registered, "compare": compare})
    scoring = Scoring(panel("compare", "brightness"), {}, overlap=overlap, group=4)
    clips, prompts = torch.rand(8, 2, 3, 8, 8), [prompt for prompt in "ab" for _ in range(4)]
    for first in range(0, 8, 2):
        rows = slice(first, first + 2)
        columns = [{"number": number} for number in range(8)][rows]
        scores = scoring.add(clips[rows], prompts[rows], fps=8.0, first_clip=8 + first, columns=columns, images=None)
        assert (scores is None) == (overlap or first % 4 == 0)
    done, error = scoring.finish(None)
    assert error is None
    assert [number for number, _ in done] == [8, 12]
    assert Scores.in_order(done).heads["compare"].raw.tolist() == [40, 41, 42, 43, 44, 45, 46, 47]
    assert list(panel("brightness").due(0)) == ["brightness"]


def test_an_error_of_the_thread_is_raised_by_the_next_batch_or_at_the_end() -> None:
    bad = torch.full((1, 2, 3, 8, 8), float("nan"))
    scoring = Scoring(panel("brightness"), {}, overlap=True)
    scoring.add(bad, ["a"], fps=8.0)
    with pytest.raises((RewardError, ValueError), match="clip 0"):
        scoring.add(torch.rand(1, 2, 3, 8, 8), ["a"], fps=8.0)
    scoring = Scoring(panel("brightness"), {}, overlap=True)
    scoring.add(bad, ["a"], fps=8.0)
    assert isinstance(scoring.finish(None)[1], ValueError)
    first = KeyError("before")
    assert scoring.finish(first)[1] is first
