"""Whole runs over sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from every_family import FAMILIES

from finetrainers.config.flags import parse_flags
from finetrainers.engine.training import train

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_window_is_seen_once_in_an_epoch(
    family: str, options: Callable[..., dict], run: Callable[..., Any], make_clips: Callable[..., Path]
) -> None:
    """A clip of 12 frames has four windows of 9: two steps of two, and the loss of each is the mean over both."""
    finished = run(
        **options(
            family, data_root=str(make_clips(1, frames=12)), video_resolution_buckets=["1000x64x64"],
            sliding_window_size=9, target_fps=8, train_epochs=1, batch_size=2,
        )
        | {"train_steps": None}
    )  # fmt: skip
    assert [record["step"] for record in finished.metrics if "loss" in record] == [1, 2]
    stream = finished.state.method.batches.sampler
    steps = [stream.step(step) for step in (0, 1)]
    assert sorted(clip.start for [batch] in steps for clip in batch.clips) == [0, 1, 2, 3]


def test_the_published_file_trains(
    tiny_repo: Callable[..., Path], make_clips: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """diffusion-pipe's file with its paths replaced; 36 frames give four windows of 33, two of them to a step."""
    clips = make_clips(1, frames=36)
    text = (EXAMPLES / "framepack.toml").read_text().replace("/path/to/HunyuanVideo", str(tiny_repo("hunyuan_video")))
    text = text.replace("/path/to/output", str(tmp_path / "run"))
    sizes = (EXAMPLES / "framepack_dataset.toml").read_text().replace("/path/to/videos", str(clips))
    sizes = sizes.replace("[[572, 720], [640, 640]]", "[[64, 64]]")
    flags = ["--target_fps", "8", "--train_epochs", "1"]
    (tmp_path / "dataset.toml").write_text(sizes)
    text = text.replace("examples/framepack_dataset.toml", str(tmp_path / "dataset.toml"))
    (tmp_path / "main.toml").write_text(text)
    config, _ = parse_flags(["--config", str(tmp_path / "main.toml"), *flags])
    assert config is not None
    assert train(config).step == 2
    assert (
        "4 sliding windows of 33 frames, 1 frame apart, from 1 clip; each is an example of its own"
        in capsys.readouterr().out
    )
    assert (tmp_path / "run" / "pytorch_lora_weights.safetensors").is_file()
