"""The color preference: what its reward gives to rendered clips, and that its captions leave a choice."""

from __future__ import annotations

import pytest
import torch
from refusals import refused
from torch import Tensor

from finetrainers.demo.color_preference import CHOICES, choice_captions, preferred, rest_shown, shown, similarity
from finetrainers.demo.verify import read
from finetrainers.demo.world import COLORS, Scene, draw_scene, is_held_out, render

PROMPT = "a red or blue square moving left on a white background"


def clip(color: str) -> Tensor:
    scene = Scene(color, "square", "left", "white")
    return torch.from_numpy(render(scene)).permute(0, 3, 1, 2) / 255


def test_the_preferred_color_scores_highest_and_the_scale_is_that_of_distances() -> None:
    clips = torch.stack([clip(color) for color in COLORS])
    scores = dict(zip(COLORS, similarity(clips, [PROMPT] * len(COLORS)).tolist(), strict=True))
    assert max(scores, key=scores.__getitem__) == "red"
    assert scores["red"] > 0.99
    distance = torch.dist(torch.tensor(COLORS["blue"]).double(), torch.tensor(COLORS["red"]).double())
    assert scores["blue"] == pytest.approx(1 - float(distance) / (3**0.5 * 255), abs=0.01)
    assert shown(clips, [PROMPT] * len(COLORS)).tolist() == [float(color == "red") for color in COLORS]


def test_a_clip_is_scored_by_its_own_caption() -> None:
    pair = torch.stack([clip("red"), clip("red")])
    first, second = similarity(pair, [PROMPT, "a cyan or orange square"]).tolist()
    assert first > 0.99
    assert second < 0.5


@pytest.mark.parametrize("prompt", ["green square", "a red or cyan square", "square"])
def test_captions_without_one_preferred_color_are_refused(prompt: str) -> None:
    with refused("invalid", repr(prompt), *CHOICES):
        preferred(prompt)


def test_captions_name_both_colors_in_both_orders() -> None:
    captions = choice_captions(16, name="test", held_out=True)
    assert len(set(captions)) == 16
    orders = set()
    for caption in captions:
        best = preferred(caption)
        words = [word for word in caption.split() if word in COLORS]
        assert set(words) == {best, CHOICES[best]}
        orders.add(tuple(words))
        assert f"an {words[0]}" in caption or f"a {words[0]}" in caption or not caption.startswith("a")
        assert "a orange" not in caption
    assert len(orders) == 2 * len(CHOICES)


def test_held_out_captions_are_of_held_out_combinations() -> None:
    scenes = [draw_scene("test", "choice", i, held_out=True, colors=(list(CHOICES)[i % 2],)) for i in range(8)]
    assert all(is_held_out(scene) for scene in scenes)


def test_the_rest_does_not_count_color() -> None:
    found = read(render(Scene("green", "square", "left", "white")))
    assert rest_shown(found, PROMPT) == 1.0
    found = read(render(Scene("green", "circle", "left", "white")))
    assert rest_shown(found, PROMPT) == 0.75
