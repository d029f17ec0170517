"""The rewards of movement against motion that is known, and against all that looks like motion but is none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from refusals import refused
from torch import Tensor

from finetrainers.demo.world import SPEEDS, Scene, render
from finetrainers.rewards.base import Reward
from finetrainers.rewards.movement import Motion, Smoothness, Steadiness, flow, warp

ALL = [Motion(), Smoothness(), Steadiness()]
FRAMES = 7


def texture(x: list[float], y: list[float] | None = None, *, size: int = 48, seed: int = 0) -> Tensor:
    """A clip `[T, 3, size, 1.5 size]` of waves, displaced by exactly so many pixels in each frame."""
    g = torch.Generator().manual_seed(seed)
    down, right = torch.meshgrid(torch.arange(size) * 1.0, torch.arange(size * 3 // 2) * 1.0, indexing="ij")
    turns = (torch.rand(12, 2, generator=g) - 0.5) * (2 * math.pi / 6) * 48 / size
    phases = torch.rand(12, generator=g) * 2 * math.pi
    frames = []
    for dx, dy in zip(x, y or [0.0] * len(x), strict=True):
        waves = [
            torch.cos(a * (right - dx) + b * (down - dy) + phase)
            for (a, b), phase in zip(turns.tolist(), phases.tolist(), strict=True)
        ]
        frames.append(sum(waves) / 12 * 1.2 + 0.5)
    return torch.stack(frames).clamp(0, 1)[:, None].expand(-1, 3, -1, -1).contiguous()


def gliding(speed: float, **options: int) -> Tensor:
    """Moves by `speed` pixels a frame, to the right and half as fast down."""
    steps = [speed * i / math.hypot(1, 0.5) for i in range(FRAMES)]
    return texture(steps, [s / 2 for s in steps], **options)


def value(reward: Reward, clip: Tensor, *, fps: float = 8.0) -> float:
    return float(reward.score(clip[None], [""], fps=fps)["score"])


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: type(reward).__name__)
def test_a_clip_is_scored_for_itself(reward: Reward) -> None:
    videos = torch.stack([gliding(speed, seed=i) for i, speed in enumerate((0.3, 1.0, 2.0, 3.0))])
    together = reward.score(videos, ["a prompt"] * 4, fps=8.0)["score"]
    assert together.shape == (4,)
    assert together.dtype == torch.float32
    assert len(set(together.tolist())) == 4
    alone = torch.cat([reward.score(clip[None], ["other"], fps=8.0)["score"] for clip in videos])
    channels_last = videos.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    assert together.equal(alone)
    assert together.equal(reward.score(channels_last, [""] * 4, fps=8.0)["score"])


@pytest.mark.parametrize("speed", [0.1, 0.3, 1.0, 2.0, 4.0])
def test_flow_is_the_known_displacement(speed: float) -> None:
    found = flow(gliding(speed)) * 48
    x, y = found[:, :, 8:-8, 8:-8].mean((0, 2, 3)).tolist()
    assert x == pytest.approx(speed / math.hypot(1, 0.5), rel=0.2)
    assert y == pytest.approx(speed / math.hypot(1, 0.5) / 2, rel=0.2)


def test_warping_reads_displaced_points() -> None:
    image = torch.arange(12.0).view(1, 1, 3, 4)
    right = torch.tensor([1.0, 0.0])[None, :, None, None].expand(1, 2, 3, 4)
    read, inside = warp(image, right)
    torch.testing.assert_close(read[..., :-1], image[..., 1:])
    assert inside[0].tolist() == [[True, True, True, False]] * 3


@pytest.mark.parametrize("size", [48, 96])
def test_motion_is_speed_in_shorter_sides_a_second(size: int) -> None:
    clip = gliding(1.5 * size / 48, size=size)
    assert value(Motion(), clip, fps=8.0) == pytest.approx(1.5 / 48 * 8, rel=0.25)
    assert value(Motion(), clip, fps=24.0) == pytest.approx(3 * value(Motion(), clip, fps=8.0), rel=1e-5)
    upright = clip.transpose(-1, -2)
    assert value(Motion(), upright) == pytest.approx(value(Motion(), clip), rel=0.02)


def test_motion_grows_with_speed() -> None:
    found = [value(Motion(), gliding(speed)) for speed in (0.0, 0.1, 0.3, 1.0, 2.0, 4.0, 6.0)]
    assert found == sorted(found)
    assert found[0] < 1e-5
    worlds = []
    for word in SPEEDS:
        clip = render(Scene("green", "square", "left", "white", speed=word), frames=FRAMES)
        worlds.append(value(Motion(), torch.from_numpy(clip).permute(0, 3, 1, 2) / 255))
    assert worlds == sorted(worlds)
    assert worlds[2] > 3 * worlds[0]


def test_what_flickers_does_not_move() -> None:
    moving = value(Motion(), gliding(1.0))
    still = gliding(0.0)
    flicker = torch.tensor([0.0, 0.1] * 3 + [0.0])[:, None, None, None]
    noise = torch.rand(still.shape, generator=torch.Generator().manual_seed(0))
    others = {
        "brighter and darker": still * 0.8 + flicker,
        "more and less contrast": 0.5 + (still - 0.5) * (0.8 + 2 * flicker),
        "noise alone": noise,
        "black and white": torch.ones_like(still) * (flicker * 10),
        "compression noise": still + (noise - 0.5) * 6 / 255,
    }
    for name, clip in others.items():
        assert value(Motion(), clip) < 0.1 * moving, name
        assert (clip[1:] - clip[:-1]).abs().mean() > 0.005, "what a mere difference of frames would say"


@pytest.mark.parametrize(
    "places",
    [[0, 1, 2, 3, 4, 5, 6], [0, 2, 2, 4, 4, 6, 6], [0, 1, 3, 4, 6, 7, 9], [0, 2, 0, 2, 0, 2, 0], [0, 0, 3, 3, 3, 3, 3]],
    ids=str,
)
def test_smoothness_is_the_change_of_velocity(places: list[float]) -> None:
    velocity = np.diff(places)
    expected = -np.abs(np.diff(velocity)).sum() / (np.abs(velocity[1:]) + np.abs(velocity[:-1])).sum()
    assert value(Smoothness(), texture([float(x) for x in places])) == pytest.approx(expected, abs=0.12)


def test_evenness_counts_and_speed_does_not() -> None:
    even = [value(Smoothness(), gliding(speed)) for speed in (0.3, 1.0, 2.0, 4.0)]
    assert min(even) > -0.15
    jerky = [value(Smoothness(), texture([i + s * (i % 2) for i in range(FRAMES)])) for s in (0.0, 0.25, 0.5, 1.0)]
    assert jerky == sorted(jerky, reverse=True)
    assert jerky[-1] < -0.6


def test_points_are_followed() -> None:
    """A thing that glides over a background is as smooth as a frame that does, whatever it covers."""
    clip = torch.from_numpy(render(Scene("green", "star", "left", "white", speed="quickly"), height=64))
    assert value(Smoothness(), clip.permute(0, 3, 1, 2) / 255) > -0.2


def test_what_does_not_move_does_not_move_smoothly() -> None:
    noise = torch.rand(FRAMES, 3, 48, 72, generator=torch.Generator().manual_seed(0))
    for clip in (gliding(0.0), torch.full((FRAMES, 3, 48, 72), 0.3), noise):
        assert value(Smoothness(), clip) == pytest.approx(-1, abs=1e-3)
    # There is no cliff: the less a clip moves, the less its evenness is worth.
    slow = [value(Smoothness(), gliding(speed)) for speed in (0.0, 0.0005, 0.005, 0.1)]
    assert slow == sorted(slow)
    assert -0.99 < slow[1] < -0.3


def test_steadiness_is_vbenchs_formula() -> None:
    clip = (gliding(1.0) * 255).round()
    differences = [np.abs(a - b).mean() for a, b in zip(clip.numpy()[:-1], clip.numpy()[1:], strict=True)]
    assert value(Steadiness(), clip / 255) == pytest.approx((255 - np.mean(differences)) / 255, abs=1e-5)
    assert value(Steadiness(), gliding(0.0)) == 1
    black_and_white = torch.zeros(4, 3, 8, 8)
    black_and_white[1::2] = 1
    assert value(Steadiness(), black_and_white) == 0
    noise = torch.rand(FRAMES, 3, 48, 72, generator=torch.Generator().manual_seed(0)) - 0.5
    less = [value(Steadiness(), gliding(0.0) + noise * share) for share in (0.0, 0.1, 0.2)]
    assert less == sorted(less, reverse=True)


@pytest.mark.parametrize(("reward", "least"), [(Motion(), 2), (Smoothness(), 3), (Steadiness(), 2)])
def test_too_few_frames_are_refused(reward: Reward, least: int) -> None:
    assert math.isfinite(value(reward, gliding(1.0)[:least]))
    with refused("invalid", f" {least};", f" {least - 1}"):
        value(reward, gliding(1.0)[: least - 1])


@pytest.mark.parametrize("size", [(8, 8), (5, 16), (130, 66)])
def test_frames_of_any_size_are_scored(size: tuple[int, int]) -> None:
    clip = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(0))
    for reward in ALL:
        assert math.isfinite(value(reward, clip))


def test_what_is_not_finite_is_not_hidden() -> None:
    broken = gliding(1.0)
    broken[2] = float("nan")
    for reward in ALL:
        assert math.isnan(value(reward, broken)), type(reward).__name__
