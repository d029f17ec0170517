"""Runs of a checkpoint that takes a control video with every clip."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused_options

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.plan.check import check
from finetrainers.plan.preflight import preflight
from finetrainers.training import sampling
from finetrainers.utils.video import write_mp4


@pytest.fixture
def control(options: Callable[..., dict]) -> Callable[..., dict]:
    """`control(**changes)`: options of a run of such a checkpoint."""
    return lambda **changes: options("cogvideox", version="control", **changes)


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as error:
        preflight(load_config(**values))
    return str(error.value)


@pytest.mark.rotating
def test_it_learns_from_the_control_video_and_resumes_exactly(
    control: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = control(clips=2, batch_size=2, train_steps=12, lr=2e-2, checkpointing_steps=6)
    values |= {"target_modules": ["to_k", "to_q", "to_v", "to_out.0", "proj_out", "patch_embed.proj"]}
    whole = run(**values)
    state = whole.state
    trained, batch = state.network, next(iter(state.method.steps(0, state.transformer)))[0]
    base = type(trained).from_pretrained(values["pretrained_model_name_or_path"], subfolder="transformer")
    moments = batch.clip["control_video_moments"]
    assert moments.shape == batch.moments.shape
    swapped = replace(batch, clip={"control_video_moments": moments.flip(0)})

    @torch.no_grad()
    def loss(network: Any, of: Any) -> float:
        return float(torch.stack([state.method.eval_loss(network.eval(), of, level) for level in (0.3, 0.7)]).mean())

    assert loss(trained, batch) < 0.85 * loss(base, batch)
    assert abs(loss(trained, swapped) / loss(trained, batch) - 1) > 1e-3

    again = {**values, "output_dir": str(tmp_path / "again")}
    run(**{**again, "train_steps": 6})
    resumed = run(**again, resume_from_checkpoint="latest")
    assert resumed.curve("loss", "grad_norm") == whole.curve("loss", "grad_norm")
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in resumed.weights.items())


def test_a_validation_sample_is_the_pipelines_own(
    control: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second frame of the control video, resized and cropped like a clip."""
    frames = np.arange(20, dtype=np.uint8)[:, None, None, None] * np.full((1, 64, 128, 3), 12, dtype=np.uint8)
    write_mp4(tmp_path / "pose.mp4", frames, fps=16)
    requests = []
    sample = sampling.sample_prompts

    def record(spec: Any, parts: Any, wanted: Any) -> Any:
        requests.extend(wanted)
        return sample(spec, parts, requests)

    monkeypatch.setattr("finetrainers.training.callbacks.validation.sample_prompts", record)
    done = run(**control(
        train_steps=1, validation_prompts="a ball@@@9x64x64", validation_videos=str(tmp_path / "pose.mp4"),
        validation_inference_steps=2, validation_guidance_scale=1.0,
    ))  # fmt: skip
    [video] = (done.root / "samples" / "step-000001").glob("*.mp4")
    [request] = requests
    shown = request.request.media["control_video"]
    assert shown.shape == (1, 3, 9, 64, 64)
    levels = (shown.mean((0, 1, 3, 4)) / 2 + 0.5) * 255
    torch.testing.assert_close(levels, 24.0 * torch.arange(9), rtol=0, atol=4.0)
    assert request.request.image is None
    assert video.stat().st_size > 0


def test_what_does_not_fit_is_refused_at_the_start(
    control: Callable[..., dict], make_clips: Callable[..., Path], options: Callable[..., dict], tmp_path: Path
) -> None:
    for method in ("grpo", "nft", "dpo"):
        assert re.search("--method: .* control_video .*--method sft", refusal(**control(method=method)))
    sampled = {"validation_prompts": "a@@@9x64x64", "validation_steps": 1}
    assert re.search("--validation_videos: .* control_video;", refusal(**control(**sampled)))
    assert "--validation_images: " in refusal(**control(**sampled, validation_images="x.png"))
    write_mp4(tmp_path / "short.mp4", np.zeros((8, 64, 64, 3), dtype=np.uint8), fps=8)
    (tmp_path / "text.mp4").write_text("no video")
    with refused_options(("--validation_videos", "mismatch")) as caught:
        preflight(load_config(**control(**sampled, validation_videos=str(tmp_path / "short.mp4"))))
    assert re.search(r"short\.mp4 .* 8 frames at 8 fps, .*\b9 ", str(caught.value))
    with refused_options(("--validation_videos", "unreadable")) as caught:
        preflight(load_config(**control(**sampled, validation_videos=str(tmp_path / "text.mp4"))))
    assert "text.mp4: " in str(caught.value)

    without = {"data_root": str(make_clips(2))}
    assert "data: 2 of 2 files" in refusal(**control(**without))
    report = check(load_config(**control(**without)))
    assert not report["usable"]
    assert [item["status"] for item in report["items"]] == ["missing"] * 2
    assert report["items"][0]["reason"].startswith("its control_video control_video/0.mp4: ")

    checked = preflight(load_config(**options("cogvideox", extra_columns=["control_video=pose"])))
    [warning] = checked.warnings
    assert warning.startswith("--extra_columns control_video ")
    assert checked.config.data.extra_columns == []


def test_columns_are_known_when_the_config_was_not(
    control: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint whose config is fetched with its weights; and a renamed column, in the settings of the run."""
    values = control(train_steps=1)
    folder = Path(values["data_root"])
    table = tmp_path / "t.jsonl"
    row = {"video": str(folder / "0.mp4"), "text": "a", "pose": str(folder / "control_video" / "0.mp4")}
    table.write_text(json.dumps(row))
    values |= {"dataset_file": str(table), "data_root": str(folder)}
    done = run(**values, extra_columns=["control_video=pose"])
    assert load_config(done.root / "config.toml").data.extra_columns == [("control_video", "pose")]
    assert "| `extra_columns` | control_video=pose |" in (done.root / "README.md").read_text()

    monkeypatch.setattr("finetrainers.plan.preflight._with_media", lambda config, facts: config)
    with pytest.raises(ConfigError, match=r"--extra_columns: .* control_video "):
        run(**{**values, "output_dir": str(tmp_path / "other")})
