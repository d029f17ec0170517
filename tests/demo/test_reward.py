"""The demo reward gives what the verifiers find, for every thing that a caption can ask for."""

from __future__ import annotations

import pytest
import torch
from refusals import refused
from torch import Tensor

from finetrainers.demo.reward import DemoWorld
from finetrainers.demo.verify import reward
from finetrainers.demo.world import MOTIONS, Scene, caption, draw_scene, render

HEADS = ("all", "color", "shape", "motion", "background", "look", "speed")


def clip(scene: Scene) -> Tensor:
    return torch.from_numpy(render(scene)).permute(0, 3, 1, 2) / 255


def scores(scene: Scene, prompt: str) -> dict[str, float]:
    found = DemoWorld().score(clip(scene)[None], [prompt], fps=25.0)
    assert tuple(found) == HEADS == tuple(DemoWorld.heads)
    return {name: float(value) for name, value in found.items()}


def test_rendered_clips_have_all_that_their_captions_ask() -> None:
    scenes = [draw_scene("reward", i, held_out=None, motions=tuple(MOTIONS)) for i in range(20)]
    found = DemoWorld().score(torch.stack([clip(s) for s in scenes]), [caption(s) for s in scenes], fps=25.0)
    for name, values in found.items():
        assert values.tolist() == [1.0] * 20, name
        assert values.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"color": "blue"}, "color"),
        ({"shape": "cross"}, "shape"),
        ({"background": "white"}, "background"),
        ({"look": "striped"}, "look"),
        ({"speed": "slowly"}, "speed"),
    ],
)
def test_each_head_sees_its_own_thing(change: dict[str, str], lost: str) -> None:
    asked = {"color": "red", "shape": "square", "motion": "left", "background": "black", "speed": "quickly"}
    found = scores(Scene(**{**asked, **change}), caption(Scene(**asked)))
    assert [name for name in HEADS[1:] if found[name] == 0.0] == [lost]
    assert [name for name in HEADS[1:] if found[name] == 1.0] == [name for name in HEADS[1:] if name != lost]
    assert found["all"] == pytest.approx(1.0 if lost == "speed" else 4 / 5)


def test_a_wrong_motion_has_the_wrong_speed_too() -> None:
    found = scores(Scene("red", "square", "up", "black"), "a red square moving left on a black background")
    assert (found["motion"], found["speed"], found["color"]) == (0.0, 0.0, 1.0)
    # At rest there is no speed to be wrong.
    found = scores(Scene("red", "square", "left", "black"), "a red square standing still on a black background")
    assert (found["motion"], found["speed"]) == (0.0, 1.0)


def test_what_is_not_asked_cannot_be_wrong() -> None:
    found = scores(Scene("red", "square", "left", "black"), "something blue moving left")
    assert found == {**dict.fromkeys(HEADS, 1.0), "color": 0.0, "all": 0.5}


def test_all_is_the_verifiers_reward_and_clips_are_scored_for_themselves() -> None:
    shown = [draw_scene("shown", i, held_out=None) for i in range(6)]
    prompts = [caption(draw_scene("asked", i, held_out=None), phrasing=i) for i in range(6)]
    videos = torch.stack([clip(scene) for scene in shown])
    together = DemoWorld().score(videos, prompts, fps=25.0)
    expected = [reward(render(scene), prompt) for scene, prompt in zip(shown, prompts, strict=True)]
    assert together["all"].tolist() == pytest.approx(expected)
    assert len(set(expected)) > 2
    for i, prompt in enumerate(prompts):
        alone = DemoWorld().score(videos[i : i + 1], [prompt], fps=8.0)
        assert all(alone[name][0] == together[name][i] for name in HEADS)


def test_nothing_is_seen_in_noise() -> None:
    noise = torch.rand(1, 9, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    found = DemoWorld().score(noise, ["a red star moving left on a black background"], fps=25.0)
    assert float(found["all"]) == 0


def test_prompts_of_another_world_and_single_frames_are_refused() -> None:
    with refused("invalid", "'a dog in the park'", "color"):
        scores(Scene("red", "square", "left", "black"), "a dog in the park")
    with refused("invalid", "2 frames"):
        DemoWorld().score(torch.zeros(1, 1, 3, 32, 64), ["a red star"], fps=25.0)
