"""Rules of clean frames that samples are given."""

from __future__ import annotations

from typing import Any

import pytest

from finetrainers.config.checks.frames import length_problems
from finetrainers.config.checks.options import Findings, check_config
from finetrainers.config.errors import Problem
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.config.root import TrainConfig

GEOMETRY = Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25)


def configured(**options: object) -> TrainConfig:
    return load_config(model_name="m", pretrained_model_name_or_path="repo", data_root="x", **options)


def findings(first_frame: str = "tokens", *, any_frame: bool = True, **options: object) -> Findings:
    names = {"text_sees_image": "sees", "last_frame": "last_frame", "image_optional": "image_optional"}
    traits: dict[str, Any] = {fact: options.pop(name) for fact, name in names.items() if name in options}
    facts = Facts(GEOMETRY, first_frame=first_frame, any_frame=any_frame, **traits)
    return check_config(configured(**options), facts=facts, prompts=[], world_size=1)


@pytest.mark.parametrize(
    ("first_frame", "any_frame", "options", "where", "kind", "value"),
    [
        ("none", False, {"frame_conditioning": "first=0.1"}, "frame_conditioning", "unsupported", "--list_models"),
        ("channels", False, {"frame_conditioning": "first=0.1,last=0.1,prefix:9=0.1"}, "frame_conditioning",
         "unsupported", "last, prefix:9; --list_models"),
        ("tokens", False, {"frame_conditioning": "random=0.1"}, "frame_conditioning", "unsupported", "random;"),
        ("channels", True, {"frame_conditioning": "last=0.1", "sliding_window_size": 33,
            "sliding_window_latents": "slice"}, "sliding_window_latents", "unsupported", "use encode"),
        ("channels", False, {"window_context": 1, "sliding_window_size": 33}, "window_context", "unsupported",
         "--list_models"),
        ("tokens", True, {"frame_conditioning": "last=0.1", "first_frame_conditioning_p": 0.1}, "frame_conditioning",
         "conflict", "--first_frame_conditioning_p"),
        ("tokens", True, {"frame_conditioning": "prefix=0.1", "sliding_window_size": 33,
            "sliding_window_latents": "slice"}, "frame_conditioning", "conflict", "--sliding_window_latents slice"),
        ("tokens", False, {"frame_conditioning": "first=0.5", "sees": True}, "frame_conditioning", "unsupported",
         "first=1"),
        ("tokens", False, {"frame_conditioning": "", "sees": True}, "frame_conditioning", "unsupported", "first=1"),
        ("channels", False, {"first_frame_conditioning_p": 0.9}, "first_frame_conditioning_p", "unsupported",
         "first=1"),
        ("channels", False, {"frame_conditioning": "first+last=0.5", "last_frame": True}, "frame_conditioning",
         "unsupported", "first+last=1"),
        ("channels", False, {"frame_conditioning": "first=1", "last_frame": True}, "frame_conditioning",
         "unsupported", "only first+last"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_be_given(
    first_frame: str, any_frame: bool, options: dict, where: str, kind: str, value: str
) -> None:
    [problem] = findings(first_frame, any_frame=any_frame, **options).errors
    assert (problem.where, problem.kind) == (f"--{where}", kind)
    assert value in problem.message


def test_what_works() -> None:
    every = "first=0.1,last=0.1,prefix:9=0.1,interpolate=0.1,random=0.1"
    sliced = {"sliding_window_size": 33, "sliding_window_latents": "slice"}
    assert findings(frame_conditioning=every).errors == []
    assert findings("channels", any_frame=False, frame_conditioning="first=0.5", image_optional=True).errors == []
    assert findings("channels", any_frame=False, frame_conditioning="first+last=1", last_frame=True).errors == []
    assert findings("channels", frame_conditioning=every, window_context=2, sliding_window_size=33).errors == []
    assert findings(frame_conditioning="last=0.1,suffix:8=0.1", **sliced).errors == []
    assert findings(frame_conditioning="", window_context=2, **sliced).errors == []
    [warning] = findings(frame_conditioning=every, window_context=2).warnings
    assert warning.startswith("--window_context ")
    assert warning.endswith(" --sliding_window_size")


def test_samples_on_channels_begin_with_an_image_or_a_video() -> None:
    facts = Facts(GEOMETRY, first_frame="channels", any_frame=True)

    def problems(**given: str) -> list[tuple[str, str]]:
        prompts = [ValidationPrompt(prompt="a", **given)]
        found = check_config(configured(), facts=facts, prompts=prompts, scored=prompts, world_size=1)
        return [(problem.where, problem.kind) for problem in found.errors]

    assert problems(image="a.png", last_image="b.png") == problems(video_prefix="a.mp4", last_image="b.png") == []
    assert problems(last_image="b.png") == [
        ("--validation_images", "required"),
        ("--eval_prompts", "required"),
    ]
    assert problems(image="a.png", video_prefix="a.mp4") == [
        ("--validation_video_prefixes", "conflict"),
        ("--eval_prompts", "conflict"),
    ]


def test_buckets_are_long_enough() -> None:
    facts, buckets = Facts(GEOMETRY, first_frame="tokens", any_frame=True), [(1, 64, 64), (17, 64, 64), (33, 64, 64)]

    windows = [(17, 64, 64), (33, 64, 64)]

    def problems(**options: object) -> list[Problem]:
        return [*length_problems(configured(**options).data, facts, buckets, windows)]

    assert problems(frame_conditioning="prefix:9=0.1,suffix:8=0.1,random=0.1") == []
    prefix, suffix, context = problems(
        frame_conditioning="prefix:17=0.1,suffix:20=0.1", sliding_window_size=17, window_context=3
    )
    assert (prefix.where, prefix.kind) == (suffix.where, suffix.kind) == ("--frame_conditioning", "invalid")
    assert (context.where, context.kind) == ("--window_context", "conflict")
    assert "prefix:17 " in prefix.message
    assert "17 frames" in prefix.message
    assert "suffix:20 " in suffix.message
    assert "multiple of 8 " in suffix.message
    assert "at most 2" in context.message
    assert problems(sliding_window_size=17, window_context=2) == []
    windows = []  # of another dataset, say; clips that are no windows have no context
    assert problems(sliding_window_size=33, window_context=4) == []
    assert problems(frame_selection="chunk", window_context=3) == []  # chunks have no context
