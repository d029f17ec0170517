"""The verifiers read rendered clips without a mistake, even after noise and compression, and nothing from nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTXVideo
from refusals import refused

from finetrainers.data.video.decode import read_frames
from finetrainers.demo.clips import to_tensor
from finetrainers.demo.measure import MODEL, prompt_adherence
from finetrainers.demo.verify import Reading, matches, read, requested_attributes, requested_speed, reward, speed_word
from finetrainers.demo.world import MOTIONS, SPEEDS, Scene, caption, draw_scene, render
from finetrainers.utils.packaged import model_path
from finetrainers.utils.video import write_mp4


def scenes(count: int, *seed: str) -> list[Scene]:
    looks = ("plain", "plain", "striped")
    return [draw_scene(*seed, i, held_out=None, motions=tuple(MOTIONS), look=looks[i % 3]) for i in range(count)]


def seen_of(reading: Reading, scene: Scene) -> dict[str, bool]:
    names = ("color", "shape", "motion", "background", "look")
    return {name: getattr(reading, name) == getattr(scene, name) for name in names}


def mistakes(clips: list[np.ndarray], shown: list[Scene]) -> list[tuple[str, Scene, Reading]]:
    found = []
    for clip, scene in zip(clips, shown, strict=True):
        reading = read(clip)
        found += [(name, scene, reading) for name, right in seen_of(reading, scene).items() if not right]
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("height", [32, 64])
def test_rendered_clips_are_read_without_a_mistake(height: int) -> None:
    shown = scenes(150, "read", str(height))
    assert mistakes([render(scene, height=height) for scene in shown], shown) == []


@pytest.mark.rotating
def test_longer_clips_are_read_too() -> None:
    shown = scenes(30, "long")
    assert mistakes([render(scene, frames=17) for scene in shown], shown) == []


@pytest.mark.rotating
def test_noise_is_forgiven() -> None:
    shown = scenes(60, "noise")
    rng = np.random.default_rng(0)
    noisy = [
        (render(scene) + rng.normal(0, 6, (9, 32, 64, 3))).round().clip(0, 255).astype(np.uint8) for scene in shown
    ]
    assert len(mistakes(noisy, shown)) <= 6


@pytest.mark.rotating
def test_compression_is_forgiven(tmp_path) -> None:
    shown, decoded = scenes(60, "mp4"), []
    for scene in shown:
        write_mp4(tmp_path / "clip.mp4", render(scene), fps=25)
        decoded.append(read_frames(tmp_path / "clip.mp4", range(9), height=32, width=64).numpy())
    found = mistakes(decoded, shown)
    assert len(found) <= 9
    assert all(scene.look == "striped" for _, scene, _ in found)


@pytest.mark.parametrize("word", SPEEDS)
def test_speeds_are_told_apart(word: str) -> None:
    for motion in ("left", "right") if word == "quickly" else ("left", "right", "up", "down"):
        reading = read(render(Scene("red", "square", motion, "grey", speed=word)))
        assert speed_word(reading) == word
        assert requested_speed(caption(Scene("red", "square", motion, "grey", speed=word))) == word
        assert reading.speed == pytest.approx(SPEEDS[word], rel=0.05)


def test_speed_is_asked_only_of_what_moves_to_another_place() -> None:
    assert requested_speed("a red star growing quickly") is None


def test_a_wrong_clip_is_noticed() -> None:
    clip = render(Scene("red", "star", "left", "black"))
    want = "a striped blue circle moving right on a white background"
    assert matches(read(clip), want) == dict.fromkeys(("color", "shape", "motion", "background", "look"), False)
    assert reward(clip, "a striped red star moving left on a white background") == 3 / 5
    assert read(clip[::-1]).motion == "right"
    assert read(np.repeat(clip[:1], 9, axis=0)).motion == "still"


def moved(*centers: tuple[float, float]) -> np.ndarray:
    """A red square at these places, one a frame."""
    return np.concatenate([render(Scene("red", "square", "still", "grey", x=x, y=y), frames=1) for x, y in centers])


@pytest.mark.parametrize(
    "centers",
    [
        [(0.5, 0.5)] * 4 + [(1.5, 0.5)] * 5,  # a jump
        [(0.4 + 0.15 * t, 0.3 + 0.05 * t) for t in (0, 1, 2, 3, 4, 5, 6, 7, 8)],  # slanting
        [(0.4 + 0.15 * t, 0.5) for t in (3, 0, 7, 1, 5, 2, 8, 4, 6)],  # out of order
        [(0.5 + 0.5 * (t % 2), 0.5) for t in range(9)],  # to and fro
        [(1.0, 0.4 + 0.2 * (t % 2)) for t in range(9)],  # trembling
    ],
    ids=["jump", "slanting", "shuffled", "swinging", "trembling"],
)
def test_other_ways_to_move_are_none_of_the_worlds(centers: list[tuple[float, float]]) -> None:
    expected = "right" if centers[1] == (0.55, 0.35) else None
    assert read(moved(*centers)).motion == expected


def test_an_arc_is_no_zigzag() -> None:
    arc = [(0.6 + 0.1 * t, 0.7 - 0.4 * np.sin(np.pi * t / 8)) for t in range(9)]
    assert read(moved(*arc)).motion != "zigzag"


def test_breathing_is_not_standing_still() -> None:
    sizes = [0.2 + 0.1 * (4 - abs(t - 4)) / 4 for t in range(9)]
    clip = np.concatenate([render(Scene("red", "circle", "still", "grey", radius=r), frames=1) for r in sizes])
    assert read(clip).motion is None


def test_a_clip_must_show_its_shape_throughout() -> None:
    clip = render(Scene("red", "star", "right", "grey", speed="quickly"))
    for gone in ([5, 6, 7, 8], [2, 3, 4, 5, 6], [0, 4]):
        broken = clip.copy()
        broken[gone] = 128
        assert read(broken) == Reading(background="grey")
    broken = clip.copy()
    broken[8] = 128  # one lost frame is forgiven, and does not change the speed
    assert read(broken).motion == "right"
    assert speed_word(read(broken)) == "quickly"


def test_what_changes_within_a_clip_is_none_of_the_two() -> None:
    a, b = (render(Scene(color, "square", "still", "grey")) for color in ("red", "blue"))
    assert read(np.stack([(a, b)[t % 2][t] for t in range(9)])).color is None
    a, b = (render(Scene("red", shape, "still", "grey")) for shape in ("star", "circle"))
    assert read(np.stack([(a, b)[t // 5][t] for t in range(9)])).shape in (None, "star")
    a, b = (render(Scene("red", "star", "still", background)) for background in ("white", "black"))
    assert read(np.stack([(a, b)[t % 2][t] for t in range(9)])).background is None


def test_only_stripes_are_striped() -> None:
    clip = render(Scene("red", "square", "still", "grey"))
    half, faded = clip.copy(), clip.astype(float)
    half[:, :, 32:] = np.where(half[:, :, 32:] == 128, 128, half[:, :, 32:] // 2)
    faded *= np.linspace(0.4, 1.6, 64)[:, None]
    assert read(half).look == "plain"
    assert read(faded.clip(0, 255).astype(np.uint8)).look != "striped"


@pytest.mark.parametrize("color", [(60, 0, 0), (255, 190, 190)])
def test_dark_and_pale_reds_are_not_red(color: tuple[int, int, int]) -> None:
    clip = render(Scene("red", "square", "still", "grey")).astype(float)
    covered = (clip[..., :1] - 128) / (228 - 128)
    reading = read((128 + covered * (np.array(color) - 128)).round().astype(np.uint8))
    assert (reading.color, reading.shape) == (None, "square")


@pytest.mark.rotating
def test_what_the_vae_keeps_is_read_without_a_mistake_but_a_few() -> None:
    """The best that a model could draw: rendered clips through the shipped VAE."""
    vae = AutoencoderKLLTXVideo.from_pretrained(model_path(MODEL), subfolder="vae", torch_dtype=torch.float32)
    shown = scenes(60, "vae")
    with torch.no_grad():
        latents = vae.encode(torch.stack([to_tensor(render(scene)) for scene in shown])).latent_dist.mode()
        decoded = vae.decode(latents, return_dict=False)[0].clamp(-1, 1)
    clips = ((decoded + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1).numpy()
    found = mistakes(list(clips), shown)
    assert len(found) <= 6
    assert all(scene.motion == "zigzag" for _, scene, _ in found)  # too quick for its linear code to stay sharp


@pytest.mark.parametrize("level", [0, 128, 255])
def test_an_empty_clip_shows_nothing(level: int) -> None:
    reading = read(np.full((9, 32, 64, 3), level, dtype=np.uint8))
    assert (reading.color, reading.shape, reading.motion, reading.look, reading.speed) == (None, None, None, None, 0)
    want = caption(Scene("red", "star", "left", "grey"))
    assert sum(matches(reading, want).values()) == (level == 128)  # the background is grey


def test_a_reward_needs_something_to_read() -> None:
    clip = render(draw_scene(0))
    assert reward(clip, caption(draw_scene(0))) == 1
    with refused("invalid", "'a cat'", "color"):
        reward(clip, "a cat")


def test_obedience_counts_what_captions_name() -> None:
    captions = ["a red star moving left slowly on a black background", "a blue ring", "a cat"]
    right = Reading("red", "star", "left", "black", "plain", speed=0.25)
    backwards = Reading("red", "star", "right", "black", "plain", speed=0.25)
    ring = Reading("blue", "ring", None, None, "striped")
    nothing = Reading()
    assert prompt_adherence(captions, [right, ring, nothing]) == {
        "color": 1, "shape": 1, "motion": 1, "background": 1, "look": 0.5, "all": 0.5, "speed": 1,
    }  # fmt: skip
    assert prompt_adherence(captions[:1], [backwards])["speed"] == 0
    assert prompt_adherence(captions[:1], [nothing])["speed"] == 0


def test_pure_noise_matches_by_chance_at_most() -> None:
    rng = np.random.default_rng(1)
    want = [caption(draw_scene("chance", i)) for i in range(30)]
    clips = rng.integers(0, 256, (30, 9, 32, 64, 3)).astype(np.uint8)
    right = [matches(read(clip), w) for clip, w in zip(clips, want, strict=True)]
    assert sum(all(r.values()) for r in right) == 0


def test_captions_may_leave_things_open() -> None:
    assert requested_attributes("a cat") == {}
    assert matches(read(render(draw_scene(0))), "a cat") == {}
