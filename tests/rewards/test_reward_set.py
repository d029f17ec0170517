"""The rewards of a run together: each is made and asked once, scores each clip alone, and no failure goes unseen."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import av
import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from refusals import refused
from torch import Tensor

from finetrainers.config.rewards import Reward as Entry
from finetrainers.config.rewards import RewardEntry
from finetrainers.rewards import registry
from finetrainers.rewards.base import Head, Reward
from finetrainers.rewards.movement import Motion
from finetrainers.rewards.pixels import Brightness, Color
from finetrainers.rewards.registry import register_reward
from finetrainers.rewards.reward_set import RewardError, RewardSet
from finetrainers.utils.failures import Kind

CALLS: list[tuple[str, int]] = []


class Two(Reward):
    """Mean and range of a clip, and what goes wrong with clips whose prompt says so."""

    heads: ClassVar[Mapping[str, Head]] = {"mean": Head(mean=0.5, std=0.25), "range": Head()}
    batch_size = 4
    patience = 0.0

    def __init__(self, *, name: str = "two", batches_of: int = 0) -> None:
        CALLS.append((f"make {name}", 0))
        self.name, self.batches_of = name, batches_of

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        CALLS.append((self.name, len(prompts)))
        if self.batches_of and len(prompts) > 1:
            raise ValueError("one at a time, please")
        for index, prompt in enumerate(prompts):
            if "explode" in prompt:
                raise KeyError(f"boom {index}")
            if "offline" in prompt:
                raise ConnectionError("nobody there")
        values = {"mean": videos.mean((1, 2, 3, 4)), "range": videos.amax((1, 2, 3, 4)) - videos.amin((1, 2, 3, 4))}
        for index, prompt in enumerate(prompts):
            for word in ("nan", "inf", "2e200"):
                if word in prompt:
                    values["range"] = values["range"].double()
                    values["range"][index] = float(word)
        return values


class Answers(Reward):
    """Gives what it is told to."""

    answer: Any = None

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        return self.answer


def greedy(videos: Tensor, prompts: list[str], *, target: list[dict[str, float]]) -> Tensor:
    """Works on the clips and columns themselves, also where torch does not count changes."""
    scores = videos[:, 0].sub_(0.5).mean((1, 2, 3)) + torch.tensor([values["level"] for values in target])
    pixels = videos.numpy()
    pixels *= 255
    videos.data.mul_(0)
    prompts.clear()
    target[0]["level"] = 7.0
    return scores


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.REWARDS, "registered", dict(registry.REWARDS.registered))
    register_reward("two", Two)
    register_reward("answers", Answers)
    register_reward("greedy", greedy)
    CALLS.clear()


def entries(*texts: str) -> list[RewardEntry]:
    return [TypeAdapter(Entry).validate_python(text) for text in texts]


def panel(*texts: str, **options: Any) -> RewardSet:
    return RewardSet(entries(*texts), **options)


def clips(count: int = 6, *, seed: int = 0, frames: int = 4, height: int = 24, width: int = 32) -> Tensor:
    return torch.rand(count, frames, 3, height, width, generator=torch.Generator().manual_seed(seed))


def words(count: int = 6, **special: str) -> list[str]:
    """`a red thing` for every clip, with the words of `c3="..."` for clip 3."""
    return [special.get(f"c{index}", f"a red thing {index}") for index in range(count)]


# ---- what is made and asked ----------------------------------------------------------------------------------------


def test_scores_are_those_of_the_rewards() -> None:
    videos, prompts = clips(), words()
    found = panel("brightness", "color=0.5", "motion=0").score(videos, prompts, fps=8.0)
    assert list(found.heads) == ["brightness", "color", "motion"]
    for name, reward in (("brightness", Brightness()), ("color", Color()), ("motion", Motion())):
        alone = reward.score(videos, prompts, fps=8.0)["score"].double()
        assert found.heads[name].raw.dtype == torch.float64
        assert torch.equal(found.heads[name].raw, alone)
        assert torch.equal(found.heads[name].normalized, alone), "these have no scale of their own"
    assert not found.failed.any()


def test_a_reward_is_made_and_asked_once_for_all_its_heads() -> None:
    both = panel("two.range=2", "brightness", "two.mean", "two.mean,name=other")
    assert both.weights == {"two.range": 2.0, "brightness": 1.0, "two.mean": 1.0, "two.mean,name=other": 1.0}
    assert CALLS == [("make two", 0), ("make other", 0)]
    CALLS.clear()
    found = both.score(clips(), words(), fps=8.0)
    assert CALLS == [("two", 4), ("two", 2), ("other", 4), ("other", 2)]
    assert list(found.heads) == ["two.range", "brightness", "two.mean", "two.mean,name=other"]
    assert torch.equal(found.heads["two.mean"].raw, clips().mean((1, 2, 3, 4)).double())
    assert found.heads["two.range"].raw.min() > 0.9


def test_the_scale_is_the_entry_s_or_else_the_reward_s() -> None:
    found = panel("two.mean", "two.range,mean=0.5,std=2", "brightness,std=10").score(clips(), words(), fps=8.0).heads
    torch.testing.assert_close(found["two.mean"].normalized, (found["two.mean"].raw - 0.5) / 0.25)
    torch.testing.assert_close(found["two.range"].normalized, (found["two.range"].raw - 0.5) / 2)
    torch.testing.assert_close(found["brightness"].normalized, found["brightness"].raw / 10)
    mixed = panel("two.mean,mean=1").score(clips(), words(), fps=8.0).heads["two.mean"]
    torch.testing.assert_close(mixed.normalized, (mixed.raw - 1) / 0.25)


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        (["two.mean"], [4, 3]),
        (["two.mean,batch_size=2"], [2, 2, 2, 1]),
        (["two.mean,batch_size=100"], [7]),
        (["two.mean,batch_size=6", "two.range,batch_size=3"], [3, 3, 1]),
    ],
)
def test_batches_are_of_the_size_asked_for(texts: list[str], sizes: list[int]) -> None:
    made = panel(*texts)
    CALLS.clear()
    made.score(clips(7), words(7), fps=8.0)
    assert [count for _, count in CALLS] == sizes


def test_rewards_are_scored_only_when_due() -> None:
    made = panel("two.mean,every=2", "two.range,every=3", "brightness,every=1")
    asked = []
    for rollout in range(7):
        CALLS.clear()
        # The range of clip 0 is no number, which nobody learns while it is not asked for.
        prompts = words(2, c0="nan") if rollout % 3 else words(2)
        found = made.score(clips(2), prompts, fps=8.0, rollout=rollout)
        assert list(found.heads) == made.due(rollout)
        assert bool(CALLS) == any(label.startswith("two") for label in found.heads)
        asked.append(sorted(found.heads))
    wanted = [
        ["brightness", *(["two.mean"] if r % 2 == 0 else []), *(["two.range"] if r % 3 == 0 else [])] for r in range(7)
    ]
    assert asked == wanted


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("two", "required", ["two.mean, two.range"]),
        ("two.median", "unknown", ["'median'", "'mean'"]),
        ("brightnes", "unknown", ["'brightnes'", "'brightness'"]),
        ("two.mean,size=3", "unknown", ["'size'"]),
    ],
)
def test_wrong_entries_are_refused(text: str, kind: Kind, values: list[str]) -> None:
    with refused(kind, *values):
        panel(text)


# ---- each clip for itself ------------------------------------------------------------------------------------------

REAL = ["brightness", "contrast", "color", "sharpness", "incompressibility", "motion", "smoothness", "steadiness"]


def test_scores_do_not_depend_on_time_order_or_batch() -> None:
    """Bit for bit: again, in another order, in other batches, and of the same clips on other ranks."""
    videos, prompts = clips(5), [f"a {color} thing" for color in ("red", "blue", "teal", "gold", "pink")]
    wanted = panel(*REAL).score(videos, prompts, fps=8.0).heads
    order = [3, 0, 4, 1, 2]
    for made, rows in ((panel(*REAL), range(5)), (panel(*(f"{name},batch_size=2" for name in REAL)), order)):
        found = made.score(videos[list(rows)], [prompts[row] for row in rows], fps=8.0).heads
        for name in REAL:
            assert torch.equal(found[name].raw, wanted[name].raw[list(rows)]), name
    alone = [panel(*REAL).score(videos[i : i + 1], prompts[i : i + 1], fps=8.0).heads for i in range(5)]
    for name in REAL:
        assert torch.equal(torch.cat([heads[name].raw for heads in alone]), wanted[name].raw), name


def test_clips_may_have_any_float_type_and_a_gradient() -> None:
    videos = clips()
    wanted = panel("brightness").score(videos.bfloat16().float(), words(), fps=8.0).heads["brightness"].raw
    found = panel("brightness").score(videos.bfloat16().requires_grad_(), words(), fps=8.0).heads["brightness"].raw
    assert torch.equal(found, wanted)
    assert not found.requires_grad
    with torch.inference_mode():
        inference = videos.bfloat16().float()
    assert torch.equal(panel("brightness").score(inference, words(), fps=8.0).heads["brightness"].raw, wanted)


# ---- clips that are none -------------------------------------------------------------------------------------------


def changed(value: float, *, clip: int = 2) -> Tensor:
    videos = clips()
    videos[clip, 1, 0, 3, 3] = value
    return videos


@pytest.mark.parametrize(
    ("videos", "kind", "values"),
    [
        (changed(1.001), "invalid", ["clip 12", "'a red thing 2'", "to 1.001 ", "[0, 1]", "clamp"]),
        (changed(-0.5), "invalid", ["clip 12", "-0.5 to ", "clamp"]),
        (changed(math.nan, clip=5), "invalid", ["clip 15", "'a red thing 5'", "nan to nan", "diverged"]),
        (changed(math.inf), "invalid", ["to inf", "diverged"]),
        (clips()[0], "invalid", ["[B, T, 3, H, W]", "[4, 3, 24, 32]"]),
        (clips().transpose(1, 2), "invalid", ["[6, 3, 4, 24, 32];", "third"]),
        (clips().permute(0, 1, 3, 4, 2), "invalid", ["[6, 4, 24, 32, 3];", "third"]),
        (clips()[:, :0], "invalid", ["[6, 0, 3, 24, 32]"]),
        ((clips() * 255).to(torch.uint8), "invalid", ["torch.uint8"]),
        (clips(5), "mismatch", ["5 clips", "6 prompts"]),
    ],
)
def test_clips_of_another_form_are_refused(videos: Tensor, kind: Kind, values: list[str]) -> None:
    """Also where failing rewards are masked: this is no failure of a reward."""
    with refused(kind, *values):
        panel("brightness", on_error="mask").score(videos, words(), fps=8.0, first_clip=10)


@pytest.mark.parametrize("fps", [0.0, -1.0, math.nan, math.inf])
def test_a_frame_rate_is_needed(fps: float) -> None:
    with refused("invalid", f"got {fps}"):
        panel("brightness").score(clips(), words(), fps=fps)


# ---- what fails ----------------------------------------------------------------------------------------------------


def test_an_exception_names_reward_clip_and_prompt_and_saves_the_clip(tmp_path: Path) -> None:
    """The clip is found out although its batch failed."""
    made = panel("brightness", "two.mean", failures=tmp_path / "failures")
    with pytest.raises(RewardError) as caught:
        made.score(clips(), words(c2="please explode", c5="explode"), fps=8.0, rollout=7, first_clip=30)
    path = tmp_path / "failures" / "rollout-000007-clip-0032-two.mp4"
    for value in ("reward two", "clip 32", "rollout 7", "'please explode'", "KeyError: 'boom 0'", path):
        assert str(value) in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 8
    assert len(frames) == 4
    assert frames[0].shape == (24, 32, 3)
    assert list((tmp_path / "failures").iterdir()) == [path]


@pytest.mark.parametrize("word", ["nan", "inf", "2e200"])
def test_a_score_that_is_not_finite_or_huge_names_the_head(word: str, tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match=rf"two .*{re.escape(str(float(word)))} .*'range' .*clip 3 .*rollout 0, .*'{word}'"
    ):
        panel("two.mean", "two.range", failures=tmp_path).score(clips(), words(c3=word), fps=8.0)
    assert (tmp_path / "rollout-000000-clip-0003-two.mp4").is_file()
    found = panel("two.mean").score(clips(), words(c3=word), fps=8.0)
    assert found.heads["two.mean"].raw.isfinite().all(), "a head that nobody asked for may be anything"


def test_without_a_folder_no_clip_is_saved() -> None:
    with pytest.raises(RewardError) as caught:
        panel("two.mean").score(clips(), words(c0="explode"), fps=8.0)
    assert ".mp4" not in str(caught.value)


def test_a_clip_that_cannot_be_saved_does_not_hide_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RewardError, match=r"KeyError: 'boom 0' .*(FileExists|NotADirectory)"):
        panel("two.mean", failures=tmp_path / "file").score(clips(), words(c0="explode"), fps=8.0)


def test_a_server_that_is_gone_is_not_asked_for_every_clip(tmp_path: Path) -> None:
    made = panel("two.mean", failures=tmp_path)
    CALLS.clear()
    with pytest.raises(RewardError, match=r"two .*rollout 0.*: ConnectionError: nobody") as caught:
        made.score(clips(), words(c3="offline"), fps=8.0)
    assert CALLS == [("two", 4)]
    with pytest.raises(RewardError) as single:
        made.score(clips(1), ["offline"], fps=8.0)
    for error in (caught, single):
        assert "offline" not in str(error.value), "no clip is to blame"
        assert "clip 0" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_masked_failures_are_counted_and_warned_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Only the clips that failed lose their score, and only in the heads that failed."""
    made = panel("two.mean", "two.range=0.5", "brightness", on_error="mask", failures=tmp_path)
    prompts = words(8, c1="explode", c4="nan", c6="inf", c7="explode")
    with caplog.at_level(logging.WARNING):
        found = made.score(clips(8), prompts, fps=8.0, rollout=2, first_clip=8)
    whole = made.score(clips(8), words(8), fps=8.0)
    for label, lost in (("two.mean", [1, 7]), ("two.range", [1, 4, 6, 7]), ("brightness", [])):
        for scores, intact in zip(vars(found.heads[label]).values(), vars(whole.heads[label]).values(), strict=True):
            assert scores.isnan().nonzero().flatten().tolist() == lost
            assert torch.equal(scores[~scores.isnan()], intact[~scores.isnan()])
    assert found.failed.tolist() == [index in (1, 4, 6, 7) for index in range(8)]
    expected = [
        ["reward two ", "clip 9 ", "rollout 2", "'explode'", "KeyError: 'boom 0'"],
        ["reward two.range: ", "4 clips of 8 ", "rollout 2", "clip 9 "],
        ["reward two.mean: ", "2 clips of 8 "],
    ]
    for values in expected:
        assert any(all(value in message for value in values) for message in caplog.messages), values
    assert not list(tmp_path.iterdir())


