"""Prompts that taught nothing are skipped, the more rarely sampled the longer this goes on, and never forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from policies import make_collector, network
from torch import Tensor

from finetrainers.methods.grpo.prompts.prompts import PromptOrder
from finetrainers.methods.grpo.prompts.selective_rollouts import SelectiveRollouts
from finetrainers.rewards.reward_set import RewardSet

#: Prompts whose clips all score alike.
DULL = {1, 2, 5, 7}
BEGUN = ["prompts", 3, 0]


def selection(probability: float = 0.5, *, num_prompts: int = 8, per_step: int = 2) -> SelectiveRollouts:
    order = PromptOrder(num_prompts, prompts_per_step=per_step, seed=3)
    return SelectiveRollouts(order, probability=probability, walk=BEGUN)


def rolled(found: SelectiveRollouts, rollouts: range, dull: set[int] = DULL) -> list[list[int]]:
    """The prompts of each rollout."""
    walked = []
    for rollout in rollouts:
        walked.append(found.prompt_indices(rollout))
        assert found.prompt_indices(rollout) == walked[-1]  # asking changes nothing
        found.observe(rollout, [prompt not in dull for prompt in walked[-1]])
    return walked


def test_what_teaches_comes_as_often_as_ever_and_the_rest_ever_more_rarely() -> None:
    found = selection()
    counts = [Counter(p for row in rolled(found, range(start, start + 300)) for p in row) for start in (0, 300)]
    for count in counts:
        teaching = {prompt: n for prompt, n in count.items() if prompt not in DULL}
        assert len(teaching) == 4
        assert max(teaching.values()) - min(teaching.values()) <= 2  # the last walks are cut off
    assert all(0 < counts[0][prompt] <= 12 for prompt in DULL)
    assert sum(counts[1][prompt] for prompt in DULL) < sum(counts[0][prompt] for prompt in DULL) / 2


def test_who_teaches_again_is_back_at_once() -> None:
    found = selection()
    rolled(found, range(40))
    assert int(found.streaks[1]) >= 2
    rollout = 40
    while 1 not in found.prompt_indices(rollout):
        rolled(found, range(rollout, rollout + 1))
        rollout += 1
    rolled(found, range(rollout, rollout + 1), dull=DULL - {1})
    assert int(found.streaks[1]) == 0
    later = Counter(p for row in rolled(found, range(rollout + 1, rollout + 101), dull=DULL - {1}) for p in row)
    assert later[1] >= min(later[prompt] for prompt in (0, 3, 4, 6)) - 1


def test_without_history_it_is_the_usual_walk() -> None:
    found, order = selection(), PromptOrder(8, prompts_per_step=2, seed=3)
    # Also in a run that skipped none at first, and where nothing is ever known.
    assert found.prompt_indices(17) == order.prompt_indices(17)
    for rollout in range(17, 30):
        assert found.prompt_indices(rollout) == order.prompt_indices(rollout)
        assert found.observe(rollout, [None, True]) == 0
    assert not found.streaks.any()


def test_where_nothing_teaches_every_rollout_is_full() -> None:
    found = selection(1e-9, per_step=3)
    walked = rolled(found, range(40), dull=set(range(8)))
    assert all(len(set(row)) == len(row) == 3 for row in walked[3:])
    count = Counter(p for row in walked for p in row)
    assert {14, 15, 16} >= set(count.values())  # none is left out for good
    assert len(count) == 8


def test_skipped_prompts_are_counted() -> None:
    found = selection(1e-9, num_prompts=4, per_step=1)
    before = [found.observe(rollout, [rollout != 1]) for rollout in range(4)]
    dull = PromptOrder(4, prompts_per_step=1, seed=3).prompt_at(1)
    after = []
    for rollout in range(4, 10):
        assert found.prompt_indices(rollout) != [dull]
        after.append(found.observe(rollout, [True]))
    assert before == [0] * 4
    assert found.position == 10 + sum(after)
    assert sum(after) in (1, 2)  # two walks through the three others


def test_a_resumed_walk_is_the_same() -> None:
    whole, half = selection(), selection()
    wanted = rolled(whole, range(60))
    rolled(half, range(30))
    resumed = selection()
    resumed.load_state_dict(half.state_dict())
    assert rolled(resumed, range(30, 60)) == wanted[30:]
    # History of other prompts does not count.
    other = SelectiveRollouts(resumed.order, probability=0.5, walk=["others", 3, 0])
    other.load_state_dict(half.state_dict())
    other.load_state_dict({})
    assert other.position is None
    assert not other.streaks.any()


@pytest.mark.parametrize(
    ("changes", "dull"),
    [({}, ["dark 1", "dark 3"]), ({"advantage_std_floor": 10.0}, ["bright 0", "bright 2", "dark 1", "dark 3"])],
)
def test_a_rollout_says_which_of_its_prompts_teach(changes: dict[str, Any], dull: list[str]) -> None:
    """`bright_only` is 0 for every clip of a dark prompt; a reward of weight 0 does not count."""
    collector = make_collector(
        reward=["policies:bright_only", "policies:contrast_in_percent=0"], selective_rollouts=0.5, **changes
    )
    walk = SelectiveRollouts(collector.source.order, probability=0.5, walk=BEGUN)
    collector.source.selection, collector.source.skipped = walk, walk.observe
    stats = collector.collect(network(), 0).stats
    prompts = collector.source.prompts
    assert [prompts[i].text for i in range(4) if walk.streaks[i]] == sorted(dull, key=lambda text: text[-1])
    assert stats["prompts_skipped"] == 0
    assert torch.equal(walk.streaks.clamp(max=1), walk.streaks)


def test_what_no_clip_has_a_score_of_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose clips were all lost may teach: it is no less likely to be sampled than before."""
    score = RewardSet.score

    def losing(self: RewardSet, videos: Tensor, prompts: Sequence[str], **options: Any) -> Any:
        found = score(self, videos, prompts, **options)
        lost = torch.tensor([text == "dark 1" for text in prompts])
        for head in found.heads.values():
            head.normalized.masked_fill_(lost, float("nan"))
        return type(found)(found.heads, found.failed | lost)

    monkeypatch.setattr(RewardSet, "score", losing)
    collector = make_collector(reward=["policies:bright_only"], reward_on_error="mask", selective_rollouts=0.5)
    walk = SelectiveRollouts(collector.source.order, probability=0.5, walk=BEGUN)
    collector.source.selection, collector.source.skipped = walk, walk.observe
    collector.collect(network(), 0)
    prompts = collector.source.prompts
    assert [prompts[i].text for i in range(4) if walk.streaks[i]] == ["dark 3"]
