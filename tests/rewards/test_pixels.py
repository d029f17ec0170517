"""The rewards of pixels against PIL and numpy, monotone in what they measure, and each clip for itself."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from torch import Tensor

from finetrainers.rewards.base import Reward
from finetrainers.rewards.pixels import (
    Brightness,
    Color,
    Compressibility,
    Contrast,
    Incompressibility,
    Saturation,
    Sharpness,
    color_in,
    luma,
    to_uint8,
)


def clips(count: int = 3, *, seed: int = 0, height: int = 24, width: int = 32) -> Tensor:
    """Random clips of whole grey levels, smooth enough to be sharpened and blurred, `[B, 5, 3, H, W]`."""
    coarse = torch.rand(count * 5, 3, height // 4, width // 4, generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    return (fine * 255).round().div(255).view(count, 5, 3, height, width)


def value(reward: Reward, clip: Tensor, prompt: str = "") -> float:
    return float(reward.score(clip[None], [prompt], fps=8.0)["score"])


def images(clip: Tensor) -> list[Image.Image]:
    return [Image.fromarray((frame.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)) for frame in clip]


def gain(clip: Tensor, factor: float) -> Tensor:
    """More or less contrast around middle grey."""
    return 0.5 + (clip - 0.5) * factor


ALL = [
    Brightness(),
    Contrast(),
    Saturation(),
    Color(target="teal"),
    Sharpness(),
    Compressibility(),
    Incompressibility(),
]


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: type(reward).__name__)
def test_a_clip_is_scored_for_itself(reward: Reward) -> None:
    """Bit for bit the same alone, in a batch, again, and from another layout in memory; the clips stay as they are."""
    videos, prompts = clips(5, height=60, width=100).sqrt(), ["a prompt"] * 5
    before = videos.clone()
    together = reward.score(videos, prompts, fps=8.0)["score"]
    assert together.shape == (5,)
    assert together.dtype == torch.float32
    assert len(set(together.tolist())) == 5
    alone = torch.cat([reward.score(clip[None], ["other"], fps=24.0)["score"] for clip in videos])
    channels_last = videos.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    assert together.equal(alone)
    assert together.equal(reward.score(channels_last, prompts, fps=8.0)["score"])
    assert together.flip(0).equal(reward.score(videos.flip(0), prompts, fps=8.0)["score"])
    assert videos.equal(before)


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: type(reward).__name__)
def test_no_gradient_is_kept_and_prompts_must_be_as_many(reward: Reward) -> None:
    assert not reward.score(clips(1).requires_grad_(), [""], fps=8.0)["score"].requires_grad
    with pytest.raises(ValueError):
        reward.score(clips(2), [""], fps=8.0)


def test_brightness_is_pils_grey() -> None:
    for clip in clips():
        expected = np.mean([np.asarray(image.convert("L")) for image in images(clip)]) / 255
        assert value(Brightness(), clip) == pytest.approx(expected, abs=1 / 255)
    assert value(Brightness(), torch.zeros(2, 3, 4, 4)) == 0
    assert value(Brightness(), torch.ones(2, 3, 4, 4)) == pytest.approx(1)
    pure = torch.eye(3)[:, :, None, None].expand(3, 3, 4, 4)
    assert [float(f.mean()) for f in luma(pure)] == pytest.approx([0.299, 0.587, 0.114])


def test_contrast_is_the_spread_of_a_frames_grey() -> None:
    for clip in clips():
        expected = np.mean([np.asarray(image.convert("L")).std() for image in images(clip)]) / 255
        assert value(Contrast(), clip) == pytest.approx(expected, abs=1 / 255)
        flatter = [value(Contrast(), gain(clip, factor)) for factor in (0.0, 0.3, 0.6, 1.0)]
        assert flatter == sorted(flatter)
    half = torch.zeros(2, 3, 4, 4)
    half[..., :2] = 1
    assert value(Contrast(), half) == pytest.approx(0.5)
    assert value(Contrast(), torch.rand(2, 1, 1, 1).expand(2, 3, 4, 4)) == pytest.approx(0, abs=1e-6)


def test_saturation_is_the_spread_of_a_pixels_channels() -> None:
    (clip,) = clips(1)
    frames = (clip.permute(0, 2, 3, 1).numpy() * 255).round()
    assert value(Saturation(), clip) == pytest.approx(np.ptp(frames, axis=-1).mean() / 255, abs=1e-5)
    assert value(Saturation(), clip[:, :1].expand(-1, 3, -1, -1)) == 0
    assert value(Saturation(), gain(clip, 0.5)) == pytest.approx(value(Saturation(), clip) / 2)


def test_color_is_the_distance_to_the_target() -> None:
    reward = Color(target="#ff0080")
    for clip in clips():
        pixels = clip.permute(0, 2, 3, 1).double().numpy()
        distance = np.sqrt(((pixels - np.array([1.0, 0.0, 128 / 255])) ** 2).sum(-1)).mean()
        assert value(reward, clip) == pytest.approx(1 - distance / np.sqrt(3), abs=1e-6)
    target = torch.tensor([1.0, 0.0, 128 / 255])[:, None, None]
    nearer = [value(reward, clip + share * (target - clip)) for share in (0.0, 0.4, 0.8, 1.0)]
    assert nearer == sorted(nearer)
    assert nearer[-1] == pytest.approx(1, abs=1e-6)
    assert value(Color(target="white"), torch.zeros(2, 3, 4, 4)) == pytest.approx(0, abs=1e-6)


def test_color_comes_from_the_prompt() -> None:
    red = torch.tensor([1.0, 0.0, 0.0])[None, :, None, None].expand(2, 3, 4, 4)
    assert value(Color(), red, "a Red car before a blue sky") == pytest.approx(1)
    assert value(Color(target="prompt"), red, "a blue sky behind a red car") < 0.25
    assert value(Color(target="blue"), red, "a red car") < 0.25
    with refused("required", "'a car'"):
        value(Color(), red, "a car")


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("a light blue sea under a red sky", "lightblue"),
        ("a light-blue sea", "lightblue"),
        ("Lime, or light golden rod yellow?", "lime"),
        ("something light golden rod yellow", "lightgoldenrodyellow"),
        ("a bored and tired orange cat", "orange"),  # "red" stands within two words
    ],
)
def test_color_names_are_found_in_prompts(prompt: str, name: str) -> None:
    assert color_in(prompt) == name


@pytest.mark.parametrize(("target", "value"), [("tael", "'teal'"), ("#12", "target='#12'")])
def test_an_unknown_color_is_refused(target: str, value: str) -> None:
    with refused("unknown", value):
        Color(target=target)


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    kernel = np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]])
    for clip in clips():
        expected = []
        for frame in clip.double().numpy() * 255:
            grey = np.tensordot([0.299, 0.587, 0.114], frame, axes=1)
            windows = np.lib.stride_tricks.sliding_window_view(grey, (3, 3))
            expected.append((windows * kernel).sum((-1, -2)).var())
        assert value(Sharpness(), clip) == pytest.approx(np.mean(expected), rel=1e-4)
        blurred = torch.nn.functional.avg_pool2d(clip, 3, stride=1)
        assert value(Sharpness(), blurred) < value(Sharpness(), clip) < value(Sharpness(), gain(clip, 1.5))
    assert value(Sharpness(), torch.full((2, 3, 4, 4), 0.5)) == 0
    with refused("invalid", "3x3", "2x8"):
        value(Sharpness(), torch.zeros(2, 3, 2, 8))


def test_compressibility_is_minus_the_jpeg_size() -> None:
    for clip in clips():
        sizes = []
        for image in images(clip):
            file = io.BytesIO()
            image.save(file, format="jpeg", quality=95)
            sizes.append(len(file.getvalue()))
        assert value(Incompressibility(), clip) == pytest.approx(np.mean(sizes) / 1000, rel=1e-6)
        assert value(Compressibility(), clip) == -value(Incompressibility(), clip)
    noise = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    kilobytes = [value(Incompressibility(), gain(noise, factor)) for factor in (0.0, 0.2, 0.6, 1.0)]
    assert kilobytes == sorted(kilobytes)
    assert kilobytes[0] > 0


def test_bytes_are_rounded_and_have_the_channels_last() -> None:
    videos = torch.tensor([-0.1, 0.0, 0.4999 / 255, 0.5001 / 255, 1.0, 1.3]).view(1, 1, 1, 1, 6).repeat(2, 4, 3, 5, 1)
    found = to_uint8(videos)
    assert found.shape == (2, 4, 5, 6, 3)
    assert found.dtype == torch.uint8
    assert found[0, 0, 0, :, 0].tolist() == [0, 0, 0, 1, 255, 255]


def test_what_is_not_finite_is_not_hidden() -> None:
    broken = clips(1)
    broken[0, 0, 0, 0, 0] = float("nan")
    assert np.isnan(value(Brightness(), broken[0]))
    with refused("invalid", "finite"):
        value(Compressibility(), broken[0])