def test_masked_clips_of_a_reward_without_weight_have_not_failed() -> None:
    found = panel("two.mean", "two.range=0", on_error="mask").score(clips(), words(c4="nan"), fps=8.0)
    assert [int(head.raw.isnan().sum()) for head in found.heads.values()] == [0, 1]
    assert not found.failed.any()


def test_a_batch_that_fails_where_no_clip_does_is_scored_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = panel("two.mean,batches_of=1").score(clips(), words(), fps=8.0)
    assert torch.equal(
        found.heads["two.mean"].raw, panel("two.mean").score(clips(), words(), fps=8.0).heads["two.mean"].raw
    )
    assert re.search("two .*clips 0 to 3 .*rollout 0 .*ValueError: one at a time", caplog.text)


def test_an_offline_server_masks_its_batch() -> None:
    found = panel("two.mean", on_error="mask").score(clips(), words(c3="offline"), fps=8.0)
    assert found.failed.tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ({"score": torch.zeros(6, 1)}, "tensor [6, 1]"),
        ({"score": torch.tensor(1.0)}, "tensor []"),
        ({"score": [0.0] * 5}, " list of 5 "),
        ({"score": [0.0] * 5 + ["much"]}, " list of 6 "),
        ({"score": np.zeros((6, 1))}, " ndarray [6, 1] "),
        ({"scores": torch.zeros(6)}, "['scores']"),
        (torch.zeros(6), " Tensor "),
        (None, " NoneType "),
        ({"score": torch.zeros(6, dtype=torch.complex64)}, "a tensor [6] as "),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "mask"])
