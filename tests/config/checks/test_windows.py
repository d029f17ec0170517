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
    ("options", "where", "kind", "value"),
    [
        ({"sliding_window_size": 32}, "sliding_window_size", "invalid", "29 or 33"),
        (
            {"sliding_window_size": 33, "video_resolution_buckets": ["120x570x720"]},
            "video_resolution_buckets", "invalid", "120x570x720: height 570 ",
        ),
        (
            {"sliding_window_size": 33, "video_resolution_buckets": ["17x64x64", "120x64x64"]},
            "video_resolution_buckets", "conflict", "17x64x64: windows of 33 ",
        ),
        ({"sliding_window_size": 33, "frame_selection": "random"}, "frame_selection", "conflict", "random"),
        (
            {"sliding_window_size": 33, "sliding_window_latents": "slice", "first_frame": "channels"},
            "sliding_window_latents", "unsupported", "use encode",
        ),
        (
            {"sliding_window_size": 33, "sliding_window_latents": "slice", "first_frame": "tokens"},
            "first_frame_conditioning_p", "conflict", "--sliding_window_latents slice",
        ),
        (  # datasets of a file may have windows of their own
            {"dataset": "data.toml", "sliding_window_latents": "slice", "first_frame": "tokens"},
            "first_frame_conditioning_p", "conflict", "--sliding_window_latents slice",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_error(options: dict, where: str, kind: str, value: str) -> None:
    [problem] = findings(**options).errors
    assert (problem.where, problem.kind) == (f"--{where}", kind)
    assert value in problem.message


def test_what_works() -> None:
    assert findings(sliding_window_size=33, video_resolution_buckets=["120x64x64", "1x64x64"]).errors == []
    sliced = {"sliding_window_size": 33, "sliding_window_latents": "slice"}
    assert findings(**sliced).errors == []
    assert findings("tokens", **sliced, first_frame_conditioning_p=0.0).errors == []


def test_what_does_nothing_is_said() -> None:
    warnings = sorted(findings(sliding_window_stride=4, sliding_window_latents="slice").warnings)
    assert [warning.split()[0] for warning in warnings] == ["--sliding_window_latents", "--sliding_window_stride"]
    assert all(warning.endswith(" --sliding_window_size") for warning in warnings)
    assert findings(dataset="data.toml", sliding_window_stride=4).warnings == []
    for buckets in ({"video_resolution_buckets": ["33x64x64"]}, {"resolutions": [64], "frame_buckets": [1, 33]}):
        [warning] = findings(sliding_window_size=33, **buckets).warnings
        assert "33 frames" in warning
        assert "--sliding_window_size" in warning
    assert findings(sliding_window_size=33, video_resolution_buckets=["33x64x64", "90x64x32"]).warnings == []
