"""Rules of sliding windows between options."""

from __future__ import annotations

import pytest

from finetrainers.config.checks.options import Findings, check_config
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config

GEOMETRY = Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=24)


def findings(first_frame: str = "none", **options: object) -> Findings:
    data = {} if "dataset" in options else {"data_root": "x"}
    config = load_config(model_name="m", pretrained_model_name_or_path="repo", **data, **options)
    facts = Facts(GEOMETRY, first_frame=first_frame, any_frame=first_frame == "tokens")
    return check_config(config, facts=facts, prompts=[], world_size=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sliding_window_size": 32}, "--sliding_window_size: 32 frames is not 4*k+1; use 29 or 33"),
        (
            {"sliding_window_size": 33, "video_resolution_buckets": ["120x570x720"]},
            "--video_resolution_buckets: 120x570x720: height 570 is not a multiple of 16; use 560 or 576",
        ),
        (
            {"sliding_window_size": 33, "video_resolution_buckets": ["17x64x64", "120x64x64"]},
            "--video_resolution_buckets: 17x64x64: windows of 33 frames cannot be cut from 17",
        ),
        ({"sliding_window_size": 33, "frame_selection": "random"}, "--frame_selection: random has no meaning"),
        (
            {"sliding_window_size": 33, "sliding_window_latents": "slice", "first_frame": "channels"},
            "--sliding_window_latents: this checkpoint is given each window's first frame",
        ),
        (
            {"sliding_window_size": 33, "sliding_window_latents": "slice", "first_frame": "tokens"},
            "--first_frame_conditioning_p: with --sliding_window_latents slice",
        ),
        (  # datasets of a file may have windows of their own
            {"dataset": "data.toml", "sliding_window_latents": "slice", "first_frame": "tokens"},
            "--first_frame_conditioning_p: with --sliding_window_latents slice",
        ),
    ],
)
def test_what_cannot_work_is_one_error(options: dict, expected: str) -> None:
    [problem] = findings(**options).errors
    assert str(problem).startswith(expected)


def test_what_works() -> None:
    assert findings(sliding_window_size=33, video_resolution_buckets=["120x64x64", "1x64x64"]).errors == []
    sliced = {"sliding_window_size": 33, "sliding_window_latents": "slice"}
    assert findings(**sliced).errors == []
    assert findings("tokens", **sliced, first_frame_conditioning_p=0.0).errors == []


def test_what_does_nothing_is_said() -> None:
    assert sorted(findings(sliding_window_stride=4, sliding_window_latents="slice").warnings) == [
        "--sliding_window_latents has no effect without --sliding_window_size",
        "--sliding_window_stride has no effect without --sliding_window_size",
    ]
    assert findings(dataset="data.toml", sliding_window_stride=4).warnings == []
    for buckets in ({"video_resolution_buckets": ["33x64x64"]}, {"resolutions": [64], "frame_buckets": [1, 33]}):
        [warning] = findings(sliding_window_size=33, **buckets).warnings
        assert "which is one window" in warning
    assert findings(sliding_window_size=33, video_resolution_buckets=["33x64x64", "90x64x32"]).warnings == []