def test_what_is_no_score_is_never_masked(
    answer: object, value: str, on_error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "answer", answer)
    with pytest.raises(RewardError) as caught:
        panel("answers", on_error=on_error).score(clips(), words(), fps=8.0)
    for part in ("reward answers ", "'score'", "6 clips", value):
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.bool])
def test_scores_of_any_real_type_are_numbers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "answer", {"score": torch.ones(6, dtype=dtype)})
    assert panel("answers").score(clips(), words(), fps=8.0).heads["answers"].raw.tolist() == [1.0] * 6


@pytest.mark.parametrize(
    "answer", [[1, 2.0, True, np.float32(4), torch.tensor([5.0]), 6], np.arange(1, 7), np.array([1, 2, 3, 4, 5, 6.0])]
)
def test_lists_and_arrays_are_scores(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "answer", {"score": answer})
    raw = panel("answers").score(clips(), words(), fps=8.0).heads["answers"].raw.tolist()
    assert raw == ([1, 2, 1, 4, 5, 6] if isinstance(answer, list) else [1, 2, 3, 4, 5, 6])


def test_none_is_no_score_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "answer", {"score": [1.0, None, 3.0, None, 5.0, 6.0]})
    alone = panel("answers", "brightness=0").score(clips(), words(), fps=8.0)
    assert alone.failed.tolist() == [False, True, False, True, False, False], "nothing else scores them"
    both = panel("answers", "brightness").score(clips(), words(), fps=8.0)
    assert not both.failed.any()
    assert both.heads["answers"].raw.isnan().nonzero().flatten().tolist() == [1, 3]


