"""Gradients of rewards: of the same scores, in the direction of finite differences.

Rewards without a gradient are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from finetrainers.config.rewards import RewardEntry
from finetrainers.demo.color_preference import similarity
from finetrainers.rewards.base import Reward
from finetrainers.rewards.registry import gradient_problem, make_reward, resolve_reward, reward_names
from finetrainers.rewards.reward_set import RewardError, RewardSet

PIXELS = ["brightness", "color", "contrast", "motion", "saturation", "sharpness", "smoothness", "steadiness"]
NETWORKS = ["aesthetic", "clipscore", "hpsv2", "pickscore"]
PROMPTS = ["a red ball", "a teal cube"]


@pytest.fixture(scope="module")
def videos() -> Tensor:
    """`[2, 4, 3, 24, 32]` fp64: a smooth picture that glides, differently in each clip."""
    wide = torch.rand(2, 3, 6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide = 0.1 + 0.8 * F.interpolate(wide, (24, 48), mode="bicubic").clamp(0, 1)
    frames = [wide[..., shift : shift + 32] for shift in (0, 1, 3, 4)]
    return torch.stack(frames, dim=1)


def test_which_rewards_have_gradients() -> None:
    found = [name for name in reward_names() if resolve_reward(name).differentiable]
    assert found == sorted([*PIXELS, *NETWORKS, "preferred_color"])


def test_the_page_says_which_have_gradients() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "rewards.md").read_text(encoding="utf-8")
    table = page.partition("| name | what it measures | differentiable |\n")[2].partition("\n\n")[0]
    said = {
        name: row.rpartition(" | ")[2].removesuffix(" |") == "yes"
        for row in table.splitlines()[1:]
        for name in re.findall(r"`([a-z]\w*)[`.,]", row.split(" | ")[0])
    }
    assert said == {name: resolve_reward(name).differentiable for name in reward_names()}


@pytest.mark.parametrize("name", PIXELS)
def test_it_is_that_of_finite_differences(name: str, videos: Tensor) -> None:
    reward = make_reward(name, {})
    x = videos.clone().requires_grad_()
    found = reward.differentiate(x, PROMPTS, fps=8.0)["score"]
    plain = reward.score(videos.float(), PROMPTS, fps=8.0)["score"]
    torch.testing.assert_close(found.float(), plain, rtol=1e-3, atol=1e-4)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.isfinite().all()
    step = 1e-5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        high, low = (reward.differentiate(videos + sign * step, PROMPTS, fps=8.0)["score"].sum() for sign in (1, -1))
    assert float(high - low) == pytest.approx(2 * float((gradient * step).sum()), rel=2e-2)


def test_the_color_of_a_shape_has_the_gradient_of_its_mean(videos: Tensor) -> None:
    texts = ["a red or blue ball", "a cyan or orange ball"]
    x = videos.float().requires_grad_()
    found = similarity(x, texts)
    torch.testing.assert_close(found.detach(), similarity(videos.float(), texts), rtol=0, atol=2e-3)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    with torch.no_grad():
        assert (similarity((x + 0.05 * gradient / gradient.abs().max()).clamp(0, 1), texts) > found).all()


class Odd(Reward):
    """Differentiable, but for what the prompt says."""

    differentiable = True

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        return {"score": self.differentiate(videos, prompts, fps=fps)["score"].detach()}

    def differentiate(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        if any("explode" in prompt for prompt in prompts):
            raise KeyError("boom")
        wrong = videos.new_tensor([float("nan") if "nan" in prompt else 0.0 for prompt in prompts])
        return {"score": videos.mean(dim=(1, 2, 3, 4)) + wrong}


def rewards(*entries: RewardEntry, **options: Any) -> RewardSet:
    return RewardSet(entries, **options)


ODD = f"{__name__}:Odd"


def test_a_set_gives_the_weighted_sum_of_normalized_scores(videos: Tensor) -> None:
    panel = rewards(
        RewardEntry(name=ODD, weight=2.0, mean=0.5, std=0.25), RewardEntry(name="contrast", weight=-1.0, batch_size=1),
        RewardEntry(name="compressibility", weight=0.0),
    )  # fmt: skip
    x = videos.float().requires_grad_()
    scores, total = panel.differentiate(x, PROMPTS, fps=8.0)
    plain = panel.score(videos.float(), PROMPTS, fps=8.0)
    for name, head in plain.heads.items():
        torch.testing.assert_close(scores.heads[name].raw, head.raw)
        assert not scores.heads[name].raw.requires_grad
    wanted = (
        2 * (x.mean((1, 2, 3, 4)) - 0.5) / 0.25
        - make_reward("contrast", {}).differentiate(x, PROMPTS, fps=8.0)["score"]
    )
    torch.testing.assert_close(total.float(), wanted)
    found, expected = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (total, wanted))
    torch.testing.assert_close(found, expected)


def test_a_clip_that_fails_has_no_share(videos: Tensor) -> None:
    for text in ("nan", "explode"):
        x = videos.float().requires_grad_()
        with pytest.raises(RewardError, match="failed" if text == "explode" else "nan"):
            rewards(RewardEntry(name=ODD)).differentiate(x, ["fine", text], fps=8.0)
        scores, total = rewards(RewardEntry(name=ODD), on_error="mask").differentiate(x, ["fine", text], fps=8.0)
        assert scores.failed.tolist() == [False, True]
        (gradient,) = torch.autograd.grad(total.sum(), x)
        assert gradient[0].abs().sum() > 0
        assert float(total[1].detach()) == 0.0


def test_what_has_no_gradient_is_refused_with_what_has() -> None:
    said = gradient_problem(RewardEntry(name="compressibility"))
    assert said is not None
    assert said.startswith("compressibility ")
    assert "aesthetic, brightness, clipscore, color, " in said
    assert "`function.differentiable = True`" in said
    assert gradient_problem(RewardEntry(name="brightness")) is None
    assert gradient_problem(RewardEntry(name=ODD)) is None
    assert "http://nowhere:1 " in str(gradient_problem(RewardEntry(name="http://nowhere:1")))
