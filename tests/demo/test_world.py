"""The little world: the same seed draws the same clip, shapes stay in the frame, captions say what is drawn."""

from __future__ import annotations

import json
import math

import av
import numpy as np
import pytest

from finetrainers.data.video.decode import read_frames
from finetrainers.demo.data import held_out_scenes, training_scenes, write_clips
from finetrainers.demo.verify import requested_attributes
from finetrainers.demo.world import (
    COLORS,
    MOTIONS,
    PHRASINGS,
    SHAPES,
    UNSEEN_MOTIONS,
    Scene,
    caption,
    draw_scene,
    is_held_out,
    render,
)


def test_a_seed_draws_one_scene() -> None:
    assert draw_scene(0, 1) == draw_scene(0, 1)
    assert len({draw_scene(0, i) for i in range(50)}) > 45
    np.testing.assert_array_equal(render(draw_scene(7)), render(draw_scene(7)))


def test_training_and_held_out_scenes_share_no_combination() -> None:
    trained = {(scene.color, scene.shape, scene.motion) for scene in training_scenes(2000)}
    held_out = {(scene.color, scene.shape, scene.motion) for scene in held_out_scenes(300)}
    assert not trained & held_out
    for position, names in enumerate((COLORS, SHAPES, [m for m in MOTIONS if m not in UNSEEN_MOTIONS])):
        # Each word by itself is known from training; only the combination is new.
        assert {c[position] for c in trained} == {c[position] for c in held_out} == set(names)


def test_one_combination_in_eight_is_held_out() -> None:
    everything = [Scene(c, s, m, "grey") for c in COLORS for s in SHAPES for m in MOTIONS]
    assert sum(map(is_held_out, everything)) / len(everything) == pytest.approx(1 / 8, abs=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_cover_what_geometry_says(shape: str) -> None:
    radius, height = 0.3, 256
    still = Scene("red", shape, "still", "black", radius=radius)
    covered = (render(still, frames=1, height=height)[0, ..., 0] > 120).sum() / height**2 / radius**2
    star_tip, star_notch = 1.15, 0.5
    exact = {
        "circle": math.pi * 0.95**2,
        "ring": math.pi * (1.02**2 - 0.54**2),
        "square": 1.7**2,
        "triangle": 3 * math.sqrt(3) * 0.58**2,
        "cross": 2 * 2 * 0.6 - 0.6**2,
        "star": 5 * star_tip * star_notch * math.sin(math.pi / 5),
    }[shape]
    assert covered == pytest.approx(exact, rel=0.02)


def test_edges_are_antialiased() -> None:
    row = render(Scene("red", "circle", "still", "black"), frames=1, height=48)[0, 24, :, 0]
    assert set(np.unique(row)) - {10, 228}  # values between ink and background


@pytest.mark.parametrize("index", range(40))
def test_shapes_stay_in_the_frame(index: int) -> None:
    clip = render(draw_scene("frame", index, held_out=None, motions=tuple(MOTIONS)), height=64).astype(int)
    inside = clip.max(axis=3) - clip.min(axis=3) > 60
    areas = inside.sum(axis=(1, 2))
    touching = inside[:, [0, -1], :].sum(axis=(1, 2)) + inside[:, :, [0, -1]].sum(axis=(1, 2))
    assert (areas > 50).all()
    assert (touching <= 24).all()  # a tip may reach the border, a body may not


@pytest.mark.parametrize("phrasing", range(PHRASINGS))
def test_captions_say_what_is_drawn(phrasing: int) -> None:
    for i in range(20):
        scene = draw_scene("said", i, held_out=None, motions=tuple(MOTIONS), look=("plain", "striped")[i % 2])
        text = caption(scene, phrasing=phrasing)
        names = ("color", "shape", "motion", "background", "look")
        assert requested_attributes(text) == {name: getattr(scene, name) for name in names}


def test_phrasings_differ() -> None:
    assert len({caption(draw_scene(3), phrasing=i) for i in range(PHRASINGS)}) == PHRASINGS
    assert (
        caption(Scene("orange", "star", "up", "grey", "slowly"))
        == "an orange star moving up slowly on a grey background"
    )


def test_clips_are_written_as_a_data_set(tmp_path) -> None:
    scenes = training_scenes(3)
    metadata = write_clips(tmp_path / "world", scenes)
    records = [json.loads(line) for line in metadata.read_text().splitlines()]
    assert [r["text"] for r in records] == [caption(s, phrasing=i) for i, s in enumerate(scenes)]
    path = tmp_path / "world" / records[0]["video"]
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.width, stream.height, stream.average_rate) == (9, 64, 32, 25)
    decoded = read_frames(path, range(9), height=32, width=64).numpy().astype(float)
    assert np.abs(decoded - render(scenes[0])).mean() < 5