class Ranks(Reward):
    """Compares the clips of a prompt."""

    scope = "group"

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Any]:
        CALLS.append(("ranks", len(prompts)))
        assert len(set(prompts)) == 1
        if "explode" in prompts[0]:
            raise ValueError("a tie")
        return {"score": videos.mean((1, 2, 3, 4)).argsort().argsort()}


def test_clips_of_a_prompt_are_compared_in_one_call() -> None:
    register_reward("ranks", Ranks)
    made = panel("ranks,batch_size=2", "brightness", on_error="mask")
    assert made.compares_clips
    prompts = [word for word in ("a", "explode", "c") for _ in range(3)]
    CALLS.clear()
    scores = made.score(clips(9), prompts, fps=8.0, first_clip=9, group=3)
    assert CALLS == [("ranks", 3)] * 3, "a failed prompt is not tried clip by clip"
    assert scores.failed.tolist() == [False] * 3 + [True] * 3 + [False] * 3
    assert sorted(scores.heads["ranks"].raw[:3].tolist()) == [0, 1, 2]
    for count, first, group in ((4, 0, 3), (3, 1, 3), (3, 0, 1)):
        with pytest.raises(RewardError, match="ranks"):
            made.score(clips(count), ["a"] * count, fps=8.0, first_clip=first, group=group)
    assert not panel("brightness").compares_clips


