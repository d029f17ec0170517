"""Witnesses of a rollout: one small clip of each prompt, whatever its size, on all processes; no failure counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from one_of import OneOf
from torch import Tensor

from finetrainers.config.hacking import WITNESSES
from finetrainers.rewards.pixels import Brightness, Sharpness
from finetrainers.rewards.witnesses import Witnesses, reduced


def clips(count: int, *, frames: int = 4, side: int = 24) -> Tensor:
    return torch.rand(count, frames, 3, side, side, generator=torch.Generator().manual_seed(0))


def witnesses(names: Sequence[str] = tuple(WITNESSES), *, group: int = 4) -> Witnesses:
    return Witnesses(names, OneOf(), group=group, fps=8.0)  # type: ignore[arg-type]


def test_the_first_clip_of_each_prompt_is_scored_however_they_are_batched() -> None:
    videos = clips(12)
    all_at_once, in_parts = witnesses(), witnesses()
    all_at_once.add(videos, 0)
    for first in range(0, 12, 3):
        in_parts.add(videos[first : first + 3], first)
    stats = all_at_once.stats()
    assert stats == in_parts.stats()
    assert stats.keys() == {f"{kind}/{name}" for name in WITNESSES for kind in ("witness", "witness_std")}
    weights = torch.tensor([0.299, 0.587, 0.114])
    firsts = (videos.mean((1, 3, 4)) @ weights).view(3, 4)[:, 0]
    assert stats["witness/brightness"] == pytest.approx(float(firsts.mean()), rel=1e-5)
    assert stats["witness_std/brightness"] == pytest.approx(float(firsts.std(correction=0)), rel=1e-3)
    assert all_at_once.stats() == {}, "the clips of another rollout"


def test_several_clips_of_few_prompts_count_as_their_mean() -> None:
    videos = clips(8)
    made = Witnesses(["brightness"], OneOf(), group=4, fps=8.0, scored=3)  # type: ignore[arg-type]
    made.add(videos, 0)
    weights = torch.tensor([0.299, 0.587, 0.114])
    means = (videos.mean((1, 3, 4)) @ weights).view(2, 4)[:, :3].mean(1)
    stats = made.stats()
    assert stats["witness/brightness"] == pytest.approx(float(means.mean()), rel=1e-5)
    assert stats["witness_std/brightness"] == pytest.approx(float(means.std(correction=0)), rel=1e-3)


def test_clips_of_other_processes_count() -> None:
    class Two(OneOf):
        def gather_objects(self, items: list[Any]) -> list[Any]:
            return [*items, *((number + 4, {"brightness": 1.0}) for number, _ in items)]

    made = Witnesses(["brightness"], Two(), group=4, fps=8.0)  # type: ignore[arg-type]
    made.add(torch.zeros(4, 2, 3, 8, 8), 0)
    assert made.stats() == {"witness/brightness": 0.5, "witness_std/brightness": 0.5}
    assert Witnesses([], Two(), group=4, fps=8.0).stats() == {}  # type: ignore[arg-type]


def test_large_clips_cost_as_much_as_small_ones() -> None:
    assert reduced(torch.zeros(49, 3, 480, 832)).shape == (9, 3, 160, 277)
    assert reduced(torch.zeros(5, 3, 255, 300)).shape == (5, 3, 255, 300)
    (video,) = clips(1, frames=21, side=16)
    assert torch.equal(reduced(video), video[6:15])


def test_a_witness_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("boom")

    monkeypatch.setattr(Sharpness, "clip", fail)
    monkeypatch.setattr(Brightness, "clip", lambda *_, **__: torch.tensor(math.nan))
    made = witnesses()
    with caplog.at_level(logging.WARNING):
        made.add(clips(8), 0)
        assert {name.partition("/")[2] for name in made.stats()} == {"motion", "saturation"}
        made.add(clips(8), 0)
    assert caplog.text.count("boom") == 1
    assert "sharpness" in caplog.text
