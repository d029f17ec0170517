"""The verifiers read rendered clips back without a mistake, also after noise and compression, and nothing from nothing."""

from __future__ import annotations

import numpy as np
import pytest

from finetrainers.data.decode import read_frames
from finetrainers.demo.verify import Reading, obeys, read, speed_word, wanted, wanted_speed
from finetrainers.demo.world import MOTIONS, SPEEDS, Scene, caption, draw_scene, render
from finetrainers.utils.video import write_mp4


def scenes(count: int, *seed: str) -> list[Scene]:
    looks = ("plain", "plain", "striped")
    return [draw_scene(*seed, i, held_out=None, motions=tuple(MOTIONS), look=looks[i % 3]) for i in range(count)]


def mistakes(clips: list[np.ndarray], shown: list[Scene]) -> list[tuple[str, Scene, Reading]]:
    found = []
    for clip, scene in zip(clips, shown, strict=True):
        reading = read(clip)
        found += [(name, scene, reading) for name, right in obeys(reading, scene).items() if not right]
    return found


@pytest.mark.parametrize("height", [32, 64])
def test_rendered_clips_are_read_without_a_mistake(height: int) -> None:
    shown = scenes(150, "read", str(height))
    assert mistakes([render(scene, height=height) for scene in shown], shown) == []


def test_longer_clips_are_read_too() -> None:
    shown = scenes(30, "long")
    assert mistakes([render(scene, frames=17) for scene in shown], shown) == []


def test_noise_is_forgiven() -> None:
    shown = scenes(60, "noise")
    rng = np.random.default_rng(0)
    noisy = [
        (render(scene) + rng.normal(0, 6, (9, 32, 64, 3))).round().clip(0, 255).astype(np.uint8) for scene in shown
    ]
    assert len(mistakes(noisy, shown)) <= 6


def test_compression_is_forgiven(tmp_path) -> None:
    shown, decoded = scenes(60, "mp4"), []
    for scene in shown:
        write_mp4(tmp_path / "clip.mp4", render(scene), fps=25)
        decoded.append(read_frames(tmp_path / "clip.mp4", range(9), height=32, width=64).numpy())
    found = mistakes(decoded, shown)
    assert len(found) <= 5
    assert all(scene.look == "striped" for _, scene, _ in found)


@pytest.mark.parametrize("word", SPEEDS)
def test_speeds_are_told_apart(word: str) -> None:
    for motion in ("left", "right") if word == "quickly" else ("left", "right", "up", "down"):
        reading = read(render(Scene("red", "square", motion, "grey", speed=word)))
        assert speed_word(reading) == word
        assert wanted_speed(caption(Scene("red", "square", motion, "grey", speed=word))) == word
        assert reading.speed == pytest.approx(SPEEDS[word], rel=0.05)


def test_speed_is_asked_only_of_what_moves_to_another_place() -> None:
    assert wanted_speed("a red star growing quickly") is None


def test_a_wrong_clip_is_noticed() -> None:
    clip = render(Scene("red", "star", "left", "black"))
    assert obeys(read(clip), wanted("a blue circle moving right on a black background")) == {
        "colour": False,
        "shape": False,
        "motion": False,
    }
    backwards = read(clip[::-1])
    assert backwards.motion == "right"
    assert read(np.repeat(clip[:1], 9, axis=0)).motion == "still"


@pytest.mark.parametrize("level", [0, 128, 255])
def test_an_empty_clip_shows_nothing(level: int) -> None:
    reading = read(np.full((9, 32, 64, 3), level, dtype=np.uint8))
    assert reading == Reading(None, None, None, None)
    assert not any(obeys(reading, wanted(caption(Scene("red", "star", "left", "grey")))).values())


def test_pure_noise_obeys_by_chance_at_most() -> None:
    rng = np.random.default_rng(1)
    want = [wanted(caption(draw_scene("chance", i))) for i in range(30)]
    clips = rng.integers(0, 256, (30, 9, 32, 64, 3)).astype(np.uint8)
    right = [obeys(read(clip), w) for clip, w in zip(clips, want, strict=True)]
    assert sum(all(r.values()) for r in right) == 0


def test_captions_may_leave_things_open() -> None:
    want = wanted("a cat")
    assert obeys(read(render(draw_scene(0))), want) == {}