def test_columns_and_the_frame_rate_reach_functions() -> None:
    def exact(
        videos: Tensor, prompts: Sequence[str], *, fps: float, answer: list[int], hint: Any = None
    ) -> list[float]:
        assert hint is None
        return [fps + number for number in answer]

    register_reward("exact", exact)
    rows = [{"answer": number, "other": "?"} for number in range(6)]
    scores = panel("exact,batch_size=4", "brightness").score(clips(), words(), fps=8.0, columns=rows)
    assert scores.heads["exact"].raw.tolist() == [8, 9, 10, 11, 12, 13]
    with pytest.raises(RewardError, match=r"exact .*'answer'"):
        panel("exact").score(clips(), words(), fps=8.0)


def test_async_rewards_work_at_the_same_time() -> None:
    """All batches of both wait for each other; one that fails is tried clip by clip, as always."""
    met = asyncio.Event()
    waiting: list[str] = []

    async def meet(videos: Tensor, prompts: Sequence[str]) -> list[float | None]:
        assert not torch.is_grad_enabled()
        waiting.append("meet")
        if len(waiting) >= 5:
            met.set()
        await asyncio.wait_for(met.wait(), 20)
        if "explode" in prompts[-1]:
            raise KeyError("boom")
        return [None if "skip" in prompt else 1.0 for prompt in prompts]

    class Met(Reward):
        async def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Any]:  # type: ignore[override]
            return {"score": await meet(videos, prompts)}

    register_reward("meet", meet)
    register_reward("met", Met)
    made = panel("meet,batch_size=2", "met,batch_size=3", "brightness", on_error="mask")
    scores = made.score(clips(), words(c1="skip", c5="explode"), fps=8.0)
    for name in ("meet", "met"):
        assert scores.heads[name].raw.isnan().tolist() == [False, True, False, False, False, True]
    assert scores.failed.tolist() == [False] * 5 + [True]
    with pytest.raises(RewardError, match=r"meet .*clip 5 .*boom"):
        panel("meet").score(clips(), words(c5="explode"), fps=8.0)


@pytest.mark.parametrize("inference", [False, True])
def test_what_a_reward_changes_reaches_no_other_reward_and_no_other_rollout(inference: bool) -> None:
    rewards, prompts = panel("greedy", "brightness"), words()
    columns = [{"target": {"level": 0.25}}] * len(prompts)
    with torch.inference_mode(inference):
        videos = clips()
        expected = panel("brightness").score(videos, prompts, fps=8.0).heads["brightness"].raw
        before = videos.clone()
    for rollout in range(2):
        heads = rewards.score(videos, prompts, fps=8.0, rollout=rollout, columns=columns).heads
        assert heads["greedy"].raw.tolist() == pytest.approx((before[:, 0].mean((1, 2, 3)) - 0.25).tolist(), abs=1e-6)
        assert heads["brightness"].raw.equal(expected)
    assert videos.equal(before)
    assert columns[0] == {"target": {"level": 0.25}}


def test_interruptions_are_not_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Two, "score", stop)
    with pytest.raises(KeyboardInterrupt):
        panel("two.mean", on_error="mask").score(clips(), words(), fps=8.0)
